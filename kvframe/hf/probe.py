"""What each attention layer does, seen in one dry forward. No config is parsed.

The model runs a few tokens under a recording attention function (and a recording mask function, which only the
probe's name has). Each call is a fact; facts that this engine cannot reproduce are refused by name.

Shape legend: T tokens, Hq/Hkv query/KV heads, Dk/Dv key/value size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from kvframe.errors import UnsupportedModelError
from kvframe.hf import masks, seam
from kvframe.types import LayerSpec

NAME = "kvframe_probe"
ATTENTION_LIKE = re.compile(r"Attention|Attn")


@dataclass
class Call:
    """One call of the attention function."""

    module: nn.Module
    query: torch.Tensor  # [1, Hq, T, Dk]
    key: torch.Tensor  # [1, Hkv, T, Dk]
    value: torch.Tensor  # [1, Hkv, T, Dv]
    mask: torch.Tensor | None
    kwargs: dict


@dataclass
class Recorder:
    """What the dry forward left behind. The tensors are kept alive, so their addresses stay distinct."""

    calls: list[Call] = field(default_factory=list)
    rules: list[tuple[torch.Tensor, Callable]] = field(default_factory=list)  # (mask that was handed out, its rule)
    ran: list[tuple[str, nn.Module]] = field(default_factory=list)  # modules that look like attention and ran
    convolved: list[tuple[str, nn.Module]] = field(default_factory=list)  # modules that hold a convolution and ran

    def attention(self, module, query, key, value, attention_mask=None, **kwargs):
        self.calls.append(Call(module, query, key, value, attention_mask, kwargs))
        T, Hq = query.shape[2], query.shape[1]
        return value.new_zeros(query.shape[0], T, Hq, value.shape[-1]), None

    def mask(self, *args, **kwargs):
        """Called as transformers' mask functions are: sizes and `mask_function` by keyword."""
        q, k = kwargs.get("q_length"), kwargs["kv_length"]
        q = len(kwargs["cache_position"]) if q is None else q  # as older versions say it
        shape = (int(kwargs.get("batch_size", 1)), 1, int(q), int(k))
        mask = torch.zeros(shape, dtype=kwargs.get("dtype", torch.float32), device=kwargs.get("device"))
        self.rules.append((mask, kwargs["mask_function"]))
        return mask

    def rule(self, mask: torch.Tensor) -> Callable | None:
        """The rule of a mask that was handed out, also when the layer got a view of it."""
        for known, rule in self.rules:
            if mask.untyped_storage().data_ptr() == known.untyped_storage().data_ptr():
                return rule
        return None


@dataclass(frozen=True)
class Facts:
    """What the probe found: layers in order of their calls, their modules (one that is called again stands there
    again), and learned sinks."""

    layers: tuple[LayerSpec, ...]
    modules: list[nn.Module]
    sinks: dict[int, torch.Tensor]  # layer -> [Hq]


_current: Recorder | None = None  # transformers' registry is global, so is the one probe that may run


def probe(module: nn.Module, dry_forward: Callable[[], None]) -> Facts:
    """Runs `dry_forward` under the recording functions and turns the calls into facts.

    Raises: UnsupportedModelError naming the layer, its class and what was seen.
    """
    return facts(module, record(module, dry_forward))


def record(module: nn.Module, dry_forward: Callable[[], None]) -> Recorder:
    """Runs `dry_forward` under the recording functions.

    Raises: UnsupportedModelError when the model cannot run it.
    """
    from transformers.masking_utils import AttentionMaskInterface

    global _current
    recorder = _current = Recorder()
    seam.register(NAME, lambda *a, **k: _current.attention(*a, **k))
    AttentionMaskInterface.register(NAME, lambda *a, **k: _current.mask(*a, **k))
    hooks = [
        part.register_forward_pre_hook(lambda part, _, name=name, seen=seen: seen.append((name, part)))
        for name, part in module.named_modules()
        for seen, of_its_kind in (
            (recorder.ran, ATTENTION_LIKE.search(type(part).__name__)),
            (recorder.convolved, _convolution(part) > 1),
        )
        if of_its_kind
    ]
    try:
        with seam.implementation(module, NAME):
            dry_forward()
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(module).__name__} cannot run a flat forward of a few tokens: {type(error).__name__}: {error}"
        ) from error
    finally:
        _current = None
        for hook in hooks:
            hook.remove()
    return recorder


