"""A Q cache would cost memory and give nothing.

Attention of the newest token reads the keys and values of all tokens, and one query: its own. So an engine that keeps
no query at all must answer what a forward over the whole text answers, which keeps them all.
"""

from __future__ import annotations

import torch
from claim import MIB, Claim, verdict

from kvframe import Request, SamplingParams, build, compose
from kvframe.testing import teacher_logits


def main() -> None:
    claim = Claim("A Q cache would cost memory and give nothing", tokens=48)
    tokens = claim.options.tokens
    engine = build(compose(["model=smollm2", "model.dtype=float32", "cache=paged", "engine.max_len=512"]))
    prompt = engine.model.tokenizer("A cache keeps what somebody will ask for again:")["input_ids"]
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    (output,) = engine.generate([Request(prompt_tokens=prompt, sampling=sampling)])
    logits = teacher_logits(engine.model.module, prompt + output.output_tokens)  # [L, V], every query recomputed
    best = torch.as_tensor(logits)[len(prompt) - 1 : -1].argmax(-1).tolist()
    same = sum(a == b for a, b in zip(best, output.output_tokens)) / tokens
    claim.row("tokens equal to those of a forward over everything", "all", f"{same:.0%}", verdict(same == 1.0))
    layers = engine.model.layers
    kv = sum((s.k_dim + s.v_dim) * s.kv_heads * 4 for s in layers)
    q = sum(s.k_dim * s.q_heads * 4 for s in layers)
    more = f"{q} bytes beside {kv}: {q / kv:.1f} times the KV cache"
    claim.row("bytes per token that it would take, fp32", "more memory", more, verdict(q > 0))
    axes = claim.axes("", "MiB for 2,048 tokens, fp32")
    axes.bar(["K and V (kept)", "Q (never read again)"], [kv * 2048 / MIB, q * 2048 / MIB], color=["C0", "C3"])
    axes.legend(handles=[axes.patches[0], axes.patches[1]], labels=["read by every later token", "read by nobody"])
    claim.finish(
        "With grouped-query attention there are more query heads than KV heads, so Q would be the larger part."
    )


if __name__ == "__main__":
    main()
