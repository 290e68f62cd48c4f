"""The cache and its parts: abstract, documented, no logic.

A part is a small object that answers questions about positions, tokens or blocks; `BlockKVCache` is the one
place where parts meet. Parts import only `kvframe.interfaces`, `kvframe.types` and `kvframe.errors`.

Shape legend: T tokens of a step, R requests, Hq query heads, Hkv KV heads, Dk/Dv key/value size,
G tokens of a sealing group, `...` any leading shape.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvframe import API as API  # version of these interfaces
from kvframe.types import CacheStats, IndexNode, LayerSpec, Match, PlaneSpec, Ranged, StepPlan

if TYPE_CHECKING:
    import torch

    from kvframe.storage import LayerStorage


class CacheRequest(Protocol):
    """What a cache may know of a request: a name and the token ids that exist so far."""

    id: str
    salt: str
    keep: Any

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n]: prompt and output so far."""


@dataclass(frozen=True)
class Parts:
    """The parts of one composition, as `conflicts` sees them.

    Attributes:
        layers: all of the model's; max_len: longest request in tokens; block_size: slots of a block.
        stored: what the codec that is asked has to store: each layer and kind ("k" or "v"), and the size of a vector.
            For the codec of the composition that is all there is, for one within it only what that one serves.
        codec_key: where the codec that is asked stands in the config, for messages.
    """

    layout: Layout
    index: PrefixIndex
    eviction: Eviction
    retention: Retention
    codec: Codec
    layers: tuple[LayerSpec, ...]
    max_len: int
    block_size: int
    stored: tuple[tuple[LayerSpec, str, int], ...]
    codec_key: str = "cache.codec"

    def choose_codec(self, name: str) -> str:
        """The override that puts another codec in the place of the one that is asked."""
        group = "cache/codec"
        return f"{group}={name}" if self.codec_key == group.replace("/", ".") else f"{group}@{self.codec_key}={name}"


class Part(ABC):
    """Base of every part. A part that is given a value which cannot be raises `kvframe.errors.OptionError`.

    Attributes:
        exact: True when the part never changes an output token (see docs/architecture.md).
    """

    exact: bool = True

    def conflicts(self, others: Parts) -> list[str]:
        """Reasons why this part cannot work with the others; each names the override that fixes it."""
        return []


class Layout(Part):
    """How a request gets slots: a rule for the size of a block."""

    @abstractmethod
    def block_size(self, max_len: int, unit: int = 1) -> int:
        """Slots per block for requests of at most `max_len` tokens.

        Under a codec that seals, `unit` tokens are whole groups everywhere, and blocks of less than `max_len` must hold
        whole units. A size that the layout chooses by itself does; one that a user chose is answered as it is, and the
        cache refuses it where it does not fit.
        """


class Retention(Part):
    """Which positions a query may still see, and which are dead.

    Pure: the answers depend on the arguments only, and `dead` is monotone in `num_computed`: what is dead
    stays dead. Compared by value: layers whose `for_layer` are equal share a layer group.

    Attributes:
        window, sinks: when `kernel_mask` is True the mask is exactly
            `k <= q and (window is None or q - k < window or k < sinks)`, which is what fast kernels know.
        kernel_mask: False sends attention to the `reference` kernel, which asks `visible`.
        forgets: False promises that `dead` is False everywhere.
        limit_fix: the override under which no query looks back further than a fixed distance (see KVCache.unbounded),
            for messages; empty where there is none.
    """

    window: int | None = None
    sinks: int = 0
    kernel_mask: bool = True
    forgets: bool = True
    limit_fix: str = ""

    @property
    def name(self) -> str:
        """Short name of a layer group under this rule, for tables."""
        return "full" if self.window is None else f"window{self.window}"

    @abstractmethod
    def for_layer(self, layer: LayerSpec) -> Retention:
        """The rule for one layer: combines this rule with what the model itself says."""

    @abstractmethod
    def visible(self, q_pos: np.ndarray, k_pos: np.ndarray) -> np.ndarray:
        """Boolean mask, broadcast over `q_pos` and `k_pos`: may the query see the key? Causal included."""

    @abstractmethod
    def dead(self, start: int, stop: int, num_computed: int) -> np.ndarray:
        """Boolean [stop - start]: positions that no query at `>= num_computed` can see."""

    def sink_position(self, q_pos: np.ndarray) -> np.ndarray | None:
        """The position from which a query at `q_pos` looks at the keys `k < sinks`, same shape; None: always its own.

        At most `q_pos`. Where it is less, no sink is within the window, and the kernel gets a second query.
        """
        return None


