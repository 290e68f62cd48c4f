"""kvframe on a CPU against transformers' `generate` on the left-padded batch, interleaved in one run.

    python benchmarks/cpu.py                              # SmolLM2, bf16: five workloads; an hour on two cores
    python benchmarks/cpu.py --rows 1x128 8x128           # some of them
    python benchmarks/cpu.py --rows 8x128 --neighbour     # and again while another process keeps one core busy
    python benchmarks/cpu.py --first-token                # a fresh process, from its start to the first token
    python benchmarks/cpu.py --profile                    # rooms of a decode step at batch 1, 8 and 32

`asked` is what the CPU build of vLLM reaches against the same baseline on two cores with bf16 instructions. On a CPU
without them torch's bf16 products are slow, and so is the baseline; `--hf-dtype float32` takes the better one there.
Every request is greedy and ignores EOS; only the tokens that were asked for count. Prints medians, spread and ratios.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
from profile_step import profile_decode
from throughput import kvframe_run
from workloads import Job, hf_generate, mixed, uniform

from kvframe import build, compose
from kvframe.config import build_engine, build_model
from kvframe.report import console, table

SHARED = 512


def shared_prefix() -> list[Job]:
    """32 requests of 512 shared and 32 own tokens, 32 output tokens."""
    (prefix,) = uniform(1, SHARED, 1, seed=1)
    return [Job(prefix.prompt + own.prompt, 32) for own in uniform(32, 32, 1, seed=2)]


# name -> (jobs, preset, what vLLM reaches, what is asked of kvframe)
ROWS = {
    "mixed": (mixed, "paged", 4.4, 5.3),
    "shared_prefix": (shared_prefix, "radix", 10.8, 13.0),
    "1x128": (lambda: uniform(1, 128, 128), "paged", 2.3, 2.3),
    "8x128": (lambda: uniform(8, 128, 128), "paged", 3.0, 3.6),
    "32x128": (lambda: uniform(32, 128, 128), "paged", 2.8, 3.4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--hf-dtype", default="bfloat16", help="of the baseline")
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--hf-repeat", type=int, help="rounds of the baseline; default: --repeat")
    parser.add_argument("--neighbour", action="store_true", help="again beside a process that keeps one core busy")
    parser.add_argument("--first-token", action="store_true", help="only: a fresh process to its first token")
    parser.add_argument("--profile", action="store_true", help="only: where a decode step spends its time")
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("overrides", nargs="*", help="further overrides, e.g. engine.compile=true")
    args = parser.parse_args()
    if args.first_token:
        found = first_token(args)
    else:
        base = [f"model={args.model}", f"model.dtype={args.dtype}", "engine.max_len=1024", *args.overrides]
        engine = build(compose(base))
        found = profiles(engine) if args.profile else throughput(args, base, engine)
    if args.out:
        found |= {"args": vars(args), "threads": torch.get_num_threads()}
        Path(args.out).write_text(json.dumps(found, indent=1))


def throughput(args, base: list[str], engine) -> dict:
    module = build_model(compose([*base, f"model.dtype={args.hf_dtype}"])).module
    module.set_attn_implementation("sdpa")
    found = {}
    for name in args.rows:
        make, preset, vllm, asked = ROWS[name]
        jobs = make()
        mine = engine if preset == "paged" else build_engine(compose([*base, f"cache={preset}"]), engine.model)
        ours, theirs, beside = [], [], []

        def run(mine=mine, jobs=jobs) -> float:
            mine.cache.reset()
            return kvframe_run(mine, jobs)

        run()
        for i in range(args.repeat):
            ours.append(run())
            if args.neighbour:
                with busy():
                    beside.append(run())
            if i < (args.hf_repeat or args.repeat):
                theirs.append(hf_generate(module, jobs, "dynamic"))
            print(f"{name}, round {i + 1}: {ours[-1]:.2f} s, transformers {theirs[-1]:.2f} s", file=sys.stderr)
        tokens = sum(job.new for job in jobs)
        found[name] = {"kvframe": ours, "hf": theirs, "beside": beside, "tokens": tokens, "asked": asked, "vllm": vllm}
    console().print(ratios(found, args))
    return {"rows": found}


def ratios(found: dict, args):
    cells = []
    for name, row in found.items():
        mine, hf = statistics.median(row["kvframe"]), statistics.median(row["hf"])
        beside = f"{statistics.median(row['beside']) / mine:.2f}" if row["beside"] else "-"
        spread = f"{min(row['kvframe']):.1f} .. {max(row['kvframe']):.1f}"
        cells.append(
            [name, f"{row['tokens'] / mine:.1f}", spread, f"{row['tokens'] / hf:.1f}", f"{hf / mine:.2f}"]
            + [f"{row['vllm']}", f"{row['asked']}", beside]
        )
    title = f"{args.model} {args.dtype}, transformers in {args.hf_dtype}, {torch.get_num_threads()} threads"
    columns = ["row", "tok/s", "seconds", "HF tok/s", "ratio", "vLLM's", "asked", "slower beside a neighbour"]
    return table(cells, columns, title=title)


@contextmanager
def busy():
    """Another process that keeps one core busy, inside the block."""
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    time.sleep(1)
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _spin() -> None:
    while True:
        pass


def first_token(args) -> dict:
    """Seconds of `kvframe generate` with one output token, the whole process."""
    command = [sys.executable, "-m", "kvframe", "generate", f"model={args.model}", f"model.dtype={args.dtype}"]
    command += ["prompt=Once upon a time", "sampling.max_new_tokens=1", *args.overrides]
    seconds = []
    for _ in range(args.repeat + 1):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    first, *later = seconds
    spread = f"{min(later):.2f} .. {max(later):.2f}; before that {first:.2f}"
    print(f"first token after {statistics.median(later):.2f} s ({spread})")
    return {"seconds": seconds}


def profiles(engine) -> dict:
    found = {}
    for batch in (1, 8, 32):
        profile = profile_decode(engine, uniform(batch, 128, 128))
        console().print(profile.table())
        found[batch] = profile.rows
    return {"profiles": found}


if __name__ == "__main__":
    main()
