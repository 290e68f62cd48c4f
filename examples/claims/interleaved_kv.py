"""K and V interleaved in one block against two separate tensors: which is faster to read?

One decode step's worth of reading (scores with K, then the weighted sum of V) over a block table, with the compiled
loop of this file: the same code and the same bytes, other addresses.

    separate      K [blocks, 16, heads, 64]  V [blocks, 16, heads, 64]
    interleaved   KV [blocks, 2, 16, heads, 64]
"""

from __future__ import annotations

import numpy as np
from claim import Claim, interleaved, median, seconds, verdict
from numba import njit, prange

BLOCK, HEADS, DIM = 16, 3, 64


@njit(parallel=True, fastmath=True)
def attend(k, v, at, tables, q, out):
    """`k, v [N, P, 16, heads, 64]`: keys are `k[:, 0]`, values `v[:, at]`; `tables [R, B]`, `q, out [R, heads, 64]`."""
    for task in prange(tables.shape[0] * HEADS):
        r, h = task // HEADS, task % HEADS
        total, acc = np.float32(0.0), np.zeros(DIM, np.float32)
        for b in tables[r]:
            for s in range(BLOCK):
                score = np.float32(0.0)
                for d in range(DIM):
                    score += q[r, h, d] * k[b, 0, s, h, d]
                p = np.exp(score)
                total += p
                for d in range(DIM):
                    acc[d] += p * v[b, at, s, h, d]
        for d in range(DIM):
            out[r, h, d] = acc[d] / total


def main() -> None:
    title = "K and V interleaved in one block are no faster to read than two separate tensors"
    claim = Claim(title, requests=8, context=2048, rounds=15)
    o, random = claim.options, np.random.default_rng(0)
    per = o.context // BLOCK
    n = o.requests * per + 1
    both = random.standard_normal((n, 2, BLOCK, HEADS, DIM), dtype=np.float32) * 0.1
    k, v = both[:, :1].copy(), both[:, 1:].copy()
    tables = (random.permutation(n - 1) + 1).reshape(o.requests, per)
    q = random.standard_normal((o.requests, HEADS, DIM), dtype=np.float32) * 0.1
    outs = [np.empty_like(q) for _ in range(2)]
    runs = {
        "separate": lambda: attend(k, v, 0, tables, q, outs[0]),
        "interleaved": lambda: attend(both, both, 1, tables, q, outs[1]),
    }
    for run in runs.values():
        run()
    assert np.allclose(*outs, atol=1e-5)
    times = interleaved({name: lambda run=run: seconds(run) for name, run in runs.items()}, o.rounds)
    ratio = median(times["interleaved"]) / median(times["separate"])
    claim.row("time of interleaved / separate", "not below 1", f"{ratio:.2f}", verdict(ratio > 0.95))
    size = 2 * o.requests * o.context * HEADS * DIM * 4
    axes = claim.axes("", "GB/s read")
    for i, (name, found) in enumerate(times.items()):
        speed = [size / t / 1e9 for t in found]
        axes.bar(i, median(speed), width=0.5, alpha=0.6, label=f"{name}, median of {o.rounds}")
        axes.plot([i] * len(speed), speed, ".", color="0.3")
    axes.set_xticks(range(2), list(times))
    axes.legend()
    claim.finish("A block's K and V are 12 KiB each: far longer than what the prefetcher needs to get going.")


if __name__ == "__main__":
    main()