class Run(Protocol):
    """What an eviction policy orders: neighbouring blocks of one cached prefix that have one history, since every
    request that used one of them used them all.

    Attributes:
        start, stop: positions of its tokens within the prefix.
        key: names the prefix up to and including the run's first token; the same when those tokens come back after an
            eviction. May cost time in proportion to the prefix; read it in `on_insert` and `on_remove` only.
    """

    start: int
    stop: int
    key: Hashable


class Eviction(Part):
    """Which unused cached block goes first. Host state only; used by a PrefixIndex.

    An index asks one policy per layer group (a deep copy of the one that was configured). It tells the policy of runs,
    from the end of a prefix to its beginning, so that of runs which were used at once the last one comes first. What
    must stay is the index's business: blocks in use, and under full attention whatever has something cached behind it.
    """

    @abstractmethod
    def on_insert(self, run: Run) -> None:
        """The run is new, is back after an eviction, or has grown at its end before anybody hit it."""

    @abstractmethod
    def on_hit(self, run: Run) -> None:
        """A request uses the whole run."""

    @abstractmethod
    def on_split(self, run: Run, head: Run) -> None:
        """The run was cut: `head` is new and has its first tokens. Both have the history of the run."""

    @abstractmethod
    def on_remove(self, run: Run) -> None:
        """Nothing of the run is cached any more."""

    @abstractmethod
    def victims(self, evictable: Callable[[Run], bool]) -> Iterator[Run]:
        """Yields evictable runs, the first to go first.

        The index takes blocks from the run it got before it asks for the next one, which may make others evictable
        and calls `on_remove` when nothing is left; it stops asking when it has enough.
        """


@dataclass(frozen=True, slots=True)
class Inserted:
    """What an index answers to `insert`, for one layer group.

    Attributes:
        blocks: int32; the table that the request should hold from now on: where an equal block was already
            published, the canonical one.
        published: int32; the ids that the index holds since this call and did not before.
    """

    blocks: np.ndarray
    published: np.ndarray


class PrefixIndex(Part):
    """Finds KV that is already there for a token prefix. Holds block ids, never tensors.

    Attributes:
        keeps: False promises that nothing is ever published, so nothing outlives its request.
    """

    keeps: bool = True

    @abstractmethod
    def attach(
        self, block_size: int, groups: Sequence[Retention], eviction: Eviction, now: Callable[[], float]
    ) -> None:
        """Called once by the cache before anything else. `now()` is a time in seconds that never goes back."""

    @abstractmethod
    def match(self, request: CacheRequest, limit: int) -> Match:
        """The longest usable prefix of at most `limit` tokens. Does not change the index."""

    @abstractmethod
    def touch(self, request: CacheRequest, match: Match) -> None:
        """The request uses the match that was just made for it: the moment to update recency. What protects its blocks
        from eviction is that requests hold them (see `unused` in `evict`), not the index."""

    @abstractmethod
    def insert(self, request: CacheRequest, blocks: Sequence[np.ndarray], length: int) -> list[Inserted]:
        """Publishes the complete blocks among the first `length` tokens.

        `blocks` is the request's table, per layer group, `length // block_size` long; 0 where retention has
        already dropped a block. Answers one Inserted per layer group.
        """

    @abstractmethod
    def published(self, group: int) -> np.ndarray:
        """int32 ids of the blocks of one layer group that the index holds."""

    @abstractmethod
    def evict(self, need: Sequence[int], unused: Sequence[Callable[[np.ndarray], np.ndarray]]) -> list[np.ndarray]:
        """Gives up blocks so that each group g gets at least `need[g]` unused ones back.

        `unused[g](ids)` says of block ids that the index holds in group g whether no request does (bool, same shape).
        The cache counts on every unused one, wherever it lies in a prefix. Answers, per group, the ids that the index
        no longer holds.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forgets everything."""

    def nodes(self) -> list[IndexNode]:
        """What the index holds, for people who look at it: parents before their children."""
        return []


