"""Loading a model by hub id or local folder."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

from kvframe.errors import ConfigError, MissingPackageError, UnsupportedModelError
from kvframe.hf.model import HFModel

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
QUANTIZE = ("8bit", "4bit")
DEFAULT_DTYPE = "bfloat16"


def load(
    name: str,
    dtype: str | None = None,
    device: str = "auto",
    quantize: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    verify: bool = True,
    label: str | None = None,
) -> HFModel:
    """A causal LM and its tokenizer.

    Args:
        name: hub id ("org/model") or local folder.
        dtype: "bfloat16" (default), "float16" or "float32". device: "auto" (cuda if there is one), "cpu", "cuda:0", ...
        quantize: "8bit" or "4bit" weights by bitsandbytes; None keeps the weights in `dtype`.
        trust_remote_code, revision: as in transformers. verify: see kvframe.hf.verify. label: name in reports.
    Raises: ConfigError for a wrong value, MissingPackageError, UnsupportedModelError.
    """
    kind, place = torch_dtype(dtype), torch_device(device)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    if quantize is not None:
        options |= _quantized(quantize, kind, place)
    source = place_of(name)
    from transformers import AutoModelForCausalLM

    try:
        with progress_bars(label is None and sys.stderr.isatty()):
            module = AutoModelForCausalLM.from_pretrained(source, dtype=kind, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise explained(name, error) from error
    if quantize is None:
        module = module.to(place)
    model = HFModel(module, label or name, None, verify)
    model.tokenizer = _tokenizer(model, source, trust_remote_code, revision)
    return model


load.skeleton = "kvframe.hf.skeleton.of_hub"


@contextlib.contextmanager
def progress_bars(shown: bool):
    """transformers' bars while weights are read, as they were before afterwards."""
    from transformers.utils import logging

    was = logging.is_progress_bar_enabled()
    if not shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()


def torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if (dtype or DEFAULT_DTYPE) not in DTYPES:
        raise ConfigError(f"model.dtype={dtype!r} does not exist", options=DTYPES)
    return DTYPES[dtype or DEFAULT_DTYPE]


def torch_device(device: str) -> torch.device:
    """Raises: ConfigError for a device that torch does not know or this machine does not have."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"model.device={device!r} is no device", options=["auto", "cpu", "cuda", "cuda:0"]) from None
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        have = ["auto", "cpu", *(f"cuda:{i}" for i in range(count))]
        raise ConfigError(f"model.device={device!r}: this machine has {count} CUDA device(s)", options=have)
    return found


def place_of(name: str) -> str:
    """The folder, or the hub id; a path that does not exist is told apart from a hub id by its looks."""
    name = os.fspath(name) if name else ""
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.name={name!r} is a folder without config.json", fix="name a model folder")
        return str(folder)
    if folder.is_file():
        raise ConfigError(f"model.name={name!r} is a file", fix="name the folder of a Hugging Face model, or a hub id")
    looks_like_path = name.startswith((".", "/", "~")) or "\\" in name or name.count("/") != 1 and "/" in name
    if not name or looks_like_path:
        raise ConfigError(
            f"model.name={name!r}: there is no such folder",
            options=["a folder with config.json", "a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"],
            fix="check the spelling, or type model=smollm2 for a model that needs no hub",
        )
    return name


def _quantized(quantize: str, kind: torch.dtype, place: torch.device) -> dict[str, Any]:
    if quantize not in QUANTIZE:
        raise ConfigError(f"model.quantize={quantize!r} does not exist", options=[*QUANTIZE, "null"])
    missing = [name for name in ("bitsandbytes", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"model.quantize={quantize} needs {' and '.join(missing)}", fix=f"pip install {' '.join(missing)}"
        )
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a cast in every layer of every step
    config = (
        # threshold 0: which columns count as outliers would depend on the other requests of a step
        BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
        if quantize == "8bit"
        else BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=kind)
    )
    return {"quantization_config": config, "device_map": {"": place}}


def explained(name: str, error: Exception) -> Exception:
    """transformers' errors as ours: what was typed, and what to do."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if "trust_remote_code" in text:
        return ConfigError(
            f"model.name={name!r} brings code of its own", fix="read that code, then set model.trust_remote_code=true"
        )
    if "Unrecognized configuration class" in text:
        return UnsupportedModelError(f"model.name={name!r} is not a causal language model: {first}")
    return ConfigError(
        f"model.name={name!r} cannot be loaded: {first}",
        fix="check the spelling and the network, or name a local folder; model=smollm2 needs no hub",
    )


def _tokenizer(model: HFModel, source: str, trust_remote_code: bool, revision: str | None):
    """The model's tokenizer, or None and a note when it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, revision=revision)
        if len(tokenizer) > len(tokenizer.all_special_tokens) + 1:
            return tokenizer
        first = "no tokenizer files"  # transformers answers an empty tokenizer for some model types
    except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    model.notes.append(f"no tokenizer: {first}")
    return None
