"""The seam to transformers: one attention function, and who it calls.

transformers hands every attention layer's q, k, v to the function whose name stands in the config
(`config._attn_implementation`). kvframe registers one such function and *no* mask for it, so masks are never
built. The function finds the cache and the running plan through an attribute of the layer's module, because
some models do not pass keyword arguments on.

Shape legend: T tokens of a flat step, Hq/Hkv query/KV heads, Dk/Dv key/value size.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from kvframe.errors import ConfigError
from kvframe.hf import opaque
from kvframe.types import LayerSpec

NAME = "kvframe"
ATTRIBUTE = "_kvframe"


class Running:
    """What all layers of one model share: the cache, and the plan of the running step. None between steps; `batch` is a
    forward of transformers' own making, with a KVFrameCache (see kvframe.hf.generate_cache.packed)."""

    __slots__ = ("__weakref__", "batch", "cache", "number", "plan")

    def __init__(self):
        self.batch = self.cache = self.plan = self.number = None


class Binding:
    """The attribute of one attention module: its place among the model's attention layers, and what it does.

    A model that runs a module several times in one forward (loops over its layers) has as many attention layers in it,
    each with keys and values of its own; `turn` says whose turn it is.

    Attributes:
        spec: of the first one. layers: index of each, in order of the calls.
    """

    __slots__ = ("calls", "layers", "plan", "running", "spec")

    def __init__(self, spec: LayerSpec, running: Running):
        self.spec, self.running, self.layers = spec, running, [spec.index]
        self.plan, self.calls = None, 0

    def turn(self) -> int:
        """The layer that is called now. A new plan is a new forward, whatever became of the one before."""
        if len(self.layers) == 1:
            return self.layers[0]
        if self.plan is not self.running.plan:
            self.plan, self.calls = self.running.plan, 0
        self.calls += 1
        return self.layers[(self.calls - 1) % len(self.layers)]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`q [T, Hq, Dk]`, `k [T, Hkv, Dk]`, `v [T, Hkv, Dv]` -> `[T, Hq, Dv]`, by the cache and plan of this step."""
        running = self.running
        return running.cache.attend(self.turn(), q, k, v, running.plan)


def attention(module, query, key, value, attention_mask=None, **kwargs):
    """`query [1, Hq, T, Dk]`, `key [1, Hkv, T, Dk]`, `value [1, Hkv, T, Dv]` -> `([1, T, Hq, Dv], None)`."""
    try:
        binding = module._kvframe
    except AttributeError:
        raise _nobody(module) from None
    running = binding.running
    if torch.compiler.is_compiling():
        from kvframe.hf import operators

        return operators.attend(query, key, value, binding.turn(), running.number, binding.spec.v_dim), None
    if running.batch is not None:
        return running.batch.attend(binding.turn(), query, key, value), None
    if running.plan is None:
        raise _nobody(module)
    flat = (x[0].transpose(0, 1) for x in (query, key, value))
    return opaque.one(binding.attend, *flat).unsqueeze(0), None


def _nobody(module: nn.Module) -> ConfigError:
    return ConfigError(
        f"{type(module).__name__} attends through kvframe (attn_implementation={NAME!r}), and nothing of kvframe runs",
        fix='past_key_values=KVFrameCache(model), or model.set_attn_implementation("sdpa")',
    )


def register(name: str, function) -> None:
    """Makes `function` known to transformers under `name`."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(name, function)


def bind(modules: list[nn.Module], layers: tuple[LayerSpec, ...]) -> Running:
    """Gives the modules, in order of their calls, their bindings. Answers what they share: a module that was bound
    before keeps it, so that two wrappers of one model do not take it from each other."""
    register(NAME, attention)
    before = getattr(modules[0], ATTRIBUTE, None)
    running = Running() if before is None else before.running
    bound: dict[int, Binding] = {}
    for module, spec in zip(modules, layers, strict=True):
        if id(module) in bound:
            bound[id(module)].layers.append(spec.index)
            continue
        bound[id(module)] = Binding(spec, running)
        object.__setattr__(module, ATTRIBUTE, bound[id(module)])
    return running


def bindings(module: nn.Module) -> list[Binding]:
    """What the attention modules of a model are bound to."""
    return [vars(part)[ATTRIBUTE] for part in module.modules() if ATTRIBUTE in vars(part)]


def configs(module: nn.Module) -> list:
    """Every config object that decides which attention function some part of the model calls."""
    found: dict[int, object] = {}

    def add(config):
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation"):
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", None) or ():
            add(getattr(config, name, None))

    for part in module.modules():
        add(getattr(part, "config", None))
    return list(found.values())


def set_implementation(module: nn.Module, name: str) -> None:
    """From now on the model's attention layers call the function `name`.

    Set on the configs themselves: `set_attn_implementation` refuses models by a search in their source
    text, where kvframe looks at what they do.
    """
    for config in configs(module):
        config._attn_implementation = name


@contextlib.contextmanager
def implementation(module: nn.Module, name: str):
    """The model's attention layers call the function `name` inside the block."""
    before = [(config, config._attn_implementation) for config in configs(module)]
    set_implementation(module, name)
    try:
        yield
    finally:
        for config, old in before:
            config._attn_implementation = old
