"""How far apart two models' predictions are, position by position.

    KL(p || q) = sum over the vocabulary of p * (log p - log q)        in nats, p the exact cache's

Logits are float32; what is summed over the vocabulary is float64, for at most ROWS positions at a time. The exact
cache's logits are kept for all positions: `positions x V x 4` bytes, 200 MB for 1,024 tokens of a vocabulary of 49,152.
Beyond HELD bytes they lie in a temporary file instead of memory.

Shape legend: n positions, V vocabulary.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass

import numpy as np
import torch

HELD = 2**30  # bytes of logits that are kept in memory
ROWS = 64  # positions that are computed in float64 at a time


def hold(n: int, vocab: int) -> torch.Tensor:
    """float32 [n, vocab] on the host, in memory or, where that is more than HELD bytes, in a temporary file."""
    if n * vocab * 4 <= HELD:
        return torch.empty(n, vocab)
    with tempfile.TemporaryFile() as file:  # the mapping keeps it until the tensor is gone
        return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=(n, vocab)))


@dataclass
class Divergence:
    """Per position: KL (nats), whether both have the same best token, and -log of the next token's probability (nats)
    under q. NaN where nothing was measured; `same` tells these from positions whose logits are NaN, where KL is NaN too
    and the best tokens count as different."""

    kl: np.ndarray
    same: np.ndarray
    nll: np.ndarray

    @classmethod
    def empty(cls, n: int) -> Divergence:
        return cls(*(np.full(n, np.nan) for _ in range(3)))

    def add(self, at: int, p: torch.Tensor, q: torch.Tensor, following: np.ndarray) -> None:
        """Measures positions from `at` on.

        Args:
            p, q: logits [n, V]. following: the n tokens that come after these positions.
        """
        for i in range(0, len(q), ROWS):
            one, two = p[i : i + ROWS].to(q.device), q[i : i + ROWS]
            place, wanted = slice(at + i, at + i + len(two)), torch.as_tensor(following[i : i + ROWS].astype(np.int64))
            log_q = two.double().log_softmax(-1)
            self.nll[place] = -log_q.gather(1, wanted[:, None].to(q.device))[:, 0].cpu().numpy()
            self.kl[place] = kl(one, log_q).cpu().numpy()
            best = (one.argmax(-1) == two.argmax(-1)) & ~(one.isnan() | two.isnan()).any(-1)
            self.same[place] = best.double().cpu().numpy()

    def summary(self) -> dict[str, float | int | None]:
        """Over the positions that were measured; NaN where one of them is. Perplexity is exp(mean nll);
        `nan_positions` are those without a KL."""
        seen = ~np.isnan(self.same)
        if not seen.any():
            nothing = dict.fromkeys(("perplexity", "kl_mean", "kl_p99", "kl_max", "top1"))
            return {**nothing, "positions": 0, "nan_positions": 0}
        divergence, nll = self.kl[seen], float(self.nll[seen].mean())
        return {
            "perplexity": math.inf if nll >= 700 else math.exp(nll),
            "kl_mean": float(divergence.mean()),
            "kl_p99": float(np.percentile(divergence, 99)),
            "kl_max": float(divergence.max()),
            "top1": float(self.same[seen].mean()),
            "positions": int(seen.sum()),
            "nan_positions": int(np.isnan(divergence).sum()),
        }


def kl(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of logits `p [n, V]` and log-probabilities `log_q [n, V]` (float64): [n] nats, never below 0."""
    log_p = p.double().log_softmax(-1)
    share = log_p.exp()
    terms = torch.where(share == 0, 0.0, share * (log_p - log_q))  # 0 log 0 = 0; a NaN stays one
    return terms.sum(-1).clamp(min=0)
