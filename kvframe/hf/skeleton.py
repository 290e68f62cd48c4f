"""A model without its weights: what its attention layers do, from the config's shapes, in little memory and time.

What the probe finds here is what it finds in the real model; nothing is read from the config but what transformers
reads to build the modules. Each way to get a model has a counterpart here with the same arguments, and names it in its
attribute `skeleton` (see kvframe.config.build_skeleton).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvframe.errors import ConfigError, UnsupportedModelError
from kvframe.hf import seam
from kvframe.hf.hub import explained, place_of, torch_dtype
from kvframe.hf.model import HFModel
from kvframe.hf.shadows import Hollow, Shadows


def skeleton(config: Any, dtype: torch.dtype, name: str, **options: Any) -> HFModel:
    """The model of a transformers config without weights, probed and not verified. It cannot compute anything.

    Its layers, lengths, dtype and bytes are the real model's, as long as the weights are stored in `dtype`.

    Args:
        config: of a causal language model. dtype: of weights, keys and values. name: for reports.
        options: of `AutoModelForCausalLM.from_config`.
    Raises: ConfigError: transformers cannot build it; UnsupportedModelError: see kvframe.hf.probe.

    Example:
        >>> from transformers import LlamaConfig
        >>> model = skeleton(LlamaConfig(), torch.bfloat16, "llama")
        >>> len(model.layers), model.layers[0].kv_heads, model.layers[0].k_dim
        (32, 32, 128)
    """
    from transformers import AutoModelForCausalLM

    try:
        with Hollow():
            module = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        if "Unrecognized configuration class" in first:
            raise UnsupportedModelError(f"{name} is not a causal language model: {first}") from error
        raise ConfigError(f"{name} cannot be built from its config: {type(error).__name__}: {first}") from error
    for part in seam.configs(module):
        if hasattr(part, "_experts_implementation"):
            part._experts_implementation = "eager"  # others are kernels that want real matrices
    with Shadows():
        model = HFModel(module, name, None, verify=False)
    if getattr(config, "quantization_config", None) is not None:
        model.notes.append(f"the config asks for quantized weights; they are counted in {model.dtype}")
    return model


# -- counterparts --------------------------------------------------------------------------------------------


def of_hub(
    name: str,
    dtype: str | None = None,
    device: str = "auto",
    quantize: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    verify: bool = True,
    label: str | None = None,
) -> HFModel:
    """kvframe.hf.load without weights. `name` may also be a file like config.json; `device` is not looked at.

    Raises: ConfigError, UnsupportedModelError.
    """
    kind, file = torch_dtype(dtype), Path(name or "").expanduser()
    place = str(file) if file.is_file() and file.suffix == ".json" else place_of(name)
    from transformers import AutoConfig

    more = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(place, revision=revision, **more)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise explained(name, error) from error
    model = skeleton(config, kind, label or name, **more)
    if quantize is not None:
        model.notes.append(f"model.quantize={quantize} is not counted: the weights are counted in {model.dtype}")
    return model


def of_shape(
    shape: str = "tiny", dtype: str | None = None, device: str = "auto", seed: int = 0, verify: bool = True
) -> HFModel:
    """kvframe.hf.random_model without weights. Raises: ConfigError naming the valid shapes."""
    from kvframe.shapes import find

    return skeleton(find(shape).config(), torch_dtype(dtype), f"random-{shape}")


def of_smollm2(
    dtype: str | None = None, device: str = "auto", verify: bool = True, cache_dir: str | None = None
) -> HFModel:
    """kvframe.hf.smollm2 without weights: its converted copy, or the GGUF file, has the config.

    Raises: MissingPackageError.
    """
    from transformers import AutoConfig

    from kvframe.hf.smol import config

    return skeleton(AutoConfig.for_model(**config(cache_dir)), torch_dtype(dtype), "smollm2")
