"""What a KVFrameCache does between forwards, what it shares and frees, and what it refuses."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from test_hf_cache import OPTIONS, PAST, SMALL, Watched, draw, model_of, ragged
from transformers import DynamicCache

from kvframe import Request, SamplingParams, compose
from kvframe.config import build_engine
from kvframe.errors import CapacityError, ConfigError, IncompatibleCacheError, RequestError
from kvframe.hf import HFModel, KVFrameCache
from kvframe.testing.harness import poison_free
from kvframe.testing.models import tiny_model

MODES = ("eager", "kvframe")
PAGED, RADIX = f"paged {SMALL}", f"radix {SMALL}"


@torch.no_grad()
def logits(model, ids, cache, mask=None):
    return model(ids, attention_mask=mask, **{PAST: cache}).logits


def both(arch, attention, composition=PAGED):
    """A model under transformers' eager attention with a DynamicCache, and the same under `attention` with ours."""
    plain, model = model_of(arch, "eager"), model_of(arch, attention)
    return (plain, DynamicCache(config=plain.config)), (model, Watched(model, composition, max_len=64))


# -- between forwards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_operations(arch, attention):
    """repeat, select, reorder and crop do to the next logits what they do with DynamicCache."""
    (plain, theirs), (model, ours) = both(arch, attention)
    theirs.activate_past_recording()
    ids, more = draw(2, 6), draw(5, 3)
    steps = [  # tokens to take back, what to do then, what is new
        (0, lambda c: None, ids),
        (0, lambda c: c.batch_repeat_interleave(3), more[[0, 1, 2, 3, 4, 0]]),
        (1, lambda c: c.reorder_cache(torch.tensor([5, 5, 0, 3, 2, 2])), more[[1, 1, 2, 3, 4, 0]]),
        (2, lambda c: None, more[[1, 0, 2, 3, 4, 4]]),
        (0, lambda c: c.batch_select_indices(torch.tensor([4, 0, 2])), more[:3]),
        (0, lambda c: c.batch_select_indices(torch.tensor([True, False, True])), more[:2]),
    ]
    for back, change, new in steps:
        for cache in (theirs, ours):
            if cache.get_seq_length():
                cache.crop(-back)
            change(cache)
        assert ours.get_seq_length() == theirs.get_seq_length()
        a, b = logits(plain, new, theirs), logits(model, new, ours)
        assert torch.allclose(a, b, atol=1e-4)
    assert ours.batch_size == 2


