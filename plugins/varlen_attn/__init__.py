"""torch's own FlashAttention as a kernel: `torch.nn.attention.varlen.varlen_attn` over block tables.

Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", ICLR 2024
(arXiv:2307.08691); the documentation of torch.nn.attention.varlen and the sources of torch 2.13. Queries are packed,
keys and values lie in pages `[pages, P, Hkv, D]`, `block_table` names the pages of each request and `seqused_k` its
tokens. The last query of a request stands at its last key.

What computes it depends on what was activated in this process (`torch.nn.attention.activate_flash_attention_impl`):

    nothing    FlashAttention-2, which torch brings   P a multiple of 256         `cu_seq_k` has to be given
    FA3        a package of its own, Hopper           P any                       `cu_seq_k` must not be given

A call never splits the keys of a request (`num_splits=1`): with splits the FlashAttention-2 of torch 2.13 leaves rows
of a packed batch unwritten (pytorch issue 194167). So long contexts of few requests occupy few multiprocessors, and in
exchange a request's output does not depend on its neighbours.

NaN. FlashAttention-2 loads rows of V behind the end of a request as zeros; FlashAttention-3 loads what lies there and
multiplies it by 0 (flash-attention issues 1745 and 2374). kvframe.kernels.library says what follows: the end of last
pages is cleaned, and so is page 0, a piece of the null block, which stands in a table wherever no token does. Windows
are not served: their dead slots lie in pages that are read, and may be live for another request that shares the page,
so they cannot be cleaned.

Shape legend: T tokens of the step, R requests, B pages of a table, Hq/Hkv query/KV heads, D size of a head, P slots of
a page, S of a block, X slots.
"""

from __future__ import annotations

import inspect
import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.attention as attention

from kvframe.kernels.library import LibraryKernel, slotwise
from kvframe.kernels.of_step import OfStep
from kvframe.kernels.pages import tail
from kvframe.moving import sent
from kvframe.storage import LayerStorage
from kvframe.types import LayerSpec, StepPlan

NEEDED = ("block_table", "seqused_k", "num_splits", "enable_gqa", "window_size")
PAGE = 256  # slots; what FlashAttention-2 wants a multiple of
LARGEST = 256  # head
CAUSAL = (-1, 0)


class Todo(NamedTuple):
    """What the layers of a group share in a step.

    Attributes:
        tables: int32 [R, B]. starts: int32 [R + 1] of the keys, or None. dirty: int64 [X].
    """

    tables: torch.Tensor
    starts: torch.Tensor | None
    dirty: torch.Tensor


class VarlenAttnKernel(LibraryKernel):
    """Vectors as they are, under full attention. Keeps what it derived from the last plan."""

    name = "varlen_attn"

    def __init__(self):
        self._shared = OfStep()

    def missing(self, device: torch.device) -> list[str]:
        if device.type != "cuda":
            return []
        lacking = missing_arguments()
        if lacking:
            words = f"the varlen_attn of torch {torch.__version__} has no {' and no '.join(lacking)}"
            return [f"{words} (pip install -U torch)"]
        if implementation() not in (None, "FA3"):
            fix = "torch.nn.attention.restore_flash_attention_impl()"
            return [f"it knows torch's own implementation and FA3, and {implementation()} is activated ({fix})"]
        if implementation() == "FA3" and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability(device)
            return [] if major == 9 else [f"FA3 is activated and needs compute capability 9.0, not {major}.{minor}"]
        return []

    def misfits(self, layer: LayerSpec, block_size: int) -> list[str]:
        reasons = []
        if implementation() is None and block_size % PAGE:
            fix = f"cache.layout.block_size={PAGE}"
            reasons.append(f"FlashAttention-2 reads blocks of a multiple of {PAGE} slots, not of {block_size} ({fix})")
        if layer.k_dim != layer.v_dim or layer.k_dim % 8 or layer.k_dim > LARGEST:
            valid = f"keys and values must have one size, a multiple of 8 up to {LARGEST}"
            reasons.append(f"{valid}, not {layer.k_dim} and {layer.v_dim}")
        return reasons

    def attend(
        self, q: torch.Tensor, storage: LayerStorage, plan: StepPlan, sink_q: torch.Tensor | None = None
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        key, spec = (storage.group, storage.block_size), storage.spec
        todo = self._shared.get(plan, key, lambda: _todo(plan, *key))
        self.clean(storage, todo.dirty)
        k, v = (slotwise(planes["payload"], _page(storage.block_size)) for planes in (storage.k, storage.v))
        return varlen_attn(
            q.contiguous(),
            k,
            v,
            plan.query_starts,
            todo.starts,
            plan.max_query,
            plan.max_context,
            scale=spec.scale,
            window_size=CAUSAL,
            enable_gqa=spec.q_heads != spec.kv_heads,
            seqused_k=plan.groups[storage.group].context_lens,
            block_table=todo.tables,
            num_splits=1,
        )


def implementation() -> str | None:
    """Name of the implementation that was activated, None for torch's own."""
    current = getattr(attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def missing_arguments() -> list[str]:
    """Of those that are needed, the ones that this torch does not know."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return list(NEEDED)
    return [name for name in NEEDED if name not in inspect.signature(varlen_attn).parameters]


def _page(block_size: int) -> int:
    """P: blocks are cut into pages, so that little of them has to be cleaned."""
    return math.gcd(block_size, PAGE)


def _todo(plan: StepPlan, group: int, block_size: int) -> Todo:
    page, mine, host = _page(block_size), plan.groups[group], plan.host.groups[group]
    tables, each = mine.tables, block_size // page
    pieces = torch.arange(each, dtype=tables.dtype, device=tables.device)
    tables = (tables[:, :, None] * each + pieces).flatten(1)
    begins = torch.arange(tables.shape[1], dtype=tables.dtype, device=tables.device) * page
    tables = torch.where(begins < mine.context_lens[:, None], tables, 0)
    dirty = np.concatenate([np.arange(page), tail(host, block_size, page)])
    starts = None
    if implementation() is None:
        starts = sent(np.concatenate([[0], np.cumsum(host.context_lens)]).astype(np.int32), tables.device)
    return Todo(tables, starts, sent(dirty, tables.device))
