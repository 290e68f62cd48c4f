"""A profiler that assumes 4 bytes per number doubles the figure of a bf16 model."""

from __future__ import annotations

from claim import MIB, Claim, verdict

from kvframe import build, compose
from kvframe.memprofile import profile


def main() -> None:
    claim = Claim("A profiler that assumes 4 bytes per element doubles its figure", blocks=256)
    bars = {}
    for name, cache in (("bf16", "cache=paged"), ("int8", "cache=int8")):
        engine = build(
            compose(["model=smollm2", "model.dtype=bfloat16", cache, f"cache.num_blocks={claim.options.blocks}"])
        )
        real = sum(profile(engine)["kv_allocated"].values())
        assumed = 4 * sum(tensor.numel() for tensor in engine.cache.tensors())
        bars[f"KV, {name}"] = (real, assumed)
        if name == "bf16":
            weights = {p.data_ptr(): p for p in engine.model.module.parameters()}.values()
            bars["weights, bf16"] = (sum(p.nbytes for p in weights), 4 * sum(p.numel() for p in weights))
    for what, (real, assumed) in bars.items():
        claimed, ratio = "4x for codes" if "int8" in what else "2x", assumed / real
        fine = ratio > 3 if "int8" in what else abs(ratio - 2) < 0.01
        claim.row(what, claimed, f"{assumed / MIB:.1f} MiB for {real / MIB:.1f}: {ratio:.2f}x", verdict(fine))
    axes = claim.axes("", "MiB")
    place = range(len(bars))
    axes.bar(
        [i - 0.2 for i in place], [real / MIB for real, _ in bars.values()], width=0.4, label="bytes of the tensors"
    )
    axes.bar([i + 0.2 for i in place], [a / MIB for _, a in bars.values()], width=0.4, label="numbers x 4 bytes")
    axes.set_xticks(place, list(bars))
    axes.legend()
    claim.finish()


if __name__ == "__main__":
    main()
