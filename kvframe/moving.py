"""Host arrays that travel to a device together: one buffer, one copy, whatever their number.

Every array begins at a multiple of ALIGNED bytes: kernels are compiled for addresses that are, and for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch

from kvframe.types import GroupPlan, StepPlan

ALIGNED = 16
TENSORS = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


class Together:
    """Where arrays lie in one buffer of bytes.

    Args:
        shapes: name -> shape and dtype (int32 or int64).
    Attributes:
        nbytes: of the buffer.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype | type]]):
        self._places: dict[str, tuple[int, int, tuple[int, ...], np.dtype]] = {}
        self.nbytes = 0
        for name, (shape, kind) in shapes.items():
            size = int(np.prod(shape)) * np.dtype(kind).itemsize
            self._places[name] = self.nbytes, self.nbytes + size, shape, np.dtype(kind)
            self.nbytes += -(-size // ALIGNED) * ALIGNED

    def arrays(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Views of a buffer on the host, uint8."""
        return {name: flat[a:b].view(kind).reshape(shape) for name, (a, b, shape, kind) in self._places.items()}

    def tensors(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a buffer on a device, uint8."""
        return {name: flat[a:b].view(TENSORS[kind]).view(shape) for name, (a, b, shape, kind) in self._places.items()}


def named(plan: StepPlan) -> dict[str, np.ndarray]:
    """The arrays of a plan on the host that kernels read: `slots0` is those of layer group 0."""
    found = {"positions": plan.positions, "starts": plan.query_starts, "rows": plan.rows}
    for g, group in enumerate(plan.groups):
        found |= {f"slots{g}": group.slots, f"tables{g}": group.tables, f"lengths{g}": group.context_lens}
    return found


def planned(arrays: Mapping, groups: int, host: StepPlan) -> StepPlan:
    """A plan out of arrays or tensors with the names of `named`; all else is the host's."""
    made = tuple(GroupPlan(arrays[f"slots{g}"], arrays[f"tables{g}"], arrays[f"lengths{g}"]) for g in range(groups))
    return StepPlan(
        arrays["positions"], arrays["starts"], made, arrays["rows"], host.copies, host.max_query, host.max_context,
        host=host, tails=host.tails,
    )  # fmt: skip


def moved(host: StepPlan, device: torch.device) -> StepPlan:
    """The same plan as tensors, in one transfer."""
    arrays = named(host)
    if device.type == "cpu":
        return planned({name: torch.from_numpy(array) for name, array in arrays.items()}, len(host.groups), host)
    together = Together({name: (array.shape, array.dtype) for name, array in arrays.items()})
    flat = torch.zeros(together.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, place in together.arrays(flat.numpy()).items():
        place[...] = arrays[name]
    return planned(together.tensors(flat.to(device, non_blocking=True)), len(host.groups), host)


def sent(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """An array on a device; whoever sends it does not wait for what the device is doing, as a plain copy would."""
    there, tensor = torch.device(device), torch.from_numpy(array)
    if there.type == "cpu":
        return tensor
    return (tensor.pin_memory() if there.type == "cuda" else tensor).to(there, non_blocking=True)


class LatePlan:
    """A StepPlan whose tensors are made when somebody reads one of them: a step that is a CUDA graph never does."""

    def __init__(self, host: StepPlan, device: torch.device):
        self.host, self._device = host, device
        self.copies, self.tails, self.max_query, self.max_context = (
            host.copies, host.tails, host.max_query, host.max_context,
        )  # fmt: skip

    @cached_property
    def _there(self) -> StepPlan:
        return moved(self.host, self._device)

    positions = property(lambda self: self._there.positions)
    query_starts = property(lambda self: self._there.query_starts)
    groups = property(lambda self: self._there.groups)
    rows = property(lambda self: self._there.rows)
