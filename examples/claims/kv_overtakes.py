"""The KV cache overtakes the weights: context x concurrency = 2,048 x 8, 8,192 x 32, 32,768 x 64.

In the shape of a model with a context that long; the bytes come from the cache's own planes.
"""

from __future__ import annotations

from claim import GIB, Claim, verdict

from kvframe import compose
from kvframe.fitting import fit

LOADS = ((2048, 8), (8192, 32), (32768, 64))
CACHES = ("paged", "int8", "int4")


def main() -> None:
    claim = Claim("The KV cache overtakes the weights as context and concurrency grow", shape="qwen2_5_7b")
    found = {}
    for context, requests in LOADS:
        asked = ["model=random", f"model.shape={claim.options.shape}", "model.dtype=bfloat16"]
        asked += [f"caches=[{','.join(CACHES)}]", f"context={context}", f"requests={requests}"]
        found[context, requests] = fit(compose(asked, "plan"), asked)
    weights = next(iter(found.values())).model["weights_bytes"]
    for (context, requests), plan in found.items():
        rows = {row["cache"]: row["bytes_total"] for row in plan.rows}
        larger = rows["paged"] > weights
        measured = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in rows.items())
        claimed = "less" if (context, requests) == LOADS[0] else "more than the weights"
        claim.row(f"{context:,} x {requests}", claimed, measured, verdict(larger == (claimed != "less")))
    axes = claim.axes("", "GiB of keys and values")
    places = range(len(found))
    for i, name in enumerate(CACHES):
        sizes = [next(r["bytes_total"] for r in plan.rows if r["cache"] == name) / GIB for plan in found.values()]
        axes.bar([place + 0.27 * (i - 1) for place in places], sizes, width=0.25, label=name)
    axes.axhline(weights / GIB, color="C3", label=f"weights, bf16: {weights / GIB:.1f} GiB")
    axes.set_xticks(places, [f"{context:,} x {requests}" for context, requests in found])
    axes.set_yscale("log")
    axes.legend()
    claim.finish(f"{claim.options.shape}: weights {weights / GIB:.1f} GiB in bf16.")


if __name__ == "__main__":
    main()
