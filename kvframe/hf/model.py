"""A Hugging Face causal language model, bound to kvframe's attention and run flat.

Shape legend: T tokens of a step, K rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np
import torch
from torch import nn

from kvframe.errors import UnsupportedModelError
from kvframe.graphs import Graphs
from kvframe.hf import linear, opaque, packing, past, positions, rotary, seam, turning
from kvframe.hf.probe import probe
from kvframe.hf.replay.replayed import hooks, replayed
from kvframe.hf.replay.tape import CannotReplay
from kvframe.hf.verify import verify as verify_model
from kvframe.kernels.cpu_linear import ROWS
from kvframe.moving import sent
from kvframe.types import LayerSpec, StepPlan

log = logging.getLogger(__name__)

DRY = 4  # tokens of the dry forward
LONGEST = 256  # tokens of a step that is replayed on a GPU; on a CPU: those of a chain


class HFModel:
    """What the engine knows of a model.

    Attributes:
        name: for reports. module: the nn.Module. tokenizer: HF tokenizer or None.
        layers: one LayerSpec per attention layer, in order of their calls.
        learned_sinks: layer index -> logits [Hq].
        dtype, device: of keys and values; e.g. "bfloat16", "cuda:0".
        eos_ids: every token that ends a text. bos_id: or None.
        first_position: where the model puts the first token of a text; 0 for most (see kvframe.hf.positions).
        max_len: tokens of the longest request. vocab_size: V.
        weight_bytes: bytes of parameters and buffers, shared ones once.
        verified: error of the verification (see kvframe.hf.verify), or None when it was skipped.
        notes: what a user should know (e.g. why max_len is limited).
    """

    name: str
    layers: tuple[LayerSpec, ...]

    def __init__(self, module: nn.Module, name: str | None = None, tokenizer: Any = None, verify: bool = True):
        """Probes, binds and verifies.

        Args:
            module: a causal LM of transformers, on its device, in its dtype.
            verify: compare a few tokens with transformers' eager attention (see kvframe.hf.verify).
        Raises: UnsupportedModelError naming what was seen; the module is left as it was.
        """
        self.module, self.name, self.tokenizer = module.eval(), name or type(module).__name__, tokenizer
        self.notes: list[str] = []
        self.packed_bytes: int | None = None
        self._run, self._replays, self._compiled = self.module, False, False
        self._why: str | None = None
        self.version = 0
        self._seen: tuple = ()  # see `_look`
        weight = next(module.parameters())
        self.device = "cpu" if weight.is_meta else str(weight.device)  # see kvframe.hf.skeleton
        config = module.config.get_text_config() if hasattr(module.config, "get_text_config") else module.config
        self.vocab_size = int(config.vocab_size)
        self.eos_ids, self.bos_id = _ends(module, config)
        self.max_len, notes = rotary.longest(module)
        self.notes += notes
        self.weight_bytes = _bytes(module)
        parameters = inspect.signature(module.forward).parameters
        self._keeps, self._takes_positions = "logits_to_keep" in parameters, positions.accepted(module)
        self.first_position, self._past = 0, None
        before = [(c, c._attn_implementation) for c in seam.configs(module)]
        try:
            with linear.light(module):
                facts = probe(module, self._dry_forward)
                self.first_position = positions.first(module, self._few_at)
                self.max_len -= self.first_position
                last = int(turning.probe_positions(self.max_len)[-1])
                self._past = past.wanted(module, self._dry_at, last, self.device)
                self.layers = turning.find(module, facts, self._dry_at, self.max_len)
            self.learned_sinks = facts.sinks
            self.dtype = facts.layers[0].dtype
            self.running = seam.bind(facts.modules, self.layers)
            seam.set_implementation(module, seam.NAME)
            self.verified = verify_model(self) if verify else None
        except Exception:
            for c, old in before:
                c._attn_implementation = old
            raise

    @classmethod
    def from_module(cls, module: nn.Module, name: str | None = None, *, tokenizer=None, verify: bool = True) -> HFModel:
        """Wraps a module that exists already (see __init__)."""
        return cls(module, name, tokenizer, verify)

    def bind(self, cache: Any) -> None:
        """From now on attention goes to `cache.attend(layer, q, k, v, plan)`."""
        self.running.cache = cache

    def weights_changed(self) -> None:
        """Makes the copies of `pack_weights` again, and what `replay` recorded, where there are any: to be called when
        weights or modules are others than before. Engines with CUDA graphs make theirs again."""
        self.version += 1
        packed, self.packed_bytes = self.packed_bytes, None
        if packed is not None:
            packing.unpack(self.module)
        replays = self._stop_replaying()
        if packed is not None:
            self.pack_weights()
        if replays:
            self.replay()

    def _stop_replaying(self) -> bool:
        """From now on the modules run. Answers whether they did not."""
        replays, self._replays = self._replays, False
        if replays:
            self._run = self.module
        return replays

    def pack_weights(self) -> int:
        """Lets linear layers keep copies of their weights that this machine multiplies faster, and norms run in one
        pass; see kvframe.hf.packing.

        Answers the bytes of the copies. A second call changes nothing.
        """
        if self.packed_bytes is None:
            replays = self._stop_replaying()
            self.packed_bytes = packing.pack(self.module, self._alone)
            if replays:
                self.replay()
        return self.packed_bytes

    def compile(self, **options: Any) -> None:
        """From now on torch.compile runs the forward: norms, rotary and activations become few operations; attention
        and what `pack_weights` multiplies are called as they are. The first steps take long. A second call changes
        nothing.

        Args:
            options: of torch.compile, e.g. backend.
        Raises: UnsupportedModelError: the model's attention modules run several times in a forward.
        """
        if self._compiled:
            return
        if any(len(binding.layers) > 1 for binding in seam.bindings(self.module)):
            raise UnsupportedModelError(
                f"{self.name} runs a module several times in a forward, which a compiled graph does not tell apart",
                fix="engine.compile=false",
            )
        from kvframe.hf import operators  # noqa: F401  what the graph calls

        opaque.number(self.running)
        self._replays = False
        self._run, self._compiled = torch.compile(self.module, dynamic=True, **options), True

    def replay(self) -> str | None:
        """From now on the functions that a short forward calls are called without its modules (see kvframe.hf.replay),
        where two recordings prove that this is the same. Modules that have hooks are left alone; hooks that come later
        are not called. A second call changes nothing.

        Answers None, or why the modules go on running.
        """
        if self._compiled or self._replays:
            return self._why
        self._replays, self._why = True, None
        try:
            if not self._takes_positions or self._past is not None:
                raise CannotReplay("the model is not told its positions")
            longest = ROWS if self.device == "cpu" else LONGEST
            self._run = replayed(self.module, self.running, self._sample_inputs, longest)
            if self.device != "cpu":  # a proof must not fall into the capture of a graph
                self._run.settle()
            self._seen = self._look(whole=True)
        except CannotReplay as error:
            self._why = str(error)
            log.info("%s is not replayed: %s", self.name, error)
        return self._why

    def graphs(self, cache: Any, max_len: int, **options: Any) -> Graphs:
        """Decode steps with this cache as CUDA graphs; called as `forward` is. Hooks of modules, and whatever stands
        around `cache.attend`, are called while a step is captured and not again. options: of Graphs."""

        def run(ids: torch.Tensor, plan: StepPlan, keep: torch.Tensor) -> torch.Tensor:
            self.bind(cache)
            return self._step(ids, plan, keep)

        return Graphs(run, self.forward, self.device, max_len, lambda: self.version, **options)

    @torch.inference_mode()
    def forward(self, tokens: np.ndarray | torch.Tensor, plan: StepPlan, logits_at: np.ndarray) -> torch.Tensor:
        """One flat step.

        Args:
            tokens: int [T], the new tokens of all requests; a tensor on the model's device where only it knows them.
            plan: made by the bound cache for these tokens.
            logits_at: int64 [K], rows of the step whose logits are wanted.
        Returns: float32 logits [K, V] on the model's device.
        """
        known = not isinstance(tokens, torch.Tensor)
        ids = sent(np.asarray(tokens, dtype=np.int64), self.device) if known else tokens
        return self._step(ids, plan, sent(np.asarray(logits_at, dtype=np.int64), self.device))

    @torch.inference_mode()
    def _step(self, ids: torch.Tensor, plan: StepPlan, keep: torch.Tensor) -> torch.Tensor:
        if self._replays and self._changed(len(ids) > len(keep)):
            log.info("%s has changed: what was derived from it is made again", self.name)
            self.weights_changed()
        self.running.plan = plan
        try:
            return self.flat_logits(ids, plan.positions, keep)
        finally:
            self.running.plan = None

    def _look(self, whole: bool) -> tuple:
        """What shows that weights were moved or, if `whole`, that modules or hooks are others than before."""
        weight = next(self.module.parameters())
        moved = weight.data_ptr(), weight.dtype, weight.device
        return (*moved, hooks(self.module), *map(id, self.module.modules())) if whole else moved

    def _changed(self, prompt: bool) -> bool:
        """Is the module another one than was recorded? Looked at closely where that costs little: in a prompt."""
        if self._run is self.module:
            return False
        seen = self._look(whole=prompt)
        return seen != self._seen[: len(seen)]

    def flat_logits(
        self, ids: torch.Tensor, positions: torch.Tensor | None, keep: torch.Tensor | None = None, **more: Any
    ) -> torch.Tensor:
        """`ids [T]`, `positions [T]`, `keep [K]` (None: all rows) -> float32 `[K, V]`.

        Positions count from 0, whatever the model's first one is; None: as the model counts when it is not told.
        `more`: further arguments of the module.
        """
        logits = self._run(**self._inputs(ids, positions, keep), **more)[0][0]  # [T or K, V]
        if keep is not None and not self._keeps:
            logits = logits[keep]
        return logits.float()

    def _inputs(self, ids: torch.Tensor, positions: torch.Tensor | None, keep: torch.Tensor | None) -> dict[str, Any]:
        """The arguments of the module; shapes as in `flat_logits`."""
        inputs: dict[str, Any] = {"input_ids": ids[None], "use_cache": False}
        if self._takes_positions and positions is not None:
            inputs["position_ids"] = (positions + self.first_position if self.first_position else positions)[None]
        if self._past is not None and positions is not None:
            inputs[self._past] = past.Past.of(positions)
        if keep is not None and self._keeps:
            inputs["logits_to_keep"] = keep
        return inputs

    def _sample_inputs(self, tokens: int, wanted: int, start: int) -> dict[str, Any]:
        """Arguments of a forward of some tokens at the positions from `start` on, whose last logits are wanted."""
        at = torch.arange(tokens, device=self.device)
        ids = positions.countable(self.module, (at * 7 + start) % self.vocab_size)
        return self._inputs(ids, at + start, torch.arange(tokens - wanted, tokens, device=self.device))

    def _alone(self) -> None:
        """A forward without a cache, as transformers computes it."""
        run, self._run = self._run, self.module
        try:
            with seam.implementation(self.module, "eager"), linear.light(self.module):
                self._few_at(0)
        finally:
            self._run = run

    def _dry_forward(self) -> None:
        self._few_at(0)

    def _few_at(self, start: int | None) -> None:
        """A few tokens at the positions start, start + 1, ...; None: where the model puts them."""
        with torch.inference_mode():
            at = torch.arange(DRY, device=self.device)
            ids = positions.countable(self.module, (at + 3) % self.vocab_size)
            self.flat_logits(ids, None if start is None else at + start, at[-1:])

    def _dry_at(self, positions: np.ndarray, **more: Any) -> None:
        """One token id at each of the positions `[P]`: rows that only their position tells apart."""
        with torch.inference_mode():
            ids = torch.full((len(positions),), self.vocab_size // 2, device=self.device)
            at = torch.from_numpy(positions).to(self.device)
            self.flat_logits(ids, at, torch.tensor([0], device=self.device), **more)

    def __repr__(self) -> str:
        return f"HFModel({self.name}, {len(self.layers)} attention layers, {self.dtype}, {self.device})"


def _ends(module, config) -> tuple[frozenset[int], int | None]:
    """Union of the EOS ids that the generation config and the config name, and the BOS id."""
    eos, bos = set(), None
    for source in (getattr(module, "generation_config", None), module.config, config):
        ids = getattr(source, "eos_token_id", None)
        eos |= {int(i) for i in (ids if isinstance(ids, (list, tuple)) else [ids]) if i is not None}
        found = getattr(source, "bos_token_id", None)
        bos = bos if bos is not None or found is None else int(found)
    return frozenset(eos), bos


def _bytes(module: nn.Module) -> int:
    seen, total = set(), 0
    for tensor in (*module.parameters(), *module.buffers()):
        place = tensor.data_ptr() or id(tensor)  # what has no memory has no address
        if place not in seen:
            seen.add(place)
            total += tensor.nbytes
    return total
