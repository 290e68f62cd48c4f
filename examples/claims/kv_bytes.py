"""Bytes of keys and values of Qwen2.5-0.5B and Llama-3-8B, and what grouped-query attention saves.

Often said: Qwen2.5-0.5B takes 12 KB per token, 24 MB at 2,048 tokens, 2.4 GB for 100 requests; GQA saves a factor of 7.
"""

from __future__ import annotations

from claim import GIB, MIB, Claim, verdict

from kvframe import compose
from kvframe.fitting import fit


def plan(shape: str, *more: str):
    asked = ["model=random", f"model.shape={shape}", "model.dtype=bfloat16", "caches=[paged,int8]", *more]
    return fit(compose(asked, "plan"), asked)


def main() -> None:
    claim = Claim("Qwen2.5-0.5B: 12 KB per token, 24 MB at 2,048, 2.4 GB for 100 requests; GQA saves a factor of 7")
    qwen = plan("qwen2_5_0_5b", "context=2048", "requests=100")
    row, kind = qwen.rows[0], qwen.model["kinds"][0]
    per_token, request, total = row["bytes_per_token"], row["bytes_per_request"], row["bytes_total"]
    claim.row("Qwen2.5-0.5B, per token", "12 KB", f"{per_token / 1024:g} KiB", verdict(per_token == 12 * 1024))
    claim.row("at 2,048 tokens", "24 MB", f"{request / MIB:g} MiB", verdict(request == 24 * MIB))
    claim.row("100 requests", "2.4 GB", f"{total / GIB:.2f} GiB", verdict(abs(total / GIB / 2.4 - 1) < 0.03))
    factor = kind["group_factor"]
    claim.row("GQA saves", "7x", f"{factor}x ({kind['q_heads']} / {kind['kv_heads']} heads)", verdict(factor == 7))
    llama = plan("llama3_8b", "context=4096", "requests=200")
    one, many = llama.rows[0]["bytes_per_request"], llama.rows[0]["bytes_total"]
    for what, size in (("one request", one), ("200 requests", many)):
        claim.row(f"Llama-3-8B at 4,096, {what}", "?", f"{size / GIB:g} GiB", "computed")
    axes = claim.axes("requests of 2,048 tokens (Qwen2.5-0.5B)", "GiB")
    counts = range(0, 101, 10)
    for name, size, style in (
        ("bf16, 2 KV heads", request, "-"),
        ("int8, 2 KV heads", qwen.rows[1]["bytes_per_request"], "--"),
        (f"bf16, if all {kind['q_heads']} heads had keys of their own", request * factor, ":"),
    ):
        axes.plot(counts, [n * size / GIB for n in counts], style, label=name)
    axes.axhline(qwen.model["weights_bytes"] / GIB, color="C3", label="weights, bf16")
    axes.legend()
    claim.finish("Powers of two: the usual '12 KB' is 12 KiB, 12,288 bytes.")


if __name__ == "__main__":
    main()