@pytest.mark.parametrize(
    ("attention", "composition"), [("eager", PAGED), ("kvframe", RADIX), ("kvframe", "contiguous")]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk(seed, attention, composition):
    """Forwards with padding anywhere, some of which fail, crops and changes of rows, in any order."""
    random = np.random.default_rng(seed)
    (plain, theirs), (model, ours) = both("llama", attention, composition)
    mask, failed, fail = torch.ones(2, 0, dtype=torch.long), 0, [False]

    def stumble(*args):
        if fail[0]:
            raise KeyboardInterrupt

    model.model.layers[int(random.integers(2))].register_forward_pre_hook(stumble)
    for _ in range(40):
        B, C = mask.shape
        act = random.choice(["forward", "forward", "crop", "select", "repeat"]) if C else "forward"
        if act == "crop":
            n = int(random.integers(1, min(C, 7) + 1)) if C > 1 else 0
            theirs.crop(-n), ours.crop(-n)
            mask = mask[:, : C - n]
        elif act == "select":
            index = torch.from_numpy(random.integers(0, B, random.integers(1, 5)))
            theirs.batch_select_indices(index), ours.batch_select_indices(index)
            mask = mask[index]
        elif act == "repeat" and B <= 4:
            theirs.batch_repeat_interleave(2), ours.batch_repeat_interleave(2)
            mask = mask.repeat_interleave(2, 0)
        elif C < 50:
            ids = torch.from_numpy(random.integers(3, 255, (B, random.integers(1, 9))))
            new = torch.from_numpy((random.random(ids.shape) < 0.8).astype(np.int64))
            if attention == "eager":
                new[:, 0] = 1  # what a query that sees nothing answers is nobody's business
            whole = torch.cat([mask, new], dim=1)
            fail[0] = bool(random.random() < 0.2)
            if fail[0]:
                failed += 1
                with pytest.raises(KeyboardInterrupt):
                    logits(model, ids + 1, ours, whole)
            fail[0] = False
            assert ours.get_seq_length() == C
            a, b = logits(plain, ids, theirs, whole), logits(model, ids, ours, whole)
            seen = new.bool()
            assert torch.allclose(a[seen], b[seen], atol=1e-4)
            mask = whole
        if random.random() < 0.3:  # who asks settles the last forward
            ours.check()
        poison_free(ours.cache)
    assert failed
    ours.reset()
    ours.check()


@pytest.mark.parametrize("attention", MODES)
def test_crop_says_what_is_left(attention):
    (_, _), (model, cache) = both("llama", attention)
    whole = draw(2, 20)
    logits(model, whole, cache)
    cache.crop(-5)
    assert cache.get_seq_length() == 15
    cache.crop(7)  # as older versions say it: keep 7
    assert cache.get_seq_length() == 7
    cache.crop(0)
    fresh = Watched(model, PAGED, max_len=64)
    logits(model, whole[:, :7], fresh)
    assert torch.allclose(logits(model, whole[:, 7:], cache), logits(model, whole[:, 7:], fresh), atol=1e-4)
    cache.crop(-99)
    assert cache.get_seq_length() == 0


def test_rows_share_their_beginning():
    model = model_of("llama", "kvframe")
    cache = Watched(model, PAGED, max_len=64)
    logits(model, draw(1, 16), cache)
    alone = cache.stats().total("reserved")
    cache.batch_repeat_interleave(8)
    assert cache.stats().total("reserved") == alone
    logits(model, draw(8, 1), cache)
    assert cache.stats().total("reserved") == 3 * alone  # 4 blocks together, one more for each of 8


def test_a_forward_that_failed_was_never_there():
    for attention in MODES:
        model = model_of("llama", attention)
        cache, fresh = (Watched(model, PAGED, max_len=64) for _ in range(2))
        for each in (cache, fresh):
            logits(model, draw(2, 9), each)

        def fail(*args):
            raise KeyboardInterrupt

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            logits(model, draw(2, 5), cache)
        hook.remove()
        assert cache.get_seq_length() == 9
        assert torch.equal(logits(model, draw(2, 4), cache), logits(model, draw(2, 4), fresh))


# -- what it shares and frees ----------------------------------------------------------------------------------


def test_prefixes_are_found_again():
    """`match` gives a new batch what an earlier one has computed; `generate` computes the rest."""
    model, seen = model_of("llama", "kvframe"), []
    model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    cache, text = Watched(model, RADIX, max_len=64), draw(1, 21)
    first = model.generate(text, **{PAST: cache}, **OPTIONS)
    cache.release()
    assert cache.get_seq_length() == 0 and cache.stats().total("reserved") == 0
    again = torch.cat([text[:, :15], draw(1, 4)], dim=1)
    seen.clear()
    assert cache.match(again) == 15 == cache.get_seq_length()
    out = model.generate(again, **{PAST: cache}, **OPTIONS)
    assert seen[0] == 4
    fresh = Watched(model, PAGED, max_len=64)
    assert torch.equal(out, model.generate(again, **{PAST: fresh}, **OPTIONS))
    assert cache.match(text) == 20
    assert torch.equal(model.generate(text, **{PAST: cache}, **OPTIONS), first)
    assert cache.stats().hit_tokens == 35
    cache.reset()
    assert cache.match(text) == 0


def test_prefixes_of_a_padded_batch():
    """All rows begin at the same column: the first that some row has to compute."""
    model, given = model_of("gemma3", "kvframe"), ragged()
    cache = Watched(model, RADIX, max_len=64)
    wanted = model.generate(**given, **{PAST: cache}, **OPTIONS)
    assert cache.match(**given) == 10
    assert torch.equal(model.generate(**given, **{PAST: cache}, **OPTIONS), wanted)
    given["input_ids"][1, 6] += 1  # the fourth token of a row that begins at column 3; another one begins at 8
    assert cache.match(**given) == 6
    fresh = Watched(model, PAGED, max_len=64)
    wanted = model.generate(**given, **{PAST: fresh}, **OPTIONS)
    assert torch.equal(model.generate(**given, **{PAST: cache}, **OPTIONS), wanted)


def test_embeddings_match_nothing():
    """Tokens without ids are stored, and never found as a prefix."""
    model = model_of("llama", "kvframe")
    cache, text = Watched(model, RADIX, max_len=64), draw(1, 12)
    embeds = model.get_input_embeddings()(text)
    out = model.generate(inputs_embeds=embeds, **{PAST: cache}, **OPTIONS)
    fresh = Watched(model, PAGED, max_len=64)
    assert torch.equal(out, model.generate(text, **{PAST: fresh}, **OPTIONS)[:, 12:])
    assert cache.match(text) == 0


def test_windows_give_back():
    for attention in MODES:
        model = model_of("mistral", attention)
        cache = Watched(model, PAGED, max_len=64)
        for _ in range(10):
            logits(model, draw(2, 5), cache)
        blocks = cache.stats().groups[0]
        assert blocks.reserved <= 2 * 5 * blocks.block_bytes  # 8 tokens and 5 new ones in blocks of 4, of 50


def test_nothing_stays_behind():
    model = model_of("llama", "kvframe")
    cache = KVFrameCache(model, PAGED, max_len=64)
    logits(model, draw(2, 9), cache)
    gone = [weakref.ref(cache), weakref.ref(cache.cache)]
    gc.collect()
    gc.disable()
    try:
        del cache
        assert [ref() for ref in gone] == [None, None], "the memory of a cache waits for the garbage collector"
    finally:
        gc.enable()


COMPOSED = {
    "int8": ["cache=int8"],
    "int4": ["cache=int4"],
    "window and sinks": ["cache=sliding_window", "cache.retention.window=12", "cache.retention.sinks=3"],
    "turned": ["cache=sliding_window", "cache.retention.window=12", "cache.retention.positions=cache"],
    "radix int4": ["cache=radix", "cache/codec=int4"],
}


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_says_what_the_engine_says(arch, name):
    """Compositions that transformers knows nothing of, on a padded batch: the engine's tokens, from one model."""
    words, model = [*COMPOSED[name], "cache.num_blocks=80"], HFModel(tiny_model(arch))
    cache, given = Watched(model, words, max_len=64), ragged()
    out = model.module.generate(**given, **{PAST: cache}, **OPTIONS)[:, 11:]
    engine = build_engine(compose([*words, "engine.max_len=64"]), model)
    sampling = SamplingParams(max_new_tokens=14, ignore_eos=True)
    prompts = [row[mask.bool()].numpy() for row, mask in zip(given["input_ids"], given["attention_mask"])]
    outputs = engine.generate([Request(prompt_tokens=prompt, sampling=sampling) for prompt in prompts])
    assert out.tolist() == [output.output_tokens for output in outputs]
    cache.check()


# -- what it refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("composition", "why"),
    [
        ("radix", "an index"),
        ("int4", "seals groups"),
        ("sliding_window cache.retention.window=12", "retention window12"),
        ("sliding_window cache.retention.sinks=0", "retention window1024"),
    ],
)
def test_what_transformers_cannot_be_told(composition, why):
    with pytest.raises(IncompatibleCacheError, match=r'set_attn_implementation\("kvframe"\)') as error:
        KVFrameCache(model_of("llama", "sdpa"), composition, max_len=64)
    assert why in str(error.value)


