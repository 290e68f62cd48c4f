"""A shared beginning, with and without the radix index, interleaved in one run.

    python benchmarks/shared_prefix.py        # SmolLM2, bf16, 32 requests of 512 shared + 32 own tokens, 32 outputs
    python benchmarks/shared_prefix.py --requests 8 --repeat 1

Each round starts from an empty cache, so the first request of a round computes the shared tokens and the others find
them. Prints medians, their ratio, and how many tokens went through the model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from kvframe import Request, SamplingParams, build, compose
from kvframe.config import build_engine
from kvframe.report import console, table


def requests_of(args) -> list[Request]:
    random = np.random.default_rng(args.seed)
    shared = random.integers(100, 40_000, args.shared).tolist()
    sampling = SamplingParams(max_new_tokens=args.new, ignore_eos=True)
    own = [random.integers(100, 40_000, args.own).tolist() for _ in range(args.requests)]
    return [Request(prompt_tokens=shared + tokens, sampling=sampling) for tokens in own]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=512)
    parser.add_argument("--own", type=int, default=32)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--caches", default="radix,paged")
    parser.add_argument("--out", help="JSON file for the results")
    args = parser.parse_args()
    names = args.caches.split(",")
    common = [f"model={args.model}", f"model.dtype={args.dtype}", "engine.max_len=1024", "cache.memory=2GiB"]
    first = build(compose([*common, f"cache={names[0]}"]))
    engines = {names[0]: first}
    for name in names[1:]:
        engines[name] = build_engine(compose([*common, f"cache={name}"]), first.model)
    rows = {name: {"seconds": []} for name in names}
    for i in range(args.repeat):
        for name, engine in engines.items():
            engine.cache.reset()
            began = time.perf_counter()
            engine.generate(requests_of(args))
            rows[name]["seconds"].append(time.perf_counter() - began)
            rows[name]["computed_tokens"] = engine.summary()["computed_tokens"]
            print(f"round {i + 1}: {name} {rows[name]['seconds'][-1]:.1f} s", file=sys.stderr, flush=True)
    medians = {name: statistics.median(row["seconds"]) for name, row in rows.items()}
    shown = [
        (name, f"{medians[name]:.2f}", f"{min(row['seconds']):.2f} .. {max(row['seconds']):.2f}",
         row["computed_tokens"], f"{medians[name] / medians[names[0]]:.2f}")
        for name, row in rows.items()
    ]  # fmt: skip
    columns = ("cache", "seconds (median)", "min .. max", "computed tokens", f"slower than {names[0]} by")
    title = f"{args.model} {args.dtype}, {args.requests} requests of {args.shared} shared + {args.own} own tokens"
    console().print(table(shown, columns, title=f"{title}, {args.new} outputs, {torch.get_num_threads()} threads"))
    if args.out:
        Path(args.out).write_text(json.dumps({"rows": rows, "args": vars(args)}, indent=1))


if __name__ == "__main__":
    main()
