"""KV reads grow linearly with the batch and overtake the reads of the weights.

A decode step reads all weights once, whatever the batch, and every request's keys and values. They are equal at
B = weights / (context x bytes per token).
"""

from __future__ import annotations

import numpy as np
from claim import MIB, Claim, decode_step, verdict

from kvframe import Request, SamplingParams, build, compose

BATCHES = (1, 2, 4, 8, 16, 32)


def main() -> None:
    claim = Claim("KV reads grow linearly with the batch and overtake the weights", context=512, tokens=64)
    o = claim.options
    base = ["model=smollm2", f"engine.max_len={o.context + o.tokens}", f"engine.max_requests={BATCHES[-1]}"]
    engine = build(compose([*base, "cache=paged", "cache.memory=1GiB"]))
    random, sampling = np.random.default_rng(0), SamplingParams(max_new_tokens=o.tokens, ignore_eos=True)
    weights, per_token = engine.model.weight_bytes, sum(engine.cache.token_bytes)
    reads, steps = [], []
    for batch in BATCHES:
        prompts = [random.integers(100, 40_000, o.context - 1) for _ in range(batch)]
        steps.append(decode_step(engine, [Request(prompt_tokens=p, sampling=sampling) for p in prompts]))
        reads.append(batch * o.context * per_token)
        held = engine.summary()["kv_bytes_peak"]
        blocks = -(-(o.context + o.tokens) // 16) * 16 * per_token * batch
        assert held <= blocks, (held, blocks)
    crossing = weights / (o.context * per_token)
    linear = np.polyfit(BATCHES, steps, 1)
    claim.row(
        "bytes of KV per step, batch 32 / batch 1",
        "32x",
        f"{reads[-1] / reads[0]:.0f}x",
        verdict(reads[-1] == 32 * reads[0]),
    )
    measured = f"{crossing:.0f} requests of {o.context} tokens"
    claim.row("KV reads equal the weights at", "some batch", measured, verdict(crossing < BATCHES[-1]))
    growth = f"{1e3 * steps[0]:.0f} ms at 1, {1e3 * steps[-1]:.0f} ms at 32 ({1e3 * linear[0]:.1f} ms per request)"
    claim.row("time of a decode step", "grows", growth, verdict(steps[-1] > steps[0]))
    axes = claim.axes("requests in the batch", "MiB read in a decode step")
    axes.plot(BATCHES, [r / MIB for r in reads], "o-", label="keys and values")
    axes.axhline(weights / MIB, color="C3", label="weights")
    axes.axvline(crossing, color="0.5", linestyle=":", label=f"equal at {crossing:.0f}")
    other = axes.twinx()
    other.plot(BATCHES, [1e3 * s for s in steps], "s--", color="C2", label="measured step, ms (right)")
    other.set_ylabel("ms for a decode step")
    other.set_ylim(bottom=0)
    handles = [*axes.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, fontsize=8)
    claim.finish("Linear layers cost more with the batch as well, where a machine multiplies no faster than it reads.")


if __name__ == "__main__":
    main()
