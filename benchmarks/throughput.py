"""kvframe against transformers' own ways to decode a ragged batch, interleaved in one run.

    python benchmarks/throughput.py                           # SmolLM2, bf16, 32 requests, all baselines
    python benchmarks/throughput.py --requests 8 --repeat 1   # a quick look
    python benchmarks/throughput.py --dtype float32

Every contender runs the same seeded requests (prompts of 16 to 512 tokens, outputs of 16 to 256, greedy, EOS
ignored). Only the tokens that were asked for count. Prints medians, spread, ratios and the profile of a decode step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
from profile_step import profile_decode
from rich.console import Console
from rich.table import Table
from workloads import hf_continuous, hf_generate, mixed

from kvframe import Request, SamplingParams, build, compose


def hf_module(args):
    """The same weights as a plain transformers model."""
    from kvframe.config import build_model

    model = build_model(compose([f"model={args.model}", f"model.dtype={args.dtype}", *args.overrides]))
    model.module.set_attn_implementation("sdpa")
    return model.module


def kvframe_run(engine, jobs) -> float:
    requests = [
        Request(prompt_tokens=j.prompt, sampling=SamplingParams(max_new_tokens=j.new, ignore_eos=True)) for j in jobs
    ]
    began = time.perf_counter()
    outputs = engine.generate(requests)
    seconds = time.perf_counter() - began
    assert [len(o.output_tokens) for o in outputs] == [j.new for j in jobs]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--contenders", default="kvframe,hf_dynamic,hf_static,hf_continuous")
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("overrides", nargs="*", help="overrides for kvframe, e.g. cache=contiguous")
    args = parser.parse_args()
    jobs = mixed(args.requests)
    useful = sum(j.new for j in jobs)
    engine = build(
        compose([f"model={args.model}", f"model.dtype={args.dtype}", "engine.max_len=1024", *args.overrides])
    )
    module = hf_module(args)
    runs = {
        "kvframe": lambda: kvframe_run(engine, jobs),
        "hf_dynamic": lambda: hf_generate(module, jobs, "dynamic"),
        "hf_static": lambda: hf_generate(module, jobs, "static"),
        "hf_continuous": lambda: hf_continuous(module, jobs),
    }
    chosen = args.contenders.split(",")
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    kvframe_run(engine, jobs[:2])  # compile kernels
    for i in range(args.repeat):
        for name in chosen:
            seconds[name].append(runs[name]())
            print(f"round {i + 1}: {name} {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)
    rows = {name: {"seconds": s, "tokens_per_s": useful / statistics.median(s)} for name, s in seconds.items()}
    mine = rows["kvframe"]["tokens_per_s"] if "kvframe" in rows else None
    table = Table(
        title=f"{args.model} {args.dtype}, {args.requests} requests, {useful} tokens, {torch.get_num_threads()} threads"
    )
    for column in ("contender", "tokens/s (median)", "seconds (min .. max)", "kvframe is faster by"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, row in rows.items():
        ratio = f"{mine / row['tokens_per_s']:.2f}" if mine and name != "kvframe" else ""
        table.add_row(
            name, f"{row['tokens_per_s']:.1f}", f"{min(row['seconds']):.1f} .. {max(row['seconds']):.1f}", ratio
        )
    console = Console(width=100)
    console.print(table)
    profile = profile_decode(engine, jobs)
    console.print(profile.table())
    if args.out:
        Path(args.out).write_text(json.dumps({"rows": rows, "profile": profile.rows, "args": vars(args)}, indent=1))


if __name__ == "__main__":
    main()
