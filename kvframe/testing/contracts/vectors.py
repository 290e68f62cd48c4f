"""Vectors that codecs are tried with, and how far off they come back.

Shape legend: n vectors or groups, G sealing group, H heads, D size of a vector.
"""

from __future__ import annotations

import functools

import torch

HEADS, N = 2, 4


@functools.cache
def _normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shape_of(dim: int, group: int) -> tuple[int, ...]:
    return (N, HEADS, dim) if group == 1 else (N, group, HEADS, dim)


def samples(dim: int, group: int, low: float = 2.0**-100, high: float = 2.0**100) -> dict[str, torch.Tensor]:
    """name -> float32 `[n, H, D]` (`[n, G, H, D]` with a group); sizes of vectors are 0 or from `low` to `high`."""
    shape = shape_of(dim, group)
    normal = _normal(shape, 0)
    channels, middle = torch.arange(dim), dim // 2
    outlier, single = normal.clone(), torch.zeros(shape)
    outlier[..., middle] = torch.tensor(1e4).clamp(max=high)
    single[..., 1] = -1.0
    found = {
        "normal": normal,
        "more": _normal(shape, 1) * 0.3 + 0.1,
        "zero": torch.zeros(shape),
        "constant": torch.full(shape, 2.5),
        "single": single,
        "signs": (1.0 - 2.0 * (channels % 2)).expand(shape).clone(),
        "ramp": torch.linspace(-1, 1, dim).expand(shape) * torch.linspace(0.5, 1, N).view(N, *[1] * (len(shape) - 1)),
        "outlier": outlier,
        "powers": (torch.exp2(-(channels % 12).float()) * (1.0 - 2.0 * (channels % 3 % 2))).expand(shape).clone(),
        "positive": normal.abs() + 1.0,
    }
    for name, size in (("huge", high), ("tiny", low)):
        found[name] = normal / normal.abs().amax() * torch.tensor(size, dtype=torch.float64).float()
    return {name: x.clamp(-high, high) for name, x in found.items()}


def all_samples(dim: int, group: int, high: float) -> tuple[list[str], torch.Tensor]:
    """The samples and some rows that are no numbers, as one batch `[n, ...]`, and the name of each entry."""
    parts = samples(dim, group, high=high)
    bad = _normal(shape_of(dim, group), 2).clone()
    bad[0, ..., 0, 1], bad[1, ..., 1, 2], bad[2] = torch.nan, torch.inf, -torch.inf
    parts["nan, inf, -inf"] = bad
    return [name for name, x in parts.items() for _ in x], torch.cat(list(parts.values()))


def broken(infinite: bool) -> list[float]:
    """Numbers that are too large for many codes; infinities only where they are asked for."""
    return [3e38, -3e38, *([float("inf"), float("-inf")] if infinite else [])]


def shares(x: torch.Tensor, back: torch.Tensor, group: int, low: float) -> torch.Tensor:
    """|x - back| as a share of the largest size in the vector (in the group and head), which counts as `low` at least.
    NaN where something came back as no number."""
    size = x.abs().amax(-1, keepdim=True) if group == 1 else x.abs().amax((1, 3), keepdim=True)
    return (x.double() - back.double()).abs() / size.double().clamp(min=low)
