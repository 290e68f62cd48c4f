"""What a model is given, seen before it runs: transformers hands masks and token ids to nobody behind the model.

Two hooks on the outermost module, once per module. They do nothing unless a call brings a KVFrameCache.
"""

from __future__ import annotations

import weakref

from torch import nn

from kvframe.hf.past import ARGUMENTS

_HOOKED: weakref.WeakSet = weakref.WeakSet()


def install(module: nn.Module) -> None:
    """From now on a call of the module tells the KVFrameCache that it brings. A second call changes nothing."""
    if module not in _HOOKED:
        module.register_forward_pre_hook(_before, with_kwargs=True)
        module.register_forward_hook(_after, with_kwargs=True, always_call=True)
        _HOOKED.add(module)


def _cache(args, kwargs):
    """The cache among the arguments that wants to be told, or None."""
    for value in (*(kwargs.get(name) for name in ARGUMENTS), *args):
        if hasattr(value, "forward_begins"):
            return value
    return None


def _before(module: nn.Module, args, kwargs) -> None:
    cache = _cache(args, kwargs)
    if cache is not None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        cache.forward_begins(module, ids, kwargs.get("inputs_embeds"), kwargs.get("attention_mask"))


def _after(module: nn.Module, args, kwargs, output) -> None:
    cache = _cache(args, kwargs)
    if cache is not None:
        cache.forward_ends()
