"""What transformers does without kvframe: `generate()` with its caches, or with none.

    requests   a a a            _ _ _ a a a | A A A A A        one call: prompts are padded on the left, and every row
               b b b b b b      b b b b b b | B B - - -        runs to the longest output (- is computed for nobody)

Only tokens that were asked for count as output. The bytes are those of the cache's own tensors after each step; what
concatenation needs in passing is not in them. In use are the slots of tokens that a running request still needs.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, StaticCache, StoppingCriteria
from transformers.cache_utils import Cache

from kvframe.comparison.plain import plain
from kvframe.comparison.watch import Watch
from kvframe.errors import ConfigError
from kvframe.outputs import RequestOutput
from kvframe.types import Request

Advance = Callable[[int], None]
WARM = 8  # tokens of the prompt that nobody sees
PAD = 0


class Baseline(ABC):
    """A way to decode on the weights of an HFModel.

    Attributes:
        exact: are keys and values kept as they are?
        requests: only the first so many of a round are run; None: all.
        pack_weights: see kvframe.comparison.plain.
    """

    exact = True
    requests: int | None = None
    pack_weights = False

    @abstractmethod
    def open(self, model: Any, advance: Advance, longest: int) -> Any:
        """A context that yields a player (`answer(requests) -> outputs`, `figures() -> dict`), warmed up, with an
        empty cache. The model is kvframe's again when it ends.

        Args:
            advance: told of every n output tokens. longest: tokens of the longest request that will come.
        """

    def timeline(self, model: Any, stops: Sequence[int]) -> list[tuple[int, int]] | None:
        """(reserved, used) bytes of one request alone when it holds so many tokens (ascending); None: not known."""
        return None


class Generate(Baseline):
    """`generate()` on the left-padded batch.

    Args:
        cache: "dynamic", "static", or "none". batch: most requests of one call.
        requests, pack_weights: see Baseline.
    """

    CACHES = ("dynamic", "static", "none")

    def __init__(
        self, cache: str = "dynamic", batch: int = 64, requests: int | None = None, pack_weights: bool = False
    ):
        if cache not in self.CACHES:
            raise ConfigError(f"baseline.cache={cache!r} does not exist", options=self.CACHES)
        check_counts(batch=batch, requests=requests)
        self.cache, self.batch, self.requests, self.pack_weights = cache, batch, requests, pack_weights

    @contextmanager
    def open(self, model: Any, advance: Advance, longest: int) -> Iterator[Player]:
        with plain(model, self.pack_weights) as module:
            yield Player(self, model, module, advance)

    def timeline(self, model, stops):
        if self.cache == "none":
            return None
        config = model.module.config.get_text_config()
        cache = DynamicCache(config=config) if self.cache == "dynamic" else StaticCache(config, max_cache_len=stops[-1])
        points, before, dtype = [], 0, getattr(torch, model.dtype)
        for stop in stops:
            for spec in model.layers:
                if spec.kv_source is None:
                    shapes = ((1, spec.kv_heads, stop - before, dim) for dim in (spec.k_dim, spec.v_dim))
                    cache.update(*(torch.zeros(s, dtype=dtype, device=model.device) for s in shapes), spec.index)
            reserved, used, _ = held(cache, [stop])
            points.append((reserved, int(used)))
            before = stop
        return points


class Player:
    """Plays rounds of requests by calls of `generate()`."""

    def __init__(self, baseline: Generate, model: Any, module: Any, advance: Advance):
        self.baseline, self.model, self.module, self.advance = baseline, model, module, lambda n: None
        warm = Request(prompt_tokens=list(range(WARM)), id="warm")
        self._watch, self._news = Watch(), [2]
        self._generate([warm], time.perf_counter())
        self._watch, self.advance = Watch(), advance

    def answer(self, requests: Sequence[Request]) -> list[RequestOutput]:
        began, size, outputs = time.perf_counter(), self.baseline.batch, []
        requests = requests[: self.baseline.requests]
        for i in range(0, len(requests), size):
            part = requests[i : i + size]
            self._news = [request.sampling.max_new_tokens for request in part]
            outputs += self._generate(part, began)
        return outputs

    def figures(self) -> dict:
        return {**self._watch.figures(), "bytes_per_token": self._watch.token_bytes or None}

    def _generate(self, requests: Sequence[Request], began: float) -> list[RequestOutput]:
        """One call."""
        ids, mask = padded([request.prompt_tokens for request in requests])
        lengths, width, most = mask.sum(1).tolist(), ids.shape[1], max(self._news)
        kind, watch, caches = self.baseline.cache, self._watch, []
        steps = Steps(self.model.device)

        def step(seconds: float, n: int) -> None:
            """The n-th token of each row has come."""
            held_tokens = [length + n - 1 if n <= new else 0 for length, new in zip(lengths, self._news)]
            reserved, used, token_bytes = held(caches[-1] if caches else None, held_tokens)
            watch.token_bytes = token_bytes or watch.token_bytes
            computed = width + n - 1 if kind == "none" else width if n == 1 else 1
            watch.step(seconds, len(requests) * computed, reserved, used)
            wanted = sum(n <= new for new in self._news)
            for _ in range(wanted):
                watch.meter.token(seconds if n > 1 else None)
            self.advance(wanted)

        steps.told = step
        hook = self.module.register_forward_pre_hook(_keep_cache(caches), with_kwargs=True)
        steps.start()
        try:
            with torch.inference_mode():
                out = self.module.generate(
                    ids.to(self.model.device),
                    attention_mask=mask.to(self.model.device),
                    max_new_tokens=most,
                    do_sample=False,
                    use_cache=kind != "none",
                    cache_implementation=kind if kind == "static" else None,
                    eos_token_id=self.model.vocab_size,  # no token has this id
                    pad_token_id=PAD,
                    stopping_criteria=[steps],
                )
        finally:
            hook.remove()
        assert out.shape[1] == width + most, "transformers stopped early"
        return [
            watch.finished(request, out[i, width : width + new].tolist(), began, steps.times[:new])
            for i, (request, new) in enumerate(zip(requests, self._news))
        ]


class Steps(StoppingCriteria):
    """Never stops; `generate()` asks it once per step, right after the tokens of the step."""

    def __init__(self, device: str):
        self.cuda, self.times, self.told = device.startswith("cuda"), [], None

    def start(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, input_ids, scores, **kwargs):
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.times.append(now)
        self.told(now - self._last, len(self.times))
        self._last = now
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _keep_cache(found: list) -> Callable:
    """A hook that keeps the transformers cache which a forward was given, under whatever name."""

    def hook(module, args, kwargs):
        if not found:
            found.extend(value for value in kwargs.values() if isinstance(value, Cache))

    return hook


def padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask int64 [B, longest], padded on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.as_tensor(prompt, dtype=torch.long)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def held(cache: Cache | None, lengths: Sequence[int]) -> tuple[int, float, float]:
    """Bytes of a transformers cache's keys and values `[B, Hkv, slots, D]`: reserved, of live tokens, and of one token
    over all layers. `lengths`: live tokens of each row."""
    reserved, used, token_bytes = 0, 0.0, 0.0
    for layer in cache.layers if cache is not None else ():
        keys, values = layer.keys, layer.values
        if keys is None or not keys.numel():
            continue
        size = keys.nbytes + values.nbytes
        slots = keys.shape[2]
        slot = size / (keys.shape[0] * slots)
        reserved += size
        used += slot * sum(min(length, slots) for length in lengths)
        token_bytes += slot
    return reserved, used, token_bytes


def check_counts(**values: int | None) -> None:
    """ConfigError for an option of a baseline that is no number of things."""
    for name, value in values.items():
        if value is None and name == "requests":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"baseline.{name}={value!r} cannot be used", options=["an integer >= 1"])
