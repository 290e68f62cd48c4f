"""FlashInfer's paged attention as a kernel: decode steps by its decode wrapper, all others by its prefill wrapper.

Source: Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving", MLSys 2025
(arXiv:2501.01005); the wrappers' documentation and the CUDA sources of flashinfer-python 0.7.4. Planes are its paged
caches in the layout "NHD", keys and values apart. `plan` of a wrapper works out who computes what, once per step for
all layers of a kind; `run` is called per layer.

Pages. The library takes pages of any size, so ours need not be the cache's blocks (see kvframe.kernels.pages): under
full attention they are pieces of at most 16 slots. Under a window they are single slots, and the list begins with the
first one that a query of this step sees: dropped blocks, and dead slots of a block that lives, do not occur in it. The
library counts positions from the end, so what is left out in front shifts neither its causal mask nor its window:

    query i of n stands at p = m - n + i, and sees key j of m if  p - window_left <= j <= p,  window_left = window - 1

A decode step has one query per request, which sees all that is listed: it needs no window.

NaN. Of its backend fa2 the sources say: masked scores are replaced, and rows of V behind the end of a request are
loaded as zeros. Rows in front of the end are multiplied by their weight even if that is 0. kvframe.kernels.library says
what follows; the end of last pages is cleaned nonetheless, since other backends and releases may load it.

Shape legend: T tokens of the step, R requests, Hq/Hkv query/KV heads, D size of a head, P slots of a page.
"""

from __future__ import annotations

import importlib.util
import math
from typing import NamedTuple

import torch
from kvframe_plugins.flashinfer.compiler import no_compiler
from kvframe_plugins.flashinfer.wrappers import Decode, Kind, Prefill, Wrappers

from kvframe.errors import OptionError
from kvframe.kernels.library import LibraryKernel, slotwise
from kvframe.kernels.of_step import OfStep
from kvframe.kernels.pages import Pages, first_seen
from kvframe.moving import sent
from kvframe.storage import LayerStorage
from kvframe.types import LayerSpec, StepPlan

PACKAGE = "flashinfer"
SIZES = (64, 128, 256)  # of heads, for which both wrappers have kernels
MOST = 16  # slots of a page
BACKENDS = ("fa2", "auto")


class Listed(NamedTuple):
    """Pages of a step. Attributes: host: as numpy; ids int32 [M], tail int64 [X]: on the device."""

    host: Pages
    ids: torch.Tensor
    tail: torch.Tensor


class FlashInferKernel(LibraryKernel):
    """Vectors as they are, full attention or a window, softcaps. Keeps what it derived from the last plan, and buffers.

    Args:
        backend: which of its kernels the library takes for steps with prompts: "fa2", or "auto" for its own choice
            (FlashAttention-3 on Hopper). Decode steps are fa2.
        workspace_mib: of the buffer for partial results, one per device. The library recommends 128.
    Raises: OptionError for a value that cannot be.
    """

    name = "flashinfer"
    windows = True
    softcap = True

    def __init__(self, backend: str = "fa2", workspace_mib: int = 128):
        if backend not in BACKENDS:
            raise OptionError("backend", backend, "does not exist", options=BACKENDS, fix="{name}=fa2")
        if isinstance(workspace_mib, bool) or not isinstance(workspace_mib, int) or workspace_mib < 1:
            raise OptionError("workspace_mib", workspace_mib, options=["an integer >= 1"], fix="{name}=128")
        self._wrappers = Wrappers(backend, workspace_mib << 20)
        self._shared = OfStep()

    def missing(self, device: torch.device) -> list[str]:
        if importlib.util.find_spec(PACKAGE) is None:
            return ["flashinfer is not installed (pip install flashinfer-python)"]
        return no_compiler() if device.type == "cuda" else []

    def misfits(self, layer: LayerSpec, block_size: int) -> list[str]:
        if layer.k_dim != layer.v_dim or layer.k_dim not in SIZES:
            valid = " or ".join(map(str, SIZES))
            return [f"keys and values must both have {valid} numbers, not {layer.k_dim} and {layer.v_dim}"]
        return []

    def attend(
        self, q: torch.Tensor, storage: LayerStorage, plan: StepPlan, sink_q: torch.Tensor | None = None
    ) -> torch.Tensor:
        kind, key = self._kind(q, storage, plan), (storage.group, storage.block_size)
        listed: Listed = self._shared.get(plan, key, lambda: _pages(storage, plan, kind))
        turns, given = self._wrappers.of(kind), (plan.host.query_starts, listed.host, listed.ids)
        wrapper: Decode | Prefill = self._shared.get(plan, kind, lambda: turns.plan(*given))
        self.clean(storage, listed.tail)
        k, v = (slotwise(planes["payload"], kind.page) for planes in (storage.k, storage.v))
        return wrapper.run(q.contiguous(), k, v)

    def _kind(self, q: torch.Tensor, storage: LayerStorage, plan: StepPlan) -> Kind:
        spec, window = storage.spec, storage.retention.window
        page = math.gcd(storage.block_size, MOST) if window is None else 1
        decoding = plan.max_query == 1
        left = -1 if window is None or decoding else window - 1
        heads = spec.q_heads, spec.kv_heads, spec.k_dim
        return Kind(q.device, q.dtype, storage.group, decoding, *heads, spec.scale, spec.softcap or 0.0, left, page)


def _pages(storage: LayerStorage, plan: StepPlan, kind: Kind) -> Listed:
    group, window = plan.host.groups[storage.group], storage.retention.window
    first = None if window is None else first_seen(plan.host, group, window)
    found = Pages.of(group, storage.block_size, kind.page, first)
    return Listed(found, sent(found.ids, kind.device), sent(found.tail, kind.device))
