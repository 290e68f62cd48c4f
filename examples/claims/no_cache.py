"""Without a cache, generating L tokens costs about L / 2 times more forward work.

With a cache each step computes one token; without one, step i computes all prompt and output tokens so far. Counted in
tokens for a prompt of P tokens: (P L + L (L - 1) / 2) / (P + L - 1), which is L / 2 for a short prompt.
"""

from __future__ import annotations

import torch
from claim import Claim, median, seconds, verdict

from kvframe import Request, SamplingParams, build, compose
from kvframe.hf.seam import implementation

LENGTHS = (16, 32, 64, 96)


def main() -> None:
    claim = Claim("Without a cache, generating L tokens costs about L/2 times more forward work", prompt=4)
    prompt = list(range(100, 100 + claim.options.prompt))
    engine = build(compose(["model=smollm2", "cache=paged", "engine.max_len=256"]))
    module, P = engine.model.module, len(prompt)

    def cached(L: int) -> None:
        engine.generate([Request(prompt_tokens=prompt, sampling=SamplingParams(max_new_tokens=L, ignore_eos=True))])

    def uncached(L: int) -> None:
        with implementation(module, "sdpa"), torch.inference_mode():
            ids = torch.tensor([prompt])
            module.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=L, min_new_tokens=L, do_sample=False,
                use_cache=False, pad_token_id=0,
            )  # fmt: skip

    work, times = [], []
    for L in LENGTHS:
        cached(L)
        with_cache, computed = median(seconds(lambda L=L: cached(L)) for _ in range(3)), engine.meter.computed
        without = seconds(lambda L=L: uncached(L))
        recomputed = sum(P + i for i in range(L))
        work.append(recomputed / computed)
        times.append(without / with_cache)
        close = abs(work[-1] / (L / 2) - 1) < 0.25
        measured = f"{work[-1]:.1f}x tokens, {times[-1]:.1f}x time"
        claim.row(f"L = {L}, prompt {P}", f"{L / 2:.0f}x", measured, verdict(close) + " for the work")
    axes = claim.axes("L, output tokens", "without cache / with cache")
    axes.plot(LENGTHS, [L / 2 for L in LENGTHS], ":", color="0.4", label="claimed: L/2")
    axes.plot(LENGTHS, work, "o-", label="tokens computed")
    axes.plot(LENGTHS, times, "s--", label="time")
    axes.legend()
    claim.finish(
        "Time grows less than work as long as a forward of a few hundred tokens costs little more than one of a "
        "single token: both read all weights once."
    )


if __name__ == "__main__":
    main()
