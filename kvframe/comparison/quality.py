"""What a candidate costs in quality: teacher forcing against the reference, and the tokens of the workload itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvframe.comparison import plain
from kvframe.comparison.candidates import Contender, sized
from kvframe.comparison.measure import Advance
from kvframe.evaluation import measures, runs, texts
from kvframe.evaluation.teacher import Limits
from kvframe.lineup import running
from kvframe.workloads.workload import Facts

CHUNK = 64  # tokens of the text in one step
DECODE = 16  # the last so many tokens are computed one at a time, as in decoding


class Quality:
    """Holds the reference's logits of one text.

    Args:
        source: "builtin" or a file; n: its tokens that are computed, fewer where it ends. 0: nothing is measured.
    """

    def __init__(self, model: Any, facts: Facts, source: str, n: int):
        self.model = model
        tokens = texts.tokens_of(source, facts.text, n)
        self._material = runs.Material((tokens,), DECODE, 0, ())
        self._held = measures.hold(self._material.positions, model.vocab_size)

    @property
    def positions(self) -> int:
        """Tokens that are predicted."""
        return self._material.positions

    def of(self, contender: Contender, advance: Advance, keep: bool = False) -> dict[str, Any]:
        """kl_mean, kl_p99, kl_max (nats), top1, perplexity and positions of a contender. keep: it is the reference."""
        if contender.baseline is not None:
            return self._of_baseline(contender, advance)
        candidate = sized(contender.asked, max(contender.longest, self.positions + 1))
        with running(candidate, self.model, warm=False) as engine, torch.inference_mode():
            limits = Limits.of(candidate.cfg, CHUNK)
            with engine.threads.step():
                found, _ = runs.forced(engine, self._material, limits, self._held, advance, keep=keep)
        return found.summary()

    def _of_baseline(self, contender: Contender, advance: Advance) -> dict[str, Any]:
        """One forward over the text: its caches keep keys and values as they are."""
        (tokens,) = self._material.pieces
        with plain.plain(self.model, contender.baseline.pack_weights) as module:
            rows = plain.logits(module, tokens[:-1])
        found = measures.Divergence.empty(self.positions)
        found.add(0, self._held.to(rows.device), rows, tokens[1:])
        advance(self.positions)
        return found.summary()


def token_match(reference: Sequence[Mapping] | None, outputs: Sequence[Mapping] | None) -> float | None:
    """Share of each request's tokens before the first that differs from the reference's, mean over the requests that
    both have run. A request whose prompt is another one already (a later turn) counts 0.

    1 2 3 4 against 1 2 9 4  ->  0.5
    """
    known = {output["id"]: output for output in reference or ()}
    shares = []
    for output in outputs or ():
        other = known.get(output["id"])
        if other is None or not output["tokens"]:
            continue
        same = 0
        if other["prompt"] == output["prompt"]:
            pairs = zip(other["tokens"], output["tokens"])
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(output["tokens"]))
        shares.append(same / len(output["tokens"]))
    return sum(shares) / len(shares) if shares else None
