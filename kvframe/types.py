"""Frozen values that travel between the rooms. No torch, no logic beyond derived sizes.

Shape legend: T tokens of a step, R requests of a step, N blocks of a pool, B table columns.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvframe.errors import RequestError

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rotary:
    """How the queries and keys of a layer turn with their position p: pair i of what turns by `p * inv_freq[i]`.

    With k_dim 8, start 2 and two frequencies the numbers 2..5 turn, and the others do not:

        halves        0 1 [a b | a b] 6 7      pairs (2, 4) and (3, 5)
        interleaved   0 1 [a a | b b] 6 7      pairs (2, 3) and (4, 5)

    Attributes:
        inv_freq: radians per token of each pair, float32 values; empty: the layer does not turn at all (NoPE).
        start: the first number of a vector that turns.
        interleaved: pairs are neighbours instead of halves.
    """

    inv_freq: tuple[float, ...] = ()
    start: int = 0
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What the probe saw one attention layer do.

    Attributes:
        index: order of the layer among the attention layers of the model, from 0.
        q_heads, kv_heads: number of query heads and of key/value heads (`q_heads % kv_heads == 0`).
        k_dim, v_dim: size of one key and one value vector; they may differ (MLA).
        scale: factor on the scores before softcap and softmax.
        window: the model's own window: a query sees keys with `q_pos - k_pos < window`; None: all.
        chunk: the model's own chunks: a query sees keys with `k_pos // chunk == q_pos // chunk`; None: all.
        softcap: scores become `softcap * tanh(scores / softcap)`; None: off.
        sinks: the layer has one learned sink logit per query head (gpt-oss).
        kv_source: index of the layer whose keys and values this layer reads, or None for its own.
        dtype: dtype of q, k and v as a string, e.g. "float32".
        rotary: how queries and keys turn with position, the same way at any length; None: not known.
        no_rotary: why it is not known.
    """

    index: int
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kv_source: int | None = None
    dtype: str = "float32"
    rotary: Rotary | None = None
    no_rotary: str = "nobody looked at its queries"


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One stored tensor of a codec: `[num_blocks, block_size (/ group), kv_heads, *shape]`.

    Attributes:
        shape: trailing shape per token (or per group of tokens) and KV head.
        dtype: dtype as a string; "model" means the dtype of the model's keys and values.
        per: "token" or "group".
    """

    shape: tuple[int, ...]
    dtype: str = "model"
    per: str = "token"

    def resolved(self, model_dtype: str) -> str:
        return model_dtype if self.dtype == "model" else self.dtype

    def nbytes(self, model_dtype: str) -> int:
        """Bytes of one entry (per token or per group) and one KV head."""
        return int(np.prod(self.shape, dtype=np.int64)) * ITEMSIZE[self.resolved(model_dtype)]


@dataclass(frozen=True, slots=True)
class Ranged:
    """Numbers as steps of a range, `zero + scale * code` (asymmetric quantization): what a codec promises by
    `Codec.ranged`, so that a fused kernel may write and read its planes.

        most   = the least of the largest number of the dtype of scales, and 2 ** 126
        zero   = the least x of those that share it, within +-most, rounded down to the dtype
        scale  = (the largest x, within +-most, - zero) / (2 ** bits - 1), rounded up to the dtype
        code   = (x within +-2 ** 126, - zero) / max(scale, 2 ** -126), to the nearest integer, ties to even,
                 and to 0 .. 2 ** bits - 1

    in float32, after each operation. A NaN makes scale and zero NaN, and all codes that share them 0. float16 gets what
    is beyond its range as +-65504.

    Planes: `payload [D * bits / 8]`, uint8, per token: the first number of a byte in its lowest bits; `scale` and
    `zero` of one dtype, `[D]` per group of tokens where `span` is 0, else `[ceil(D / span)]` per token.

    Attributes:
        bits: of a code: 2, 4 or 8.
        span: neighbouring numbers of a vector that share a scale, the last ones may be fewer; 0: the same number of
            all tokens of a group shares one.
    """

    bits: int
    span: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """What a prefix index found for a request.

    Attributes:
        n_tokens: leading tokens that need no compute, tail included.
        blocks: per layer group, the block ids of the complete blocks (int32 [n]); 0 is a hole that no
            future query needs.
        tail: per layer group `(source block, m)`: the first m slots of `source` are to be copied into
            the request's own next block; empty when the match ends at a block boundary.
        note: whatever the index wants to see again in `touch`.
    """

    n_tokens: int = 0
    blocks: tuple[np.ndarray, ...] = ()
    tail: tuple[tuple[int, int], ...] = ()
    note: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class IndexNode:
    """A run of tokens that a prefix index knows, for people who look at it (see `PrefixIndex.nodes`).

    Attributes:
        parent: place in the list of the run before it; None: a prefix begins here.
        start: position of its first token in the prefix; tokens: int32, the run.
        blocks: per layer group, int32 ids of the blocks that end within the run; 0 where one is gone (a hole).
        salt: of the requests that share it.
        facts: whatever else the index wants to show, name -> value.
    """

    parent: int | None
    start: int
    tokens: np.ndarray
    blocks: tuple[np.ndarray, ...]
    salt: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def _integer(name: str, value: Any) -> int | None:
    """A Python int; None stays None where the field may be off (`seed`, `logprobs`)."""
    if value is None and name in ("sampling.seed", "sampling.logprobs"):
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise RequestError(f"{name}={value!r} cannot be used", options=["an integer"]) from None


def _finite(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bool) or not math.isfinite(value):
            raise TypeError
        return float(value)
    except OverflowError:
        raise RequestError(f"{name} is an integer too large for a number", options=["a number"]) from None
    except TypeError:
        raise RequestError(f"{name}={value!r} cannot be used", options=["a number"]) from None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of one request is chosen, and when the request ends.

    Attributes:
        max_new_tokens: upper bound of generated tokens; 0 answers an empty text at once.
        temperature: 0 is greedy (ties take the lowest id).
        top_k: keep the k best tokens; 0 is off.
        top_p: keep the smallest set of best tokens with probability >= top_p; 1 is off.
        min_p: drop tokens whose probability is under `min_p` times the best one's; 0 is off.
        repetition_penalty: > 1 makes tokens of prompt and output less likely (CTRL, arXiv:1909.05858).
        seed: a seeded request gets the same random draws whatever else is in the batch.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the request (besides the model's EOS tokens).
        ignore_eos: go on after an EOS token.
        logprobs: answer the log-probability of the chosen token and of this many best tokens; None: off.
        n: number of samples of the prompt.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self):
        stop = self.stop if self.stop is not None else ()
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        for name in ("max_new_tokens", "top_k", "n", "seed", "logprobs"):
            object.__setattr__(self, name, _integer(f"sampling.{name}", getattr(self, name)))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, _finite(f"sampling.{name}", getattr(self, name)))
        ids = tuple(_integer("sampling.stop_token_ids", i) for i in self.stop_token_ids or ())
        object.__setattr__(self, "stop_token_ids", ids)
        rules = [
            ("max_new_tokens", self.max_new_tokens >= 0, "an integer >= 0"),
            ("temperature", self.temperature >= 0, "a number >= 0 (0 is greedy)"),
            ("top_k", self.top_k >= 0, "an integer >= 0 (0 is off)"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1] (1 is off)"),
            ("min_p", 0 <= self.min_p <= 1, "a number in [0, 1] (0 is off)"),
            ("repetition_penalty", self.repetition_penalty > 0, "a number > 0 (1 is off)"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), 'texts that are not empty, e.g. ["a","b"]'),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "null or an integer >= 0"),
            ("n", self.n >= 1, "an integer >= 1"),
        ]
        for name, fine, valid in rules:
            if not fine:
                raise RequestError(f"sampling.{name}={getattr(self, name)!r} cannot be used", options=[valid])


@dataclass(frozen=True, slots=True)
class Keep:
    """How dear to a request is what it leaves in a prefix index.

    Attributes:
        priority: what has less of it is evicted first, whatever the eviction policy says.
        pin: seconds since the last use during which it is evicted only when nothing else is left.
    """

    priority: int = 0
    pin: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "priority", _integer("keep.priority", self.priority))
        object.__setattr__(self, "pin", _finite("keep.pin", self.pin))
        if self.pin < 0:
            raise RequestError(f"keep.pin={self.pin!r} cannot be used", options=["seconds >= 0"])

    @classmethod
    def of(cls, value: Any) -> Keep:
        """A Keep from what a user wrote: None, a Keep, or a mapping with its fields."""
        if value is None or isinstance(value, cls):
            return value or cls()
        if not isinstance(value, Mapping):
            raise RequestError(f"keep={value!r} cannot be used", options=['{"priority": 1, "pin": 60}'])
        for name in value:
            if name not in ("priority", "pin"):
                raise RequestError(f"keep has no key {name!r}", options=["priority", "pin"])
        return cls(**value)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. Exactly one of prompt, prompt_tokens and messages is given.

    Attributes:
        prompt: text; the tokenizer adds its special tokens.
        prompt_tokens: token ids, taken as they are.
        messages: chat messages (`[{"role": ..., "content": ...}]`) for the tokenizer's chat template.
        sampling: see SamplingParams.
        id: a name for the output; the engine gives one when it is None.
        salt: requests with different salts never share cached tokens.
        keep: what becomes of the tokens that this request leaves in a prefix index: a Keep, or a mapping like it.
        arrival: seconds after the start of the run at which the request becomes known.
    """

    prompt: str | None = None
    prompt_tokens: Any = None
    messages: Any = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    id: str | None = None
    salt: str = ""
    keep: Keep | Mapping | None = None
    arrival: float = 0.0

    def __post_init__(self):
        given = [n for n in ("prompt", "prompt_tokens", "messages") if getattr(self, n) is not None]
        if len(given) != 1:
            who = "a request" if self.id is None else f"request {self.id!r}"
            raise RequestError(
                f"{who} gives {' and '.join(given) or 'no prompt'}",
                options=["prompt", "prompt_tokens", "messages"],
                fix="give exactly one of them",
            )
        object.__setattr__(self, "arrival", _finite("arrival", self.arrival))
        object.__setattr__(self, "keep", Keep.of(self.keep))


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One step's addresses in one layer group (numpy on the host, tensors on the device).

    Attributes:
        slots: [T] int64; the slot `block * block_size + offset` that each new token is written to.
        tables: [R, B] int32; block id of each logical block; 0 where it was dropped or does not exist.
        context_lens: [R] int32; tokens of each request after this step, its new ones included; 0: a row of padding.
    """

    slots: Any
    tables: Any
    context_lens: Any


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything a step's data plane needs, made once per step.

    Attributes:
        positions: [T] int64; absolute position of each new token.
        query_starts: [R + 1] int32; request r owns the tokens `query_starts[r] : query_starts[r + 1]`.
        groups: one GroupPlan per layer group.
        rows: [R] int32; row of each request in per-request planes (tails of sealing codecs).
        copies: per layer group an int64 array [C, 3] of (source block, destination block, slots) to copy
            before the forward. Host only.
        max_query, max_context: the longest chunk and the longest context in this step.
        host: the same plan as numpy arrays (a kernel that runs on the host reads these).
        tails: int64 [C, 2] of (source row, destination row) of per-request planes to copy before the forward, all at
            once: sources are read before anything is written, and no destination comes twice. Host only.
    """

    positions: Any
    query_starts: Any
    groups: tuple[GroupPlan, ...]
    rows: Any
    copies: tuple[np.ndarray, ...]
    max_query: int
    max_context: int
    host: StepPlan | None = None
    tails: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Memory and history of one layer group. Bytes count all layers of the group.

    Attributes:
        name: e.g. "full" or "window512".
        layers: number of layers in the group.
        block_size: slots per block.
        num_blocks: blocks of the pool without the null block; block_bytes: bytes of one of them.
        reserved: bytes of the blocks that running requests hold; used: live slots x planes (shared
            bytes once; what is in an open group is not in a slot yet); evictable: bytes of cached blocks that nobody
            holds; tail: bytes of the full-precision tails of running requests, a whole row each, beside `reserved`.
        peak: highest `reserved` so far.
        tail_used: bytes of the tokens of open groups in the tails.
        tail_pool: bytes of the tails of all requests that may run, allocated from the beginning.
        evictions: blocks that were given up to make room, in this run.
    """

    name: str
    layers: int
    block_size: int
    num_blocks: int
    block_bytes: int
    reserved: int
    used: int
    evictable: int
    tail: int
    peak: int
    tail_pool: int = 0
    evictions: int = 0
    tail_used: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of a cache, per layer group and in total; `evictions` are those of all groups.

    `peak` is the most bytes, blocks and tails of all groups together, that requests held at one moment of this run, and
    `peak_tail` what of it were tails; 0 where a cache does not count them. The groups' own peaks are of different
    moments: they have no meaningful sum.
    """

    groups: tuple[GroupStats, ...]
    hit_tokens: int = 0
    evictions: int = 0
    copies: int = 0
    peak: int = 0
    peak_tail: int = 0

    def total(self, name: str) -> int:
        """Sum of a byte count over the layer groups, e.g. `stats.total("reserved")`."""
        return sum(getattr(group, name) for group in self.groups)
