"""What kernels that call a library's paged attention have in common: whom they serve, how they store, what they clean.

Such libraries read a request page by page. Scores of keys that a query may not see are replaced, so what their K holds
is no matter. Their V is not left out: it is multiplied by a weight of 0, and 0 x NaN is NaN. Memory that nobody wrote
may hold NaN, so a kernel shows its library nothing but

    slots that a query of this step sees    they hold what the model computed
    the end of a request's last page        zeros, put there before each call (`LibraryKernel.clean`)

What this does not cover: a value that is no number where the model itself computed one. In the step that computes it,
it also spoils the earlier tokens of the same chunk; of other requests it spoils none.

Shape legend: T tokens of the step, Hkv KV heads, Dk/Dv sizes, X slots.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from kvframe.interfaces import Codec, Kernel, Retention
from kvframe.kernels.nvidia import wrong_device
from kvframe.storage import LayerStorage
from kvframe.types import LayerSpec, StepPlan

DTYPES = ("bfloat16", "float16")


class LibraryKernel(Kernel):
    """Vectors as the model computed them, in half precision, on NVIDIA GPUs.

    Attributes:
        windows: it knows windows. softcap: it knows softcaps.
    """

    windows: bool = False
    softcap: bool = False

    @abstractmethod
    def missing(self, device: torch.device) -> list[str]:
        """Reasons why the library cannot be used at all. The device may be any."""

    @abstractmethod
    def misfits(self, layer: LayerSpec, block_size: int) -> list[str]:
        """Reasons why it cannot serve these heads and blocks."""

    def unsupported(
        self, layer: LayerSpec, codecs: tuple[Codec, Codec], retention: Retention, device: str, block_size: int
    ) -> list[str]:
        where = torch.device(device)
        reasons = [*self.missing(where), *wrong_device(where), *self.misfits(layer, block_size)]
        if not retention.kernel_mask:
            reasons.append(f"it knows {'a window' if self.windows else 'full attention'} only, not this mask")
        elif retention.window is not None and not self.windows:
            reasons.append("it knows no window")
        elif retention.window is not None and retention.sinks:
            reasons.append(f"it knows no sinks beside a window, and there are {retention.sinks}")
        if layer.dtype not in DTYPES:
            reasons.append(f"it knows {' and '.join(DTYPES)}, not {layer.dtype}")
        if layer.sinks:
            reasons.append("it knows no learned sinks")
        if layer.softcap is not None and not self.softcap:
            reasons.append("it knows no softcap")
        for kind, codec in zip(("keys", "values"), codecs):
            if not codec.plain:
                reasons.append(f"it reads vectors as they are, not codes ({kind}: {type(codec).__name__})")
        return reasons

    def store(self, k: torch.Tensor, v: torch.Tensor, storage: LayerStorage, plan: StepPlan) -> None:
        """Writes `k [T, Hkv, Dk]` and `v [T, Hkv, Dv]` to the slots of the plan."""
        slots = plan.groups[storage.group].slots
        for planes, x in ((storage.k, k), (storage.v, v)):
            slotwise(planes["payload"]).index_copy_(0, slots, x)

    def clean(self, storage: LayerStorage, slots: torch.Tensor) -> None:
        """Zeros in V at `slots` int64 [X]."""
        if len(slots):
            slotwise(storage.v["payload"]).index_fill_(0, slots, 0)


def slotwise(plane: torch.Tensor, page: int | None = None) -> torch.Tensor:
    """A plane `[N, S, ...]` as `[N * S, ...]`, or as pages `[N * S / P, P, ...]`."""
    return plane.view(-1, *plane.shape[2:]) if page is None else plane.view(-1, page, *plane.shape[2:])
