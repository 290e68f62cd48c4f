"""Was a refusal needed? The model runs as if nobody had refused it, and its answer must not be REF's.

Three ways, as far as each one gets:

    alone    token ids and nothing else, under transformers alone: can it run at all?
    engine   the probe takes what it sees for plain causal attention, verification is off: the whole comparison
    chunks   a step as the engine would make it, with no cache: the second half of a text behind another text, under the
             model's own attention. What is missing then is what no cache of ours would have brought
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import nn

from kvframe.errors import UnsupportedModelError
from kvframe.hf import HFModel, masks, positions, seam
from kvframe.hf import model as model_file
from kvframe.hf.probe import Facts, record
from kvframe.testing.coverage.compare import TOLERANCE, compare
from kvframe.testing.coverage.scope import ref_error
from kvframe.testing.oracle import teacher_logits
from kvframe.types import LayerSpec

HALF = 12  # tokens of each half of a text


def without_refusal(module: nn.Module) -> tuple[bool, str]:
    """`(needed, what was seen)`. needed is False when the answer was REF's after all."""
    alone = ref_error(module)
    if alone is not None:
        return True, f"transformers itself cannot run it on token ids alone ({alone})"
    try:
        with mock.patch.object(model_file, "probe", lenient), mock.patch.object(positions, "first", lambda *_: 0):
            model = HFModel.from_module(module, verify=False)
        found = compare(module, model)
    except AssertionError as error:
        return True, f"without the refusal: {short(error)}"
    except UnsupportedModelError as error:
        return chunks(module, f"without the refusal: {short(error)}")
    except Exception as error:
        return chunks(module, f"without the refusal: {type(error).__name__}: {short(error)}")
    return False, f"without the refusal {found.tokens} tokens and their logits are REF's (error {found.error:.1g})"


def lenient(module: nn.Module, dry_forward) -> Facts:
    """What kvframe.hf.probe finds, without a doubt about anything."""
    recorder, layers = record(module, dry_forward), []
    for index, call in enumerate(recorder.calls):
        q, k, v = call.query, call.key, call.value
        if not (q.dim() == k.dim() == v.dim() == 4 and q.shape[2] == k.shape[2]):
            raise UnsupportedModelError(f"layer {index}: q, k, v have the shapes {[tuple(x.shape) for x in (q, k, v)]}")
        rule = None if call.mask is None else recorder.rule(call.mask)
        seen = masks.Fit() if rule is None else masks.fit(rule)
        scale = call.kwargs.get("scaling")
        layers.append(
            LayerSpec(
                index, q.shape[1], k.shape[1], k.shape[3], v.shape[3], k.shape[3] ** -0.5 if scale is None else scale,
                window=seen.window, chunk=seen.chunk, softcap=call.kwargs.get("softcap") or None,
            )  # fmt: skip
        )
    if not layers:
        raise UnsupportedModelError("no layer calls the attention interface")
    return Facts(tuple(layers), [call.module for call in recorder.calls], {})


def chunks(module: nn.Module, why: str) -> tuple[bool, str]:
    """`(needed, what was seen)` of a flat step [another text | second half] without a cache."""
    text, other = list(range(40, 40 + 2 * HALF)), list(range(5, 12))
    inputs = {"input_ids": torch.tensor([other + text[HALF:]]), "use_cache": False}
    if positions.accepted(module):
        inputs["position_ids"] = torch.tensor([[*range(len(other)), *range(HALF, 2 * HALF)]])
    try:
        with torch.inference_mode(), seam.implementation(module, "eager"):
            found = module(**inputs)[0][0][len(other) :].float()
    except Exception as error:
        return True, f"{why}; a flat step fails under its own attention, too: {type(error).__name__}: {short(error)}"
    wanted = teacher_logits(module, text)[HALF:]
    off = float(((found - wanted).abs().max() / wanted.std().clamp_min(1e-6)).nan_to_num(float("inf")))
    return off > TOLERANCE, f"{why}; in a flat step its own attention is off by {off:.2g} standard deviations"


def short(error: Exception) -> str:
    """The first part of a message, on one line."""
    text = " ".join(str(error).split("\n  fix:")[0].split())
    return text if len(text) <= 240 else text[:237] + "..."
