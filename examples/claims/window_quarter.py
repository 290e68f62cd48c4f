"""A sliding window cuts an 8,192-token cache to a quarter: a window of 2,048.

The cache is the real one with its tensors; what a request holds depends on its length only, so no forward is needed.
"""

from __future__ import annotations

from claim import MIB, Claim, verdict

from kvframe import compose
from kvframe.comparison.timeline import follow
from kvframe.config import build_cache, build_model, cache_context

CACHES = {
    "dense": ["cache=paged"],
    "window 2,048": ["cache=sliding_window", "cache.retention.window=2048", "cache.retention.sinks=0"],
    "window 2,048, 4 sinks": ["cache=sliding_window", "cache.retention.window=2048", "cache.retention.sinks=4"],
}


def main() -> None:
    claim = Claim("A sliding window of 2,048 cuts an 8,192-token cache to a quarter", length=8192)
    length, model = claim.options.length, None
    stops, lines = range(64, length + 1, 64), {}
    for name, overrides in CACHES.items():
        cfg = compose(["model=smollm2", f"engine.max_len={length}", "engine.max_requests=1", *overrides])
        model = build_model(cfg) if model is None else model
        lines[name] = follow(build_cache(cfg, cache_context(cfg, model)), stops)
    dense = lines["dense"]["reserved"][-1]
    axes = claim.axes("tokens of the request", "MiB held")
    for name, line in lines.items():
        axes.plot(line["tokens"], [r / MIB for r in line["reserved"]], label=name, drawstyle="steps-post")
        if name != "dense":
            share = line["reserved"][-1] / dense
            peak = max(line["reserved"]) / dense
            measured = f"{share:.3f} at the end, {peak:.3f} at most"
            claim.row(f"{name}, of {dense / MIB:.0f} MiB dense", "0.25", measured, verdict(abs(share - 0.25) < 0.02))
    axes.legend()
    claim.finish("A window that begins within a block keeps the whole block: one block more than the window at most.")


if __name__ == "__main__":
    main()
