"""GPT-3 175B takes "about 2.5 MB per token": is that right?

96 layers of 96 heads of 128 numbers, for K and for V, in 2 bytes.
"""

from __future__ import annotations

from claim import MIB, Claim, verdict

from kvframe import compose
from kvframe.fitting import fit


def main() -> None:
    claim = Claim('GPT-3 175B: "about 2.5 MB per token"')
    asked = ["model=random", "model.shape=gpt3_175b", "model.dtype=float16", "caches=[paged,int8,int4]"]
    rows = fit(compose(asked, "plan"), asked).rows
    sizes = {row["cache"]: row["bytes_per_token"] for row in rows}
    real = sizes["paged"]
    claim.row("bytes per token, fp16", "2.5 MB", f"{real} = {real / MIB:g} MiB", verdict(abs(real / 2.5e6 - 1) < 0.1))
    claim.row("K alone, fp16", "2.5 MB", f"{real / 2 / MIB:g} MiB", "close: half of the cache was counted")
    claim.row("K and V in int8", "2.5 MB", f"{sizes['int8'] / MIB:.2f} MiB", "close: or one byte per number")
    axes = claim.axes("", "MiB per token")
    names = [*sizes, "K alone, fp16"]
    axes.bar(
        names,
        [*(size / MIB for size in sizes.values()), real / 2 / MIB],
        color=["C0", "C0", "C0", "C7"],
        label="computed",
    )
    axes.axhline(2.5e6 / MIB, color="C3", linestyle=":", label="claimed: 2.5 MB")
    axes.legend()
    claim.finish("2 x 96 layers x 96 heads x 128 x 2 bytes = 4,718,592 bytes: the claim is about half of it.")


if __name__ == "__main__":
    main()
