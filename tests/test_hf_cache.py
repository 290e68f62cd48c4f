"""`generate` with a KVFrameCache says what it says with DynamicCache, however it generates."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from kvframe.hf import KVFrameCache
from kvframe.testing.harness import poison_free
from kvframe.testing.models import tiny_model

PAST = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
ARCHS = ("llama", "mistral", "gemma2", "gemma3", "gpt2")  # windows of 8 tokens, in some layers or in all
SMALL = "cache.layout.block_size=4 cache.num_blocks=200"
nightly = pytest.mark.nightly
COMPOSITIONS = [
    ("eager", f"paged {SMALL}"),
    ("kvframe", f"radix {SMALL}"),
    pytest.param("eager", "contiguous", marks=nightly),
    pytest.param("kvframe", "contiguous", marks=nightly),
    pytest.param("kvframe", f"paged {SMALL}", marks=nightly),
]
TIE = 1e-3  # closer logits are a tie: see docs/architecture.md
OPTIONS = {"max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
FULL = {"return_dict_in_generate": True, "output_scores": True}


class Watched(KVFrameCache):
    """What nobody holds is NaN, and the books are checked, before each forward."""

    def forward_begins(self, *args):
        self.check()
        poison_free(self.cache)
        super().forward_begins(*args)


def model_of(arch: str, attention: str):
    module = tiny_model(arch)
    module.set_attn_implementation(attention)
    return module


def draw(*shape: int) -> torch.Tensor:
    return torch.randint(3, 256, shape, generator=torch.Generator().manual_seed(sum(shape)))


def ragged() -> dict[str, torch.Tensor]:
    """Three rows of 11, 8 and 3 tokens, padded on the left."""
    ids, mask = draw(3, 11), torch.ones(3, 11, dtype=torch.long)
    for row, n in enumerate((0, 3, 8)):
        ids[row, :n] = mask[row, :n] = 0
    return {"input_ids": ids, "attention_mask": mask}


# -- ways to generate: (model, make a cache) -> outputs ---------------------------------------------------------


def greedy(model, make):
    return [model.generate(draw(2, 11), **{PAST: make()}, **OPTIONS, **FULL)]


def sampled(model, make):
    torch.manual_seed(7)
    options = {**OPTIONS, "do_sample": True, "num_return_sequences": 2}
    return [model.generate(draw(2, 11), **{PAST: make()}, **options, **FULL)]


def beams(model, make):
    return [model.generate(**ragged(), **{PAST: make()}, num_beams=3, **OPTIONS, **FULL)]


def assisted(model, make):
    noisy = tiny_model(next(a for a in ARCHS if type(tiny_model(a)) is type(model)))
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():  # a guesser that is right now and then
        for parameter in noisy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.1 * parameter.square().mean().sqrt())
    return [model.generate(draw(1, 11), **{PAST: make()}, assistant_model=noisy, **OPTIONS, **FULL)]


def looked_up(model, make):
    ids = draw(1, 5).repeat(1, 3)
    return [model.generate(ids, **{PAST: make()}, prompt_lookup_num_tokens=3, **OPTIONS, **FULL)]


def padded(model, make):
    return [model.generate(**ragged(), **{PAST: make()}, **OPTIONS, **FULL)]


def chunked(model, make):
    return [model.generate(**ragged(), **{PAST: make()}, prefill_chunk_size=4, **OPTIONS, **FULL)]


def two_turns(model, make):
    """The whole conversation is fed again; the cache goes on where it was."""
    cache, given = make(), ragged()
    first = model.generate(**given, **{PAST: cache}, **OPTIONS, **FULL)
    more = torch.cat([first.sequences, draw(3, 4)], dim=1)
    mask = torch.ones_like(more)
    mask[:, :11] = given["attention_mask"]
    return [first, model.generate(more, attention_mask=mask, **{PAST: cache}, **OPTIONS, **FULL)]


WAYS = (greedy, sampled, beams, assisted, looked_up, padded, chunked, two_turns)


def agree(ours, theirs) -> None:
    """The same tokens, up to a tie of theirs, with the same scores."""
    assert ours.sequences.shape == theirs.sequences.shape
    compared, total = 0, 0
    start = ours.sequences.shape[1] - len(ours.scores)
    for row, (a, b) in enumerate(zip(ours.sequences, theirs.sequences)):
        total += len(ours.scores)
        for step, (x, y) in enumerate(zip(ours.scores, theirs.scores)):
            known = torch.isfinite(y[row])
            assert torch.allclose(x[row][known], y[row][known], atol=TIE), f"row {row}, step {step}"
            if a[start + step] != b[start + step]:
                best = y[row].topk(2).values
                assert best[0] - best[1] < TIE, f"row {row}, step {step}: {a[start + step]}, not {b[start + step]}"
                break
            compared += 1
    assert compared > total / 2, "nearly everything was a tie"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("attention", "composition"), COMPOSITIONS)
@pytest.mark.parametrize("arch", ARCHS)
def test_says_what_dynamic_cache_says(arch, attention, composition, way):
    model, caches = model_of(arch, "eager"), []

    def make():
        caches.append(Watched(model, composition, max_len=64))
        return caches[-1]

    theirs = way(model, lambda: DynamicCache(config=model.config))
    model.set_attn_implementation(attention)
    for ours, wanted in zip(way(model, make), theirs, strict=True):
        if way is beams:  # scores of beams are sums, and rows change places
            assert torch.allclose(ours.sequences_scores, wanted.sequences_scores, atol=TIE)
        if way in (beams, sampled):
            assert torch.equal(ours.sequences, wanted.sequences)
        else:
            agree(ours, wanted)
    for cache in caches:
        cache.check()
        assert cache.stats().total("reserved") > 0
        cache.reset()
        cache.check()
        stats = cache.stats()
        assert stats.total("reserved") == stats.total("evictable") == 0 and cache.get_seq_length() == 0


@pytest.mark.parametrize("arch", ["llama", "mistral", "gpt2"])
def test_sdpa(arch):
    """The attention that transformers takes by itself leaves masks out where it can."""
    model = model_of(arch, "sdpa")
    for way in (greedy, padded, chunked):
        theirs = way(model, lambda: DynamicCache(config=model.config))
        for x, y in zip(way(model, lambda: Watched(model, f"paged {SMALL}", max_len=64)), theirs, strict=True):
            agree(x, y)


@pytest.mark.parametrize("attention", ["eager", "kvframe"])
@pytest.mark.parametrize("arch", ["llama4", "gemma3n", "deepseek_v3", "gpt_oss"])
def test_other_kinds_of_attention(arch, attention):
    """Chunks, shared keys, latents in the cache, learned sinks."""
    model = model_of(arch, "eager")
    theirs = padded(model, lambda: DynamicCache(config=model.config))
    model.set_attn_implementation(attention)
    agree(padded(model, lambda: Watched(model, f"paged {SMALL}", max_len=64))[0], theirs[0])


def test_assisted_decoding_takes_tokens_back():
    """The test above would prove little if every guess were right."""
    model = model_of("mistral", "kvframe")

    class Counted(Watched):
        taken: list = []

        def crop(self, n):
            self.taken.append(n)
            super().crop(n)

    cache = Counted(model, f"paged {SMALL}", max_len=64)
    assisted(model, lambda: cache)
    assert min(cache.taken) < 0 and 0 in cache.taken, "guesses were all right, or all wrong"


@pytest.mark.parametrize("attention", ["eager", "kvframe"])
def test_int8_differs_little(attention):
    model = model_of("llama", attention)
    exact, coded = (Watched(model, name, max_len=64) for name in ("paged", "int8"))
    with torch.no_grad():
        a, b = (model(draw(2, 20), past_key_values=cache).logits for cache in (exact, coded))
    off = float((a - b).square().mean().sqrt() / a.std())
    assert 0 < off < 0.1
    ratio = [cache.stats().total("reserved") for cache in (coded, exact)]
    assert ratio[0] < 0.4 * ratio[1]  # of 8 bits and a scale for each 8 numbers of 32


def test_pipeline():
    """`past_key_values` goes through a pipeline's options."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast, pipeline

    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    model = model_of("llama", "kvframe")
    pipe = pipeline(
        "text-generation", model=model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0")
    )
    cache = Watched(model, f"radix {SMALL}", max_len=64)
    options = {"max_new_tokens": 6, "do_sample": False}
    text = pipe("w5 w6 w7", past_key_values=cache, **options)[0]["generated_text"]
    assert cache.get_seq_length() == 8
    model.set_attn_implementation("eager")
    assert pipe("w5 w6 w7", **options)[0]["generated_text"] == text