class Codec(Part):
    """How K or V vectors are stored.

    Append-only: a token (or a full group of tokens) is encoded once, from itself alone.

    A codec with `group` = G > 1 seals: it is asked to encode G tokens at once, when a request has computed them all.
    Until then they are kept as the model computed them, in a tail per layer and kind, which is none of the codec's
    business. Of a query at q, keys with `k // G < q // G` are codes and those of its own group are not. Codecs that
    `for_layer` answers may have different groups, for K and for V and by layer. Paged blocks must hold whole groups;
    the cache sees to that.

    Attributes:
        group: the sealing unit in tokens; 1 for per-token codecs.
        affine: a vector is `number * scale`, and a fused kernel may read it so. The plane `payload [D]` holds int8
            numbers, or uint8 codes whose numbers are `values()`; the plane `scale [1]` (float32 or float16) is there,
            or `fixed` is the scale of all vectors.
        fixed: that scale; None: there is a plane.
        peak: what `encode` does to float32 can be said in one line, and a fused kernel may do it: the scale is
            `max|x| / peak`, at least the smallest normal float32 and at most what keeps `scale * peak` finite (or
            `fixed`), and each code is the one nearest to `x / scale` in [-peak, peak], ties to even. NaN gets the NaN
            of the table, and where there is none makes the scale NaN. None: only `encode` knows.
        plain: the only plane is `payload`, it is the vector itself in the model's dtype.
        ranged: a number is `zero + scale * code`, and a fused kernel may write and read it so (see Ranged). None: only
            `encode` and `decode` know.
    """

    group: int = 1
    affine: bool = False
    fixed: float | None = None
    peak: float | None = None
    plain: bool = False
    ranged: Ranged | None = None

    def for_layer(self, layer: LayerSpec, kind: str) -> Codec:
        """The codec of one layer and kind ("k" or "v"); mixed-precision codecs answer another codec here. There is an
        answer for every layer; one that cannot be served is a conflict."""
        return self

    @abstractmethod
    def planes(self, dim: int) -> dict[str, PlaneSpec]:
        """The stored tensors for vectors of size `dim`. Bytes per token follow from these and nothing else."""

    def values(self) -> np.ndarray | None:
        """float32 [256]: the number that each code of an affine codec's uint8 payload stands for, before the scale.
        None: the payload holds numbers, not codes."""
        return None

    @abstractmethod
    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """`x [..., Hkv, D]` -> one tensor per plane, `[..., Hkv, *shape]`.

        With a group of G > 1: `x [n, G, Hkv, D]`, n full groups that have nothing to do with each other, -> `[n, G,
        Hkv, *shape]` for planes per token and `[n, Hkv, *shape]` for planes per group.
        """

    @abstractmethod
    def decode(self, planes: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Planes as `encode` answers them -> `x [..., Hkv, D]` (`[n, G, Hkv, D]` with a group) in `dtype`."""


class Kernel(ABC):
    """What runs store and attend on a device. Stateless between steps.

    Attributes:
        sink_queries: `attend` takes a second query for the sinks. A kernel without it is never asked to serve a layer
            whose retention has a `sink_position`.
        sealing: it stores and reads codecs with a group (see kvframe.tails). A kernel without it is never asked to
            serve a layer with such a codec.
    """

    sink_queries: bool = False
    sealing: bool = False

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def unsupported(
        self, layer: LayerSpec, codecs: tuple[Codec, Codec], retention: Retention, device: str, block_size: int
    ) -> list[str]:
        """Reasons why this kernel cannot serve a layer with these K and V codecs, in blocks of `block_size` slots;
        empty when it can."""

    def warm(self, device: str, dtype: str, codec: Codec | None = None) -> None:
        """Loads or compiles what a model of this dtype will need on this device ("auto": the fastest there is).

        Called in a thread while weights load, when nobody knows the layers; must be quick where there is nothing to do,
        and say nothing about what cannot work. What it leaves out is made in the engine's first two steps, a prefill
        and a decode that no request waits for (`Engine.warm`).

        Args:
            codec: what the cache will store with, before `for_layer`; None: not known.
        """

    def graphs(self, storage: LayerStorage) -> bool:
        """In a step of one token per request `store` and `attend` start the same work on the device for all plans with
        the same `max_context` and shapes of tensors, so they may be captured as a CUDA graph (see kvframe.graphs). A
        row of padding has a context of 0 tokens and writes to the null block."""
        return False

    @abstractmethod
    def store(self, k: torch.Tensor, v: torch.Tensor, storage: LayerStorage, plan: StepPlan) -> None:
        """Encodes `k [T, Hkv, Dk]` and `v [T, Hkv, Dv]` into the slots of the plan."""

    @abstractmethod
    def attend(
        self, q: torch.Tensor, storage: LayerStorage, plan: StepPlan, sink_q: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`q [T, Hq, Dk]` -> `out [T, Hq, Dv]`, reading what is stored, the step's own tokens included.

        `sink_q [T, Hq, Dk]`: the queries that meet the keys at `k < retention.sinks`, all others meet q; given when
        the retention has a `sink_position` (and `sink_queries` is True), not passed otherwise.
        """


@dataclass(frozen=True)
class CacheContext:
    """What a cache is built for: handed to the `_target_` of `conf/cache/*.yaml` as `context`.

    Attributes:
        layers: what the probe saw, in order.
        dtype: dtype of keys and values, as a string.
        device: e.g. "cpu" or "cuda:0".
        max_len: longest request in tokens; max_requests: most requests that run at once.
        max_step_tokens: token budget of one step.
        kernels: kernels in order of preference; None builds the control plane only (no tensors).
        learned_sinks: layer index -> tensor [Hq] of learned sink logits.
        trained_len: tokens of the longest text that the model was made for; None: not known.
    """

    layers: tuple[LayerSpec, ...]
    dtype: str = "float32"
    device: str = "cpu"
    max_len: int = 2048
    max_requests: int = 64
    max_step_tokens: int = 512
    kernels: tuple[Kernel, ...] | None = None
    learned_sinks: Any = None
    trained_len: int | None = None


class KVCache(ABC):
    """The interface between the engine and every way of keeping keys and values.

    The control plane (everything but `attend`) lives on the host and holds no tensor.

    Attributes:
        exact: True when no part of it ever changes an output token.
        unbounded: True when no query ever looks further back than the model was trained for, however long the request,
            so that requests may be longer than the model's own length.
        unbounded_fix: the override that makes it True, for messages; empty where there is none.
        graphs: `attend` may be captured as a CUDA graph in steps of one token per request (see Kernel.graphs).
        now: a time in seconds that never goes back; the engine puts its own clock here.
    """

    exact: bool = True
    unbounded: bool = False
    graphs: bool = False
    unbounded_fix: str = ""
    now: Callable[[], float] = staticmethod(time.monotonic)

    @abstractmethod
    def capacity(self) -> int:
        """Tokens of the longest single request that an otherwise empty cache could hold."""

    @abstractmethod
    def peek(self, request: CacheRequest) -> tuple[int, int]:
        """`(cached, pending)`: leading tokens that are cached, and how many more will be once the running requests have
        computed what they share with this one. Takes no lock, updates no recency."""

    @abstractmethod
    def admit(self, request: CacheRequest) -> int | None:
        """Matches, locks what matched, answers how many leading tokens need no compute (always at most
        len(tokens) - 1). None: does not fit now, and nothing changed."""

    @abstractmethod
    def grow(self, request: CacheRequest, n: int) -> bool:
        """Room for the next n tokens in every layer group. False: no room, and nothing changed. Asked again before
        `commit`, it is the same room."""

    @abstractmethod
    def commit(self, request: CacheRequest, n: int) -> None:
        """n tokens were computed and are known on the host: publish what is complete, free what is dead."""

    @abstractmethod
    def release(self, request: CacheRequest) -> None:
        """The request holds nothing any more. What it published stays in the index."""

    @abstractmethod
    def fork(self, parent: CacheRequest, child: CacheRequest) -> None:
        """The child shares all that the parent has committed; writes copy first."""

    @abstractmethod
    def truncate(self, request: CacheRequest, length: int) -> int:
        """Forgets the tokens from `length` on. Answers the length that could be kept (<= length): less when
        what the next query needs was already dropped."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets every request and every published block."""

    @abstractmethod
    def invalidate(self) -> None:
        """Stored values are stale (weights changed): nothing that is published now may be matched again."""

    def start_run(self) -> None:
        """A new run begins: peaks and counters start again. What is stored stays."""

    @abstractmethod
    def stats(self) -> CacheStats: ...

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor in which it keeps keys and values, for people who count bytes."""
        return iter(())

    @abstractmethod
    def check(self) -> None:
        """Raises AssertionError when an invariant of the control plane is broken."""

    @abstractmethod
    def plan(self, batch: Sequence[tuple[CacheRequest, int]]) -> StepPlan:
        """Addresses for a step in which each request gets its next n tokens (room was made by `grow`).
        Runs the step's copies. A plan may be thrown away: another one for the same step says the same. Who was in a
        step that failed before `commit` must be released: under a codec that seals, the step may have closed its open
        group."""

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Stores k and v, then attends: `q [T, Hq, Dk]`, `k [T, Hkv, Dk]`, `v [T, Hkv, Dv]` -> `[T, Hq, Dv]`."""
