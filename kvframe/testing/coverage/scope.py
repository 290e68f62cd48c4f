"""What is no decoder that stands alone, by facts of the module: it looks at another sequence, or at what follows.

Such a model may still be exact (an encoder that is run as a decoder, a decoder with no encoder beside it). These facts
decide only where it was refused; elsewhere they are a note.
"""

from __future__ import annotations

import inspect
import re

import torch
from torch import nn

from kvframe.testing.coverage.build import build
from kvframe.testing.oracle import teacher_logits

CROSS = re.compile(r"cross_?att|encoder_att", re.IGNORECASE)
PROBE = 12  # tokens


def out_of_scope(module: nn.Module, name: str, config_class: type) -> str | None:
    """The fact, or None. `module` is the tiny model of that class."""
    for path, part in module.named_modules():
        if CROSS.search(path.rpartition(".")[2]) or CROSS.search(type(part).__name__):
            return f"has cross-attention ({path}, {type(part).__name__}): a decoder that looks at another sequence"
    if ahead := looks_ahead(module):
        return ahead
    parameter = inspect.signature(config_class).parameters.get("is_decoder")
    if parameter is not None and parameter.default is False:
        try:
            ahead = looks_ahead(build(name, config_class, is_decoder=False))
        except Exception:  # it is a decoder or nothing
            ahead = None
        return ahead and f"an encoder: without is_decoder=True it {ahead}"
    return None


def looks_ahead(module: nn.Module) -> str | None:
    """Does a token's answer change when a later token does?"""
    tokens = list(range(5, 5 + PROBE))
    try:
        a, b = teacher_logits(module, tokens), teacher_logits(module, [*tokens[:-1], tokens[-1] + 1])
    except Exception:
        return None  # it cannot run alone: that is why it was refused
    off = float(((a - b)[:-1].abs().max() / a.std().clamp_min(1e-6)).nan_to_num(0.0))
    if off > 1e-3:
        return f"is not causal: another last token changes the logits before it by {off:.2g} standard deviations"
    return None


def ref_error(module: nn.Module) -> str | None:
    """Why transformers itself cannot run the model on token ids alone; None when it can."""
    try:
        logits = teacher_logits(module, list(range(5, 5 + PROBE)))
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    fine = logits.dim() == 2 and len(logits) == PROBE and bool(torch.isfinite(logits).all())
    return None if fine else f"its logits have the shape {tuple(logits.shape)} or are not finite"
