"""Prefix reuse: requests that begin alike compute their common beginning once.

A system prompt of 384 tokens and 32 tokens of each user's own.
"""

from __future__ import annotations

import numpy as np
from claim import Claim, interleaved, median, verdict

from kvframe import Request, SamplingParams, build, compose
from kvframe.config import build_engine


def main() -> None:
    claim = Claim(
        "Prefix reuse: a shared system prompt is computed once", requests=12, shared=384, own=32, tokens=8, rounds=3
    )
    o = claim.options
    base = ["model=smollm2", "engine.max_len=512", f"engine.max_requests={o.requests}", "cache.memory=1GiB"]
    first = build(compose([*base, "cache=paged"]))
    radix = compose([*base, "cache=radix"])
    random = np.random.default_rng(0)
    system = random.integers(100, 40_000, o.shared)
    prompts = [np.append(system, random.integers(100, 40_000, o.own)) for _ in range(o.requests)]
    sampling = SamplingParams(max_new_tokens=o.tokens, ignore_eos=True)
    summaries = {}

    def run(name: str) -> float:
        """Seconds of the whole batch, from an empty cache."""
        engine = first if name == "paged" else build_engine(radix, first.model)
        engine.generate([Request(prompt_tokens=p, sampling=sampling) for p in prompts])
        summaries[name] = engine.summary()
        return summaries[name]["seconds"]

    run("paged")
    times = interleaved({name: lambda name=name: run(name) for name in ("paged", "radix")}, o.rounds)
    computed = {name: s["computed_tokens"] for name, s in summaries.items()}
    least = o.shared + o.requests * (o.own + o.tokens - 1)
    claim.row(
        "tokens computed with radix", f"{least}, each once", f"{computed['radix']}", verdict(computed["radix"] == least)
    )
    ratio = computed["paged"] / computed["radix"]
    claim.row("tokens computed, paged / radix", "more than 1", f"{ratio:.1f}x", verdict(ratio > 1))
    faster = median(times["paged"]) / median(times["radix"])
    claim.row("time of the batch, paged / radix", "more than 1", f"{faster:.1f}x", verdict(faster > 1))
    held = summaries["paged"]["kv_bytes_peak"] / summaries["radix"]["kv_bytes_peak"]
    claim.row("KV bytes held at most, paged / radix", "more than 1", f"{held:.1f}x", verdict(held > 1))
    axes = claim.axes("", "radix relative to paged")
    names = ["tokens computed", "time", "KV bytes held"]
    axes.bar(names, [1 / ratio, 1 / faster, 1 / held], color="C2", label="radix")
    axes.axhline(1, color="0.4", linestyle=":", label="paged")
    axes.legend()
    claim.finish()


if __name__ == "__main__":
    main()
