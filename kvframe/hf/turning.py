"""How each layer's queries and keys turn with position: found among the model's frequencies, proven on real calls.

The model runs one token id at several positions under the probe's recording attention, which answers zeros. Nothing but
the position tells its rows apart then, so a rotation that is known right makes them equal again:

    q(p) = R(p) q0   for all p    <=>    R(-p) q(p) is the same row for all p, and so for k

Candidates are the buffers named `...inv_freq`, as halves or neighbours, at the beginning or the end of a vector; and no
rotation at all (NoPE). Positions stay below the model's own length: an index behind a table of learned positions would
be an error, on CUDA one that ends the process.

Shape legend: P positions, H heads, D size of a vector, n frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from kvframe.hf.probe import Call, Facts, record
from kvframe.kernels.rotation import pairs, turn, turns
from kvframe.types import LayerSpec, Rotary

UNSTATED = 1024  # positions of models that state no length of their own
# Highest difference of a pair of numbers between rows, in units of the pair's size. In low precision it is the median
# over positions: cos and sin are rounded, and a row may be computed in another order than its neighbours.
TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "float16": 0.02, "bfloat16": 0.06}


@dataclass(frozen=True)
class Candidate:
    """Frequencies that the model holds. kind: the type its module states ("default", "yarn", ...), or None."""

    inv_freq: tuple[float, ...]
    where: str
    kind: str | None


def find(module: nn.Module, facts: Facts, run: Callable[[np.ndarray], None], max_len: int) -> tuple[LayerSpec, ...]:
    """The layers of `facts` with their `rotary`, or with the reason why it is not known. Never raises.

    Args:
        run: computes one token id at each of the positions (int64 [P]). max_len: positions that the model takes.
    """
    positions = probe_positions(max_len)
    try:
        calls = record(module, lambda: run(positions)).calls
    except Exception as error:
        return _unknown(facts, f"the model cannot run one token at positions {positions.tolist()}: {error}")
    if [id(call.module) for call in calls] != [id(part) for part in facts.modules]:
        return _unknown(facts, "its layers run in another order when one token is repeated")
    found = list(candidates(module))
    layers = []
    for spec, call in zip(facts.layers, calls):
        rotary, why = layer_rotary(call, positions, found)
        layers.append(replace(spec, rotary=rotary, no_rotary=why))
    return tuple(layers)


def _unknown(facts: Facts, why: str) -> tuple[LayerSpec, ...]:
    return tuple(replace(spec, no_rotary=why) for spec in facts.layers)


def probe_positions(max_len: int) -> np.ndarray:
    """A near one, which tells fast pairs apart, and far ones, which tell slow ones."""
    last = (max_len if max_len < 1 << 20 else UNSTATED) - 1
    return np.unique([0, min(1, last), last // 5, last // 2, max(last - 1, 0), last]).astype(np.int64)


def candidates(module: nn.Module) -> Iterator[Candidate]:
    """Every buffer of frequencies, with the type that its module states for it."""
    for name, part in module.named_modules():
        kinds = getattr(part, "rope_type", None)
        for buffer, value in part.named_buffers(recurse=False):
            if not buffer.endswith("inv_freq") or "original" in buffer or value.dim() != 1 or not value.numel():
                continue
            kind = kinds.get(buffer.removesuffix("inv_freq").rstrip("_")) if isinstance(kinds, dict) else kinds
            values = tuple(value.detach().float().cpu().tolist())
            yield Candidate(values, f"{name}.{buffer}", kind if isinstance(kind, str) else None)


def layer_rotary(call: Call, positions: np.ndarray, found: list[Candidate]) -> tuple[Rotary | None, str]:
    """The rotation under which the queries and the keys of a call are one row, or why there is none."""
    q, k = call.query[0].transpose(0, 1), call.key[0].transpose(0, 1)  # [P, H, D]
    limit = TOLERANCE.get(str(q.dtype).removeprefix("torch."), 0.06)
    q, k = q.float().cpu(), k.float().cpu()
    if not (bool(q.isfinite().all()) and bool(q.any())):
        return None, "its queries are zero or not finite in the probe's forward"

    def error(rotary: Rotary) -> float:
        found = spread(q, positions, rotary, limit >= 0.01)
        return found if found > limit else max(found, spread(k, positions, rotary, limit >= 0.01))

    still = Rotary()
    if error(still) <= limit:
        return still, ""
    best, fits = limit, None
    for candidate in found:
        n, D = len(candidate.inv_freq), q.shape[-1]
        for start in dict.fromkeys((0, D - 2 * n)) if 2 * n <= D else ():
            for interleaved in (False, True):
                rotary = Rotary(candidate.inv_freq, start, interleaved)
                e = error(rotary)
                if e <= best and (fits is None or e < best):
                    best, fits = e, rotary
    if fits is None:
        held = ", ".join(dict.fromkeys(c.where for c in found))
        what = f"none of its frequencies ({held}) explains" if found else "no frequencies that it holds explain"
        return None, f"its queries change with position in a way that {what} (learned positions, or a table?)"
    for candidate in found:  # equal frequencies may stand in several modules: one that moves is enough
        kind = candidate.kind or ""
        if candidate.inv_freq == fits.inv_freq and ("dynamic" in kind or kind == "longrope"):
            return None, f"rotary type {kind!r} ({candidate.where}): its frequencies depend on the longest request"
    return fits, ""


def spread(x: torch.Tensor, positions: np.ndarray, rotary: Rotary, low: bool) -> float:
    """How much the rows `x [P, H, D]` differ when turned back: the worst pair's, over all heads, in units of its size.

    Numbers that do not turn are pairs of their own. low: low precision, see TOLERANCE.
    """
    n = len(rotary.inv_freq)
    if n:
        cos, sin = turns(positions, np.zeros_like(positions), rotary)
        x = turn(x, cos, sin, rotary)
    mean = x.mean(0)  # [H, D]
    off, size = (x - mean).square().sum(1), mean.square().sum(0)  # [P, D], [D]
    if n:
        for y in (off, size):
            a, b = pairs(y, n, rotary.start, rotary.interleaved)
            a += b
            b.copy_(a)
    off = (off / (size + 1e-6 * size.mean() + 1e-30)).sqrt()  # [P, D]
    return float((off.median(0).values if low else off.amax(0)).max())
