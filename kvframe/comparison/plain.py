"""The model's weights as transformers would run them, without kvframe: for baselines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from kvframe.hf import packing, seam


@contextmanager
def plain(model: Any, pack_weights: bool = False) -> Iterator[nn.Module]:
    """The module of an HFModel with transformers' own attention; inside the block kvframe has no part in it.

    Args:
        pack_weights: leave the linear layers the copies of their weights that kvframe gave them, where it did (see
            kvframe.hf.packing); False: as transformers would multiply.
    """
    module = model.module
    with nullcontext() if pack_weights else packing.unpacked(module):
        with seam.implementation(module, attention(module)):
            yield module


def attention(module: nn.Module) -> str:
    """The faster of transformers' attention functions that the model can use everywhere: sdpa, else eager."""
    return "sdpa" if getattr(module, "_supports_sdpa", False) else "eager"


def logits(module: nn.Module, tokens) -> torch.Tensor:
    """float32 [L, V] of one forward over all tokens (int [L])."""
    device = next(module.parameters()).device
    ids = torch.as_tensor(tokens, dtype=torch.long, device=device)[None]
    with torch.inference_mode():
        return module(input_ids=ids, use_cache=False)[0][0].float()
