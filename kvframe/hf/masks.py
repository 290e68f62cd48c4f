"""Which mask rule a layer was given, found by evaluating the rule at near and far positions.

transformers describes a mask by a function `mask(batch, head, q, k) -> bool` of positions. Three shapes of it are
known to kvframe:

    causal            k <= q
    causal + window   k <= q and q - k < window
    causal + chunks   k <= q and q // chunk == k // chunk

At one far query the visible keys give the only window that could fit (`first invisible distance`), and the query
before them the only size of a chunk; then the formula must hold at every position of a grid of near and far queries.

A rule may look positions up in a tensor of the batch (which tokens are an image's, which are padding). Behind its end
such a tensor goes on as it ends: a text goes on as a text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode

FAR = 65_536  # positions; windows and chunks above it are not told from none
EDGES = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 127, 128, 1000, 4095, 4096, 8191, 8192, 30_011, FAR - 1, FAR)


@dataclass(frozen=True)
class Fit:
    """The rule, or why it is none of the known ones.

    Attributes:
        window, chunk: at most one of them; both None: plain causal.
        what: where the rule left the formula; empty when it fits.
    """

    window: int | None = None
    chunk: int | None = None
    what: str = ""

    def visible(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        seen = k <= q
        if self.window is not None:
            seen = seen & (q - k < self.window)
        if self.chunk is not None:
            seen = seen & (q // self.chunk == k // self.chunk)
        return seen

    @property
    def name(self) -> str:
        window = "" if self.window is None else f" with window {self.window}"
        return f"causal{window}" if self.chunk is None else f"causal{window} with chunks of {self.chunk}"


def fit(rule: Callable) -> Fit:
    """The formula that says what the rule says. Never raises."""
    zero = torch.zeros((), dtype=torch.long)

    def at(q, k):
        q, k = torch.broadcast_tensors(torch.as_tensor(q), torch.as_tensor(k))
        with _Endless():
            return torch.as_tensor(rule(zero, zero, q, k)).to(torch.bool).expand(q.shape)

    def reach(q: int) -> int | None:
        """How many keys the query sees before the first one that it does not see; None: all."""
        hidden = torch.nonzero(~at(q, q - torch.arange(q + 1)))
        return int(hidden[0]) if len(hidden) else None

    try:
        window = reach(FAR)
        if window == 0:
            return Fit(what=f"the query at {FAR} does not see itself")
        if window is None:
            candidates = [Fit()]
        else:
            before = FAR - window  # the last position that it does not see; at the end of a chunk if there are any
            candidates = [Fit(window=window), Fit(chunk=reach(before) or before + 1)]
        wrong = [_difference(at, candidate) for candidate in candidates]
        fits = [candidate for candidate, what in zip(candidates, wrong) if not what]
        return fits[0] if fits else Fit(what=wrong[0])
    except Exception as error:
        return Fit(what=f"the rule cannot be evaluated at far positions ({type(error).__name__}: {error})")


def _difference(at: Callable, guess: Fit) -> str:
    """The first place where the rule says something else than the guess; empty: there is none."""
    n = guess.window or guess.chunk
    edges = {*EDGES, *((n - 1, n, n + 1, 2 * n - 1, 2 * n, 2 * n + 3) if n else ())}
    for q in sorted(q for q in edges if q <= FAR):
        k = torch.cat([torch.arange(max(0, q - 300), q + 65), torch.arange(0, max(1, q - 300), 97)])
        for edge in _borders(guess, q):
            k = torch.cat([k, torch.arange(max(0, edge - 2), max(0, edge) + 3)])
        wanted = guess.visible(torch.tensor(q), k)
        wrong = torch.nonzero(at(torch.tensor(q), k) != wanted)
        if len(wrong):
            sees = "does not see" if bool(wanted[wrong[0]]) else "sees"
            return f"query {q} {sees} key {int(k[wrong[0]])}, which {guess.name} would not say"
    return ""


def _borders(guess: Fit, q: int) -> list[int]:
    """Positions around which what the query sees ends."""
    ends = [] if guess.window is None else [q - guess.window]
    return ends if guess.chunk is None else [*ends, q // guess.chunk * guess.chunk]


class _Endless(TorchFunctionMode):
    """Inside, a tensor that is indexed by positions behind its end answers its last entry."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            tensor, index = args
            args = (tensor, tuple(_within(i, size) for i, size in zip(index, tensor.shape)) + index[tensor.dim() :])
        return func(*args, **(kwargs or {}))


def _within(index, size: int):
    return index.clamp(max=size - 1) if isinstance(index, torch.Tensor) and index.dtype == torch.long else index
