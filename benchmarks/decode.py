"""Whole decode steps against the roofline, and against transformers in the same run.

    python benchmarks/decode.py                       # CUDA: Llama-3-8B and Qwen2.5-0.5B shapes; CPU: SmolLM2's, small
    python benchmarks/decode.py --baselines           # also transformers: static cache, continuous batching

Random weights in the shape of the model, bf16. A step reads all weights once and the keys and values of every request;
the roofline is that many bytes over the copy bandwidth. Steps in which every request gets one token are timed, medians.
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
from workloads import hf_continuous, hf_generate, uniform

from kvframe import Request, SamplingParams, build, compose
from kvframe.comparison.plain import plain
from kvframe.report import console, human_seconds, table

GPU = {"llama3_8b": [(1, 4096), (8, 4096), (64, 4096), (256, 2048)], "qwen2_5_0_5b": [(1, 4096), (8, 4096), (64, 4096)]}
CPU = {"smollm2_135m": [(1, 256), (8, 256)]}


def bandwidth(device: str) -> float:
    size = 2**30 if device == "cuda" else 2**27
    a, b = torch.zeros(size, dtype=torch.uint8, device=device), torch.empty(size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(7):
        began = time.perf_counter()
        b.copy_(a)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 2 * size / statistics.median(times)


def steps(engine, jobs) -> tuple[list[float], float]:
    """Seconds of the pure decode steps of all jobs, and of the whole run."""
    sampling = lambda job: SamplingParams(max_new_tokens=job.new, ignore_eos=True)
    times, computed, began = [], 0, time.perf_counter()
    run = engine.steps(Request(prompt_tokens=job.prompt, sampling=sampling(job)) for job in jobs)
    while True:
        start = time.perf_counter()
        if next(run, None) is None:
            return times, time.perf_counter() - began
        if engine.meter.computed - computed == len(jobs):
            times.append(time.perf_counter() - start)
        computed = engine.meter.computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=32, help="output tokens of each request")
    parser.add_argument("--baselines", action="store_true")
    parser.add_argument("--out", help="JSON file for the rows")
    parser.add_argument("overrides", nargs="*", help="further overrides for kvframe")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    speed, rows = bandwidth(device), []
    for shape, runs in (GPU if device == "cuda" else CPU).items():
        longest, most = max(context for _, context in runs), max(batch for batch, _ in runs)
        new = args.new + most * longest // 2048  # while the last prompts are computed the first requests decode
        limits = [f"engine.max_len={longest + new}", f"engine.max_requests={most}", "engine.max_step_tokens=2048"]
        base = ["model=random", f"model.shape={shape}", "model.dtype=bfloat16", f"model.device={device}", *limits]
        engine = build(compose([*base, "cache=paged", *args.overrides]))
        for batch, context in runs:
            jobs = uniform(batch, context, args.new + batch * context // 2048, vocabulary=engine.model.vocab_size)
            times, total = steps(engine, jobs)
            read = engine.model.weight_bytes + batch * (context + args.new / 2) * sum(engine.cache.token_bytes)
            step = statistics.median(times)
            row = [shape, batch, f"{context:,}", human_seconds(step), f"{read / speed / step:.1%}"]
            for run in (lambda m, j: hf_generate(m, j, "static"), hf_continuous) if args.baselines else ():
                with plain(engine.model) as module:
                    module.set_attn_implementation("sdpa")
                    row.append(f"{run(module, jobs) / total:.2f}")
            rows.append(row)
        del engine
    columns = ["shape", "batch", "context", "decode step", "of the roofline"]
    columns += ["faster than static", "than continuous"] if args.baselines else []
    console().print(table(rows, columns, title=f"{device}: copy {speed / 1e9:,.1f} GB/s"))
    if args.out:
        Path(args.out).write_text(json.dumps([dict(zip(columns, row)) for row in rows], indent=1))


if __name__ == "__main__":
    main()
