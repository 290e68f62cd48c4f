"""Which mask rule a layer was given, found by evaluating the rule at near and far positions.

transformers describes a mask by a function `mask(batch, head, q, k) -> bool` of positions. Two shapes of it are
known to kvframe's kernels:

    causal            k <= q
    causal + window   k <= q and q - k < window

At one far query the visible keys give the only window that could fit (`first invisible distance`); then the
formula must hold at every position of a grid of near and far queries. A chunked rule fits at one query and
fails at the next one, so it is found whatever it is called.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

FAR = 65_536  # positions; windows above it are not told from no window


def fit(rule: Callable) -> tuple[bool, int | None, str]:
    """`(fits, window, what)`: window None is plain causal; `what` says where the rule left the formula."""
    zero = torch.zeros((), dtype=torch.long)

    def at(q, k):
        q, k = torch.broadcast_tensors(torch.as_tensor(q), torch.as_tensor(k))
        return torch.as_tensor(rule(zero, zero, q, k)).to(torch.bool).expand(q.shape)

    try:
        distance = torch.arange(FAR + 1)
        seen = at(torch.tensor(FAR), FAR - distance)  # [FAR + 1]
        hidden = torch.nonzero(~seen)
        window = None if len(hidden) == 0 else int(hidden[0])
        if window == 0:
            return False, None, f"the query at {FAR} does not see itself"
        edges = {0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 127, 128, 1000, 4095, 4096, 8191, 8192, 30_011, FAR - 1, FAR}
        if window is not None:
            edges |= {window - 1, window, window + 1, 2 * window - 1, 2 * window, 2 * window + 3}
        for q in sorted(q for q in edges if q <= FAR):
            k = torch.cat([torch.arange(max(0, q - 300), q + 65), torch.arange(0, max(1, q - 300), 97)])
            if window is not None:
                k = torch.cat([k, torch.arange(max(0, q - window - 2), max(0, q - window) + 3)])
            wanted = k <= q
            if window is not None:
                wanted &= q - k < window
            wrong = torch.nonzero(at(torch.tensor(q), k) != wanted)
            if len(wrong):
                bad = int(k[wrong[0]])
                guess = "causal" if window is None else f"causal with window {window}"
                what = f"query {q} {'does not see' if bool(wanted[wrong[0]]) else 'sees'} key {bad}"
                return False, None, f"{what}, which {guess} would not say"
        return True, window, ""
    except Exception as error:  # a rule may index tensors of the batch, which end at the batch's length
        return False, None, f"the rule cannot be evaluated at far positions ({type(error).__name__}: {error})"
