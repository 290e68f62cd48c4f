"""Attention kernels against the copy bandwidth and the matrix rate of the machine, checked before they are timed.

    python benchmarks/kernels.py                      # CUDA: Llama-3-8B and Qwen2.5-0.5B heads; CPU: small ones
    python benchmarks/kernels.py --kernel reference --rounds 3

Decode: the bytes of all keys and values that a step reads, over its time, against what a plain copy moves per second
(bytes read and written). Prefill: 4 x tokens x keys / 2 x head size x query heads operations, against a bf16 matrix
product. Each case is held against the `reference` kernel first, on its first request. Medians; contenders take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvframe import compose
from kvframe.config import build_cache, build_kernels
from kvframe.evaluation.teacher import Text
from kvframe.interfaces import CacheContext
from kvframe.kernels.reference import ReferenceKernel
from kvframe.report import console, human_seconds, table
from kvframe.types import LayerSpec

HEADS = {"llama3_8b": (32, 8, 128), "qwen2_5_0_5b": (14, 2, 64), "smollm2": (9, 3, 64)}
GPU = [("llama3_8b", 64, 8192), ("llama3_8b", 1, 131072), ("qwen2_5_0_5b", 64, 8192)]
CPU = [("smollm2", 8, 1024), ("smollm2", 1, 4096)]
CODECS = ("none", "int8", "fp8", "int4")
NEAR = {"bfloat16": 3e-2, "float32": 1e-4}
FILL = 4096  # tokens of a prompt that are stored at once


@dataclass
class Case:
    """One layer with its requests' keys and values stored, and a step that adds `new` tokens to each."""

    cache: object
    plan: object
    q: torch.Tensor  # [T, Hq, D]
    nbytes: int  # of the keys and values that the step reads

    def attend(self) -> torch.Tensor:
        layer = self.cache.storage.layers[0]
        return layer.kernel.attend(self.q, layer, self.plan)


def make(kernel: str, codec: str, heads, batch: int, context: int, new: int, dtype: str, device: str) -> Case:
    hq, hkv, d = heads
    cfg = compose([f"kernel={kernel}", f"cache/codec={codec}", f"cache.num_blocks={batch * -(-context // 16) + 1}"])
    layer = LayerSpec(0, hq, hkv, d, d, d**-0.5, dtype=dtype)
    kernels = build_kernels(cfg)
    made = CacheContext((layer,), dtype, device, context, batch, max(FILL, batch * new), kernels)
    cache = build_cache(cfg, made)
    held, draw = cache.storage.layers[0], torch.Generator(device).manual_seed(0)
    numbers = lambda n, h: torch.randn(n, h, d, generator=draw, device=device).to(getattr(torch, dtype))
    requests = [Text(np.zeros(context, dtype=np.int32), salt=str(i)) for i in range(batch)]
    for request in requests:
        cache.admit(request)
        while request.computed < context - new:
            n = min(FILL, context - new - request.computed)
            assert cache.grow(request, n)
            held.kernel.store(numbers(n, hkv), numbers(n, hkv), held, cache.plan([(request, n)]))
            cache.commit(request, n)
            request.computed += n
    assert all(cache.grow(request, new) for request in requests)
    plan = cache.plan([(request, new) for request in requests])
    held.kernel.store(numbers(batch * new, hkv), numbers(batch * new, hkv), held, plan)
    return Case(cache, plan, numbers(batch * new, hq), int(batch * context * sum(cache.token_bytes)))


def check(case: Case, dtype: str) -> float:
    """Largest difference to the definition."""
    layer = case.cache.storage.layers[0]
    want = ReferenceKernel().attend(case.q.float(), layer, case.plan)
    error = float((case.attend().float() - want).abs().max() / want.abs().max())
    assert error <= NEAR[dtype], f"the kernel {layer.kernel.name} is off by {error:.3g}"
    return error


def seconds(work, device: str) -> float:
    """Of one call; on CUDA between two events."""
    if device == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def median(works: dict, device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(3):
        for work in works.values():
            work()
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(seconds(work, device))
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=list(NEAR))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", help="JSON file for the rows")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 2**30 if device == "cuda" else 2**27
    a, b = torch.zeros(size, dtype=torch.uint8, device=device), torch.empty(size, dtype=torch.uint8, device=device)
    n = 8192 if device == "cuda" else 1024
    m = torch.randn(n, n, device=device).to(torch.bfloat16 if device == "cuda" else torch.float32)
    top = median({"copy": lambda: b.copy_(a), "matmul": lambda: m @ m}, device, 5)
    bandwidth, rate = 2 * size / top["copy"], 2 * n**3 / top["matmul"]
    rows = []
    for shape, batch, context in GPU if device == "cuda" else CPU:
        cases = {c: make(args.kernel, c, HEADS[shape], batch, context, 1, args.dtype, device) for c in CODECS}
        errors = {c: check(case, args.dtype) for c, case in cases.items()}
        times = median({c: case.attend for c, case in cases.items()}, device, args.rounds)
        for c, case in cases.items():
            share = case.nbytes / times[c] / bandwidth
            rows.append(
                ["decode", shape, f"{batch} x {context:,}", c, case.cache.storage.layers[0].kernel.name]
                + [human_seconds(times[c]), f"{share:.1%}", f"{times['none'] / times[c]:.2f}", f"{errors[c]:.1e}"]
            )
    shape, context = ("llama3_8b", 8192) if device == "cuda" else ("smollm2", 512)
    hq, _, d = HEADS[shape]
    case = make(args.kernel, "none", HEADS[shape], 1, context, context, args.dtype, device)
    error = check(case, args.dtype) if device == "cpu" else float("nan")  # the definition needs all scores at once
    took = median({"prefill": case.attend}, device, args.rounds)["prefill"]
    share = 4 * d * hq * context * (context + 1) / 2 / took / rate
    rows.append(
        ["prefill", shape, f"1 x {context:,}", "none", case.cache.storage.layers[0].kernel.name]
        + [human_seconds(took), f"{share:.1%}", "", f"{error:.1e}"]
    )
    title = f"{device}, {args.dtype}: copy {bandwidth / 1e9:,.1f} GB/s, matrix product {rate / 1e12:,.2f} Tflop/s"
    columns = ["phase", "heads of", "requests", "codec", "kernel", "time", "of the machine", "against none", "error"]
    console().print(table(rows, columns, title=title))
    if args.out:
        facts = {"bandwidth": bandwidth, "rate": rate, "rows": [dict(zip(columns, row)) for row in rows]}
        Path(args.out).write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
