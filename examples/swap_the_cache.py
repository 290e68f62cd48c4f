"""The same prompts through several caches: what changes is the memory, not the text.

    python examples/swap_the_cache.py                                   # SmolLM2, real weights
    python examples/swap_the_cache.py model=random model.shape=tiny     # a second, no weights

Each row is one composition, named as on the command line. Reserved, used and peak are bytes of keys and values.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvframe import Request, SamplingParams, build, compose
from kvframe.report import human_bytes

CACHES = [
    ["cache=contiguous"],
    ["cache=paged"],
    ["cache=paged", "cache.layout.block_size=1"],
    ["cache=paged", "cache.layout.block_size=64"],
]
PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "A cache is a place where",
    "In the beginning there was a block table, and",
    "The three things that an engineer asks of a cache are how fast it is, how much memory it takes, and",
    "def fibonacci(n):\n",
    "Dear reader, the letter that follows was found between the pages of a book on operating systems. It said:",
    "1, 1, 2, 3, 5, 8,",
]


def main(overrides: list[str]) -> None:
    sampling = SamplingParams(max_new_tokens=24)
    table = Table(title=f"{len(PROMPTS)} prompts, 24 new tokens each")
    for column in ("cache", "tokens/s", "reserved", "used", "peak", "utilization", "same text"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    texts = None
    for cache in track(CACHES, description="decoding", console=Console(stderr=True), transient=True):
        engine = build(compose(["model=smollm2", "model.dtype=float32", "engine.max_len=512", *overrides, *cache]))
        outputs = [output.text for output in engine.generate([Request(prompt=p, sampling=sampling) for p in PROMPTS])]
        texts = texts or outputs
        figures = engine.summary()
        table.add_row(
            " ".join(cache),
            f"{figures['output_tokens_per_s']:.1f}",
            human_bytes(figures["kv_bytes_reserved"]),
            human_bytes(figures["kv_bytes_used"]),
            human_bytes(figures["kv_bytes_peak"]),
            f"{figures['utilization']:.1%}",
            "yes" if outputs == texts else "no",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