def test_reasons_come_together():
    with pytest.raises(IncompatibleCacheError) as error:
        KVFrameCache(model_of("llama", "sdpa"), "radix cache/codec=int4 cache/retention=sliding_window", max_len=64)
    assert len(error.value.reasons) == 3


@pytest.mark.parametrize("attention", MODES)
def test_limits(attention):
    model = model_of("llama", attention)
    cache = KVFrameCache(model, "paged", max_len=24, max_batch=3)
    with pytest.raises(CapacityError, match="max_batch=4"):
        logits(model, draw(4, 5), cache)
    logits(model, draw(2, 20), cache)
    with pytest.raises(RequestError, match="a batch of 2 and is given one of 3"):
        logits(model, draw(3, 1), cache)
    with pytest.raises(CapacityError, match="max_len=24"):
        logits(model, draw(2, 5), cache)
    with pytest.raises(CapacityError, match="max_batch"):
        cache.batch_repeat_interleave(2)
    logits(model, draw(2, 4), cache)
    cache.check()
    small = KVFrameCache(model, "paged cache.num_blocks=3", max_len=64)
    logits(model, draw(2, 16), small)
    with pytest.raises(CapacityError, match="cache.num_blocks"):
        logits(model, draw(2, 1), small)
    small.check()
    assert small.get_seq_length() == 16
    small.batch_select_indices([0])
    logits(model, draw(1, 1), small)


def test_wrong_models():
    for attention in MODES:
        llama, gpt2 = model_of("llama", attention), model_of("gpt2", attention)
        cache = KVFrameCache(llama, "paged", max_len=64)
        with pytest.raises(RequestError, match="made for LlamaForCausalLM"):
            logits(gpt2, draw(1, 5), cache)
        cache.check()
    with pytest.raises(RequestError, match="made for LlamaForCausalLM"):  # kvframe has to see the mask
        llama.model(draw(1, 5), **{PAST: cache}, use_cache=True)