def facts(module: nn.Module, recorder: Recorder) -> Facts:
    """Calls -> LayerSpecs, or a refusal."""
    calls, name = recorder.calls, type(module).__name__
    if recorder.convolved:
        path, part = recorder.convolved[0]
        raise UnsupportedModelError(
            f"{name}: {path} ({type(part).__name__}) ran and holds a convolution over {_convolution(part)} tokens: "
            "a state outside attention, which this engine does not keep",
            fix="use a model whose only memory is attention",
        )
    called = {id(call.module) for call in calls}
    for path, part in recorder.ran:
        if not any(id(inner) in called for inner in part.modules()) and not _inside(module, path, called):
            raise UnsupportedModelError(
                f"{name}: {path} ({type(part).__name__}) ran but never called transformers' attention interface, so "
                "its keys and values cannot reach a cache",
                fix="use a model whose attention goes through transformers' AttentionInterface",
            )
    if not calls:
        raise UnsupportedModelError(
            f"{name}: no layer called transformers' attention interface in a forward, so there is nothing to cache",
            fix="use a model whose attention goes through transformers' AttentionInterface",
        )
    layers, sinks, fitted = [], {}, {}
    for index, call in enumerate(calls):
        where = f"{name}: attention layer {index} ({type(call.module).__name__})"
        spec, sink = _spec(where, index, call, calls, layers, recorder, fitted)
        layers.append(spec)
        if sink is not None:
            sinks[index] = sink.detach().reshape(-1)
    return Facts(tuple(layers), [call.module for call in calls], sinks)


def _spec(where, index, call, calls, layers, recorder, fitted) -> tuple[LayerSpec, torch.Tensor | None]:
    q, k, v, kwargs = call.query, call.key, call.value, call.kwargs

    def refuse(what: str):
        raise UnsupportedModelError(f"{where}: {what}")

    if not (q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0] == 1):
        refuse(f"q, k, v have the shapes {[tuple(x.shape) for x in (q, k, v)]}, not [1, heads, tokens, size]")
    if not q.shape[2] == k.shape[2] == v.shape[2]:
        refuse(f"{q.shape[2]} queries meet {k.shape[2]} keys in a forward without a cache: not a key for each token")
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
        refuse(f"query, key, value heads and sizes do not match: {[tuple(x.shape) for x in (q, k, v)]}")
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor) and ("bias" in key or "indices" in key):
            refuse(f"gets {key}, a tensor {tuple(value.shape)} that changes its scores")
    if kwargs.get("is_causal") is False:
        refuse("is not causal (is_causal=False)")
    rule = _rule(refuse, call, recorder, fitted)
    source = next((c for c in range(index) if _same(calls[c].key, k) and _same(calls[c].value, v)), None)
    if source is not None and (layers[source].window, layers[source].chunk) != (rule.window, rule.chunk):
        other = masks.Fit(layers[source].window, layers[source].chunk)
        refuse(f"reads the keys of layer {source} under another rule ({rule.name}, not {other.name})")
    scale = kwargs.get("scaling")
    sink = next((kwargs[n] for n in ("s_aux", "sinks") if kwargs.get(n) is not None), None)
    if sink is not None and sink.numel() != q.shape[1]:
        refuse(f"has learned sinks of shape {tuple(sink.shape)} for {q.shape[1]} query heads")
    softcap = kwargs.get("softcap")
    spec = LayerSpec(
        index=index,
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        k_dim=k.shape[3],
        v_dim=v.shape[3],
        scale=float(scale) if scale is not None else k.shape[3] ** -0.5,
        window=rule.window,
        chunk=rule.chunk,
        softcap=float(softcap) if softcap else None,
        sinks=sink is not None,
        kv_source=source,
        dtype=str(k.dtype).removeprefix("torch."),
    )
    return spec, sink


def _rule(refuse, call: Call, recorder: Recorder, fitted: dict) -> masks.Fit:
    """What a query of the layer sees: from the rule of its mask."""
    if call.mask is None:
        refuse("gets no mask in a forward of several tokens, so it is not causal")
    rule = recorder.rule(call.mask)
    if rule is None:
        refuse(
            f"gets a mask {tuple(call.mask.shape)} that transformers' mask functions did not make, so its rule beyond "
            "these tokens is unknown (an added bias, or a mask of the model's own)"
        )
    if id(rule) not in fitted:
        fitted[id(rule)] = masks.fit(rule)
    found = fitted[id(rule)]
    if found.what:
        refuse(f"its mask is neither causal nor causal with a window or with chunks: {found.what}")
    return found


def _convolution(part: nn.Module) -> int:
    """Tokens that a convolution of the module itself looks at; 0: it holds none."""
    return max((child.kernel_size[0] for child in part.children() if isinstance(child, nn.Conv1d)), default=0)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _inside(module: nn.Module, path: str, called: set[int]) -> bool:
    """Is the module at `path` a part of a module that called the interface?"""
    while "." in path:
        path = path.rpartition(".")[0]
        if id(module.get_submodule(path)) in called:
            return True
    return False
