"""How a tensor of a forward lies in memory, seen in two recordings of it.

Shape legend: M rows, T or K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """Rows of numbers side by side.

    Attributes:
        size: what the number of rows is, "T" or "K".
        offset, stride: of the first row in its storage, and between rows, in numbers. width: numbers of a row.
        shape, strides: of the tensor in the first recording. at: the dimension of rows.
    """

    size: str
    offset: int
    stride: int
    width: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    at: int

    @property
    def dense(self) -> bool:
        """Is it all of its storage, row after row?"""
        return self.offset == 0 and self.stride == self.width

    def inner(self) -> tuple:
        """What two tensors have in common whose rows have their numbers in the same order."""
        rows = [(n, s) for d, (n, s) in enumerate(zip(self.shape, self.strides)) if d != self.at and n > 1]
        return (self.size, *rows)


def layout(a: torch.Tensor, b: torch.Tensor, sizes: tuple[dict[str, int], dict[str, int]]) -> Layout | None:
    """The layout of a value, from the tensor that each of two recordings saw; sizes: T and K of both.

    None: it has no rows, or its numbers do not lie side by side.
    """
    if a.dim() != b.dim() or a.storage_offset() != b.storage_offset():
        return None
    differing = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
    if len(differing) != 1:
        return None
    (at,) = differing
    names = [name for name in sizes[0] if (a.shape[at], b.shape[at]) == (sizes[0][name], sizes[1][name])]
    others = sorted((a.stride(d), a.shape[d]) for d in range(a.dim()) if d != at and a.shape[d] > 1)
    same = all(a.stride(d) == b.stride(d) for d in range(a.dim()) if d == at or a.shape[d] > 1)
    width = 1
    for stride, size in others:
        if stride != width:
            return None
        width *= size
    if not names or not same:
        return None
    return Layout(names[0], a.storage_offset(), a.stride(at), width, tuple(a.shape), a.stride(), at)