def test_attention_that_changes():
    model = model_of("llama", "eager")
    plain = KVFrameCache(model, "paged", max_len=64)
    model.set_attn_implementation("kvframe")
    with pytest.raises(ConfigError, match="after model.set_attn_implementation"):
        logits(model, draw(1, 5), plain)
    cache = KVFrameCache(model, "paged", max_len=64)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match="after model.set_attn_implementation"):
        logits(model, draw(1, 5), cache)


def test_kvframe_attention_without_a_cache():
    """Nothing of an earlier step is taken for this one."""
    model = model_of("llama", "kvframe")
    with pytest.raises(ConfigError, match="nothing of kvframe runs"):
        model(draw(1, 5))
    cache = KVFrameCache(model, "paged", max_len=64)
    logits(model, draw(1, 5), cache)
    for given in (None, DynamicCache(config=model.config)):
        with pytest.raises(ConfigError, match="KVFrameCache"):
            logits(model, draw(1, 1), given)
    engine = build_engine(compose(["cache=paged", "engine.max_len=64"]), HFModel(model))
    engine.generate([Request(prompt_tokens=[5], sampling=SamplingParams(max_new_tokens=2, ignore_eos=True))])
    with pytest.raises(ConfigError, match="KVFrameCache"):
        model(draw(1, 1))


def test_masks():
    model, given = model_of("gemma3", "kvframe"), ragged()
    cache = KVFrameCache(model, "paged", max_len=64)
    ids, mask = given["input_ids"], given["attention_mask"]
    logits(model, ids, cache, mask)
    with pytest.raises(RequestError, match="which of the held columns"):
        logits(model, draw(3, 2), cache)  # no mask: all are tokens
    with pytest.raises(RequestError, match=r"a mask \[3, 13\]"):
        logits(model, draw(3, 2), cache, torch.ones(3, 2))
    with pytest.raises(RequestError, match="2 dimensions"):
        logits(model, draw(3, 2), cache, torch.ones(3, 1, 2, 13))
    with pytest.raises(RequestError, match="padding_side"):
        logits(model, draw(3, 2), cache, torch.cat([mask, torch.tensor([[0, 1]] * 3)], dim=1))
    logits(model, draw(3, 2), cache, torch.cat([mask, torch.ones(3, 2, dtype=torch.long)], dim=1))
    cache.check()


def test_padding_between_without_windows():
    """A model without windows does not mind where padding is."""
    (plain, theirs), (model, ours) = both("llama", "kvframe")
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    ids = draw(2, 7)
    for part in (slice(0, 5), slice(5, 7)):
        a, b = (logits(m, ids[:, part], c, mask[:, : part.stop]) for m, c in ((plain, theirs), (model, ours)))
        real = mask[:, part].bool()
        assert torch.allclose(a[real], b[real], atol=1e-4)


def test_what_was_given_back_cannot_come_again():
    model = model_of("mistral", "kvframe")
    cache = KVFrameCache(model, PAGED, max_len=64)
    for _ in range(6):
        logits(model, draw(1, 5), cache)
    with pytest.raises(RequestError, match="cut to its first 12 tokens"):
        cache.crop(12)
    with pytest.raises(RequestError, match="lost"):
        logits(model, draw(1, 1), cache)
    cache.reset()
    logits(model, draw(1, 1), cache)


def test_no_gradients():
    for attention in MODES:
        model = model_of("llama", attention)
        with pytest.raises(RequestError, match=r"torch.no_grad\(\)"):
            model(draw(1, 5), **{PAST: KVFrameCache(model, "paged", max_len=64)})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"composition": "padged"}, "cache=padged does not exist"),
        ({"composition": 5}, "composition=5 cannot be used"),
        ({"composition": "paged cache/codec=int7"}, "cache/codec=int7 does not exist"),
        ({"max_len": 0}, "max_len=0 cannot be used"),
        ({"max_len": 4096}, "max_len=4096 is more than the 2048 tokens"),
        ({"max_batch": 0}, "max_batch=0 cannot be used"),
        ({"prefill_chunk": True}, "prefill_chunk=True cannot be used"),
    ],
)
def test_wrong_values(options, why):
    with pytest.raises(ConfigError, match=why):
        KVFrameCache(model_of("llama", "eager"), **options)


def test_not_a_model():
    with pytest.raises(ConfigError, match="is no model"):
        KVFrameCache("gpt2", "paged")


def test_a_config_is_a_composition():
    model = model_of("llama", "eager")
    cache = KVFrameCache(model, compose(["cache=paged", "cache.layout.block_size=2", "engine.max_len=32"]))
    assert cache.cache.block_size == 2 and cache.get_max_length() == 32
    assert model.config._attn_implementation == "eager"
