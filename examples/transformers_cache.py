"""A transformers script with one object swapped: `generate` over kvframe's caches.

    python examples/transformers_cache.py           # SmolLM2, real weights
    python examples/transformers_cache.py --tiny    # a second, random weights

First a left-padded batch under transformers' own attention and under kvframe's, then two questions about one text, of
which the second finds the text in the cache.
"""

from __future__ import annotations

import inspect
import sys

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from kvframe.hf import KVFrameCache, random_model, smollm2
from kvframe.report import human_bytes

PROMPTS = ["Once upon a time", "The capital of France is", "A cache is a place where"]
TEXT = "A block table maps the logical blocks of a request to blocks of memory, so they need not lie together. " * 4
QUESTIONS = ["What does a block table do?", "Why need blocks not lie together?"]


def encoded(tokenizer, texts: list[str], width: int) -> dict[str, torch.Tensor]:
    """Ids and mask, padded on the left; without a tokenizer the characters are the ids."""
    rows = [tokenizer(text)["input_ids"] if tokenizer else [ord(c) % 256 for c in text] for text in texts]
    longest = max(width, max(map(len, rows)))
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :], mask[i, longest - len(row) :] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def dynamic_bytes(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def main(tiny: bool) -> None:
    loaded = random_model("tiny", dtype="float32") if tiny else smollm2(dtype="float32")
    model, tokenizer = loaded.module, loaded.tokenizer
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}

    def generate(inputs, cache) -> list[list[int]]:
        output = model.generate(**inputs, **{argument: cache}, **options)
        return output[:, inputs["input_ids"].shape[1] :].tolist()

    table = Table(title=f"{len(PROMPTS)} prompts, {options['max_new_tokens']} new tokens each")
    for column in ("attention", "cache", "bytes", "same tokens"):
        table.add_column(column, justify="right" if column == "bytes" else "left")
    model.set_attn_implementation("sdpa")
    inputs, plain = encoded(tokenizer, PROMPTS, 0), DynamicCache(config=model.config)
    wanted = generate(inputs, plain)
    table.add_row("sdpa", "DynamicCache", human_bytes(dynamic_bytes(plain)), "")
    for attention, composition in [("sdpa", "paged"), ("sdpa", "int8"), ("kvframe", "paged"), ("kvframe", "int8")]:
        model.set_attn_implementation(attention)
        cache = KVFrameCache(loaded, composition, max_len=512)
        same = generate(inputs, cache) == wanted
        stats = cache.stats()
        held = human_bytes(stats.total("reserved"))
        table.add_row(attention, composition, held, "yes" if same else "no")
    console = Console(width=110)
    console.print(table)

    cache = KVFrameCache(loaded, "radix cache.memory=512MiB", max_len=512)
    for question in QUESTIONS:
        inputs = encoded(tokenizer, [f"{TEXT}\n{question}\n"], 0)
        found = cache.match(**inputs)
        console.print(f"{inputs['input_ids'].shape[1]} tokens, of which {found} need no compute: {question}")
        generate(inputs, cache)


if __name__ == "__main__":
    main("--tiny" in sys.argv[1:])
