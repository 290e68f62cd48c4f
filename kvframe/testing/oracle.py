"""REF, the oracle: the same transformers model, eager attention, no cache, fp32, one request alone.

Nothing of kvframe runs in it: no seam, no cache, no kernel. Under a retention, each attention layer gets the
mask that `retention.for_layer(spec).visible` gives, in place of the model's own.

Shape legend: L tokens of prompt + output, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from kvframe.hf import seam


def teacher_logits(module: nn.Module, tokens: Sequence[int], retention=None) -> torch.Tensor:
    """One eager forward over all tokens; float32 logits `[L, V]`.

    Args:
        module: a causal LM in fp32 (its attention implementation is set to eager inside and set back after).
        retention: None for the model's own masks; else the mask of each layer is `visible` and nothing else.
    """
    ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64))[None].to(next(module.parameters()).device)
    with torch.inference_mode(), seam.implementation(module, "eager"), _masked(module, retention, ids.shape[1]):
        logits = module(input_ids=ids, use_cache=False)[0][0]
    return logits.float()


def check_greedy(
    module: nn.Module,
    prompt: Sequence[int],
    output: Sequence[int],
    retention=None,
    tie: float = 1e-3,
) -> int:
    """Asserts that `output` is REF's greedy continuation of `prompt`.

    By teacher forcing over prompt + output: each output token is REF's argmax (lowest id on equal logits), up to
    the first position where REF's two best logits are closer than `tie`; from there on nothing is claimed.

    Returns: number of tokens that were compared.
    Raises: AssertionError naming the position, both tokens and both logits.
    """
    prompt, output = [int(t) for t in prompt], [int(t) for t in output]
    if not output:
        return 0
    assert prompt, "REF needs at least one prompt token"
    logits = teacher_logits(module, prompt + output[:-1], retention)[len(prompt) - 1 :]  # [len(output), V]
    assert bool(torch.isfinite(logits).all()), "REF's own logits are not finite"
    best = logits.topk(2, dim=-1).values
    for step, token in enumerate(output):
        row = logits[step]
        if float(best[step, 0] - best[step, 1]) < tie:
            return step
        wanted = int(row.argmax())
        assert token == wanted, (
            f"output token {step} (position {len(prompt) + step}) is {token} with REF logit {float(row[token]):.6f}, "
            f"REF says {wanted} with {float(row[wanted]):.6f} (second best {float(best[step, 1]):.6f}); "
            f"{step} token(s) before it agreed"
        )
    return len(output)


@contextlib.contextmanager
def _masked(module: nn.Module, retention, length: int):
    """Inside the block, each attention module gets the mask of `retention` for its layer."""
    if retention is None:
        yield
        return
    positions = np.arange(length)
    hooks = []
    for part in module.modules():
        binding = getattr(part, seam.ATTRIBUTE, None)
        if binding is None:
            continue
        visible = retention.for_layer(binding.spec).visible(positions[:, None], positions[None, :])  # [L, L]
        mask = torch.from_numpy(np.array(np.broadcast_to(visible, (length, length))))[None, None]  # [1, 1, L, L]
        hooks.append(part.register_forward_pre_hook(_replace(mask), with_kwargs=True))
    assert hooks, "REF under a retention needs a module that kvframe.hf has probed (HFModel.from_module)"
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _replace(visible: torch.Tensor):
    """A hook that hands a module the mask `visible [1, 1, L, L]` as eager attention wants it: 0 or the lowest."""

    def hook(part, args, kwargs):
        weight = next(part.parameters())
        mask = torch.zeros(visible.shape, dtype=weight.dtype, device=weight.device)
        mask.masked_fill_(~visible.to(weight.device), torch.finfo(weight.dtype).min)
        call = inspect.signature(part.forward).bind(*args, **kwargs)
        call.arguments["attention_mask"] = mask
        return call.args, call.kwargs

    return hook
