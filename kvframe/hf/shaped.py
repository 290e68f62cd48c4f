"""Random weights in the shape of a known model: for speed and memory work without weights."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvframe.errors import CapacityError
from kvframe.hf.hub import torch_device, torch_dtype
from kvframe.hf.model import HFModel
from kvframe.memory import free_memory
from kvframe.shapes import find

BLOCK = (1 << 22) + 4099  # normal draws that all weights are cut from; no round number, so rows differ


def random_model(
    shape: str = "tiny",
    dtype: str | None = None,
    device: str = "auto",
    seed: int = 0,
    verify: bool = True,
) -> HFModel:
    """A model with the shape `shape` (see kvframe.shapes) and random weights; no tokenizer.

    The same shape, dtype and seed give the same weights on every device.
    Raises: ConfigError naming the valid shapes; CapacityError: the weights do not fit; UnsupportedModelError.
    """
    config, kind, place = find(shape).config(), torch_dtype(dtype), torch_device(device)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        need = sum(
            p.numel() * p.element_size() for p in AutoModelForCausalLM.from_config(config, dtype=kind).parameters()
        )
    free = free_memory(str(place))
    if need > free:
        raise CapacityError(
            f"model.shape={shape} in {str(kind).removeprefix('torch.')} has {need / 2**30:.1f} GiB of weights; "
            f"{free / 2**30:.1f} GiB are free on {place}",
            fix="model.dtype=bfloat16, or a smaller model.shape",
        )
    with torch.device(place), FastRandom(seed, place):
        module = AutoModelForCausalLM.from_config(config, dtype=kind)
    return HFModel(module, f"random-{shape}", None, verify)


random_model.skeleton = "kvframe.hf.skeleton.of_shape"


class FastRandom(TorchDispatchMode):
    """Random initialisation by copying: each tensor is cut from one block of normal draws.

    Millions of draws become a memory copy (8e9 weights in seconds instead of minutes), whatever code of transformers
    asks for them. Each tensor starts at another place of the block. Uniform draws are left out: torch makes them in the
    constructors of layers, and transformers draws normally afterwards.
    """

    def __init__(self, seed: int, device: torch.device):
        super().__init__()
        draws = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed))
        self.block, self.at, self.scaled = draws.to(device), 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name == "aten::uniform_":
            return args[0]
        if name == "aten::normal_":
            given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | (kwargs or {})
            return self._fill(args[0], float(given.get("std", 1.0)), float(given.get("mean", 0.0)))
        return func(*args, **(kwargs or {}))

    def _fill(self, x: torch.Tensor, std: float, mean: float) -> torch.Tensor:
        key = (std, mean, x.dtype)
        if key not in self.scaled:
            self.scaled = {key: (self.block * std + mean).to(x.dtype)}  # the next tensors mostly want the same
        block = self.scaled[key]
        flat, done = x.view(-1) if x.is_contiguous() else x.new_empty(x.numel()), 0
        while done < flat.numel():
            n = min(flat.numel() - done, BLOCK - self.at)
            flat[done : done + n] = block[self.at : self.at + n]
            self.at, done = (self.at + n) % BLOCK, done + n
        return x if x.is_contiguous() else x.copy_(flat.view(x.shape))
