"""transformers attends: we store what is new, and give back what is stored, decoded, as DynamicCache would.

A row is a request and a column a position, padding included. Of a layer whose model forgets (a window), what is given
back begins at the first column that a query of this forward may see, as the mask's sizes say:

    window 4, 6 columns held, 2 new        0 1 2 3 4 5 | 6 7
                                                 ^ offset 3, length 5

Shape legend: B rows, T columns of the forward, L columns that are given back, H heads, D size of a vector.
"""

from __future__ import annotations

import numpy as np
import torch

from kvframe.errors import RequestError
from kvframe.kernels.reference import gather
from kvframe.types import StepPlan


def first_seen(rule, length: int) -> int:
    """The first of `length` positions that a query at `length` or behind it may see; a retention `rule`."""
    if not rule.forgets:
        return 0
    dead = rule.dead(0, length, length)
    return int(np.argmin(dead)) if not dead.all() else length


class Plain:
    """One forward of a batch.

    Args:
        cache: a cache made of parts, with storage. plan: of the forward's tokens. shape: (B, T). past: columns that
            were held before.
    Attributes:
        left: layers whose keys and values have not come yet.
    """

    def __init__(self, cache, plan: StepPlan, shape: tuple[int, int], past: int):
        self.cache, self.plan, self.shape, self.past = cache, plan, shape, past
        self.left = {layer.spec.index for layer in cache.storage.layers if layer.spec.kv_source is None}
        self._slots: dict[int, torch.Tensor] = {}

    def update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`key [B, H, T, Dk]`, `value [B, H, T, Dv]` -> the same of all L columns, `[B, H, L, D]`."""
        storage = self.cache.storage.layers[layer]
        if (key.shape[0], key.shape[2]) != self.shape or layer not in self.left:
            again = "" if layer in self.left else ", for the second time"
            raise RequestError(
                f"layer {layer} gets {key.shape[0]} rows of {key.shape[2]} keys{again}, in a forward of "
                f"{self.shape[0]} rows of {self.shape[1]} tokens",
                fix="cache.reset()",
            )
        self.left.discard(layer)
        k, v = key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1)  # [B * T, H, D]
        storage.kernel.store(k, v, storage, self.plan)
        slots = self._of_group(storage.group, storage.retention, key.device)
        return tuple(
            gather(codec, planes, slots, x.dtype).unflatten(0, (self.shape[0], -1)).transpose(1, 2)
            for codec, planes, x in ((storage.codec_k, storage.k, key), (storage.codec_v, storage.v, value))
        )

    def _of_group(self, group: int, rule, device) -> torch.Tensor:
        """int64 [B * L]: slots of the columns that are given back, row by row."""
        if group not in self._slots:
            size, tables = self.cache.block_size, self.plan.host.groups[group].tables  # [B, blocks]
            columns = np.arange(first_seen(rule, self.past), self.past + self.shape[1])
            blocks = tables[:, columns // size].astype(np.int64)
            assert blocks.all(), "a column that a query may see was given back"
            self._slots[group] = torch.from_numpy((blocks * size + columns % size).reshape(-1)).to(device)
        return self._slots[group]
