"""The forward of a model, replayed where that is proved to be the same.

Shape legend: T tokens, K wanted logits, Hq/Hkv heads, Dk/Dv sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from kvframe.hf.replay.chains import chained
from kvframe.hf.replay.patterns import rotations
from kvframe.hf.replay.program import Program, Recording, unified
from kvframe.hf.replay.tape import CannotReplay, ours, recording

log = logging.getLogger(__name__)

RECORDED = ((3, 2), (5, 3))  # (T, K) of the two recordings
SEVERAL = 2  # tokens that are proved beside the longest step
TIMES = 4  # a step of several tokens that comes so often is worth the proof
NEAR = 2**-5  # of the largest logit: chains may round a sigmoid to the other side
START = 11  # first position of the tokens


class Replayed:
    """A model's forward: the program where it fits, the module itself otherwise.

    Called as the module is, with the arguments of the recording (`input_ids [1, T]`, ...); answers
    `(logits [1, K, V],)`, or what the module answers, whose first part that is. Steps of one token are proved from the
    beginning; those of several when they come for the fourth time, or by `settle`.

    Args:
        longest: tokens of a step, and logits, up to which the program is used.
        proof: of steps of several tokens; raises CannotReplay.

    Attributes:
        why: steps of several tokens are left to the module for this reason.
    """

    def __init__(
        self, module: torch.nn.Module, program: Program, longest: int, proof: Callable[[Replayed], None] | None = None
    ):
        self.module, self.longest, self._proof, self._several = module, longest, proof, 0
        self.why: str | None = None
        self.use(program)

    def use(self, program: Program) -> None:
        self.program, self.run, self._inputs = program, program.compiled(), set(program.inputs)

    def __call__(self, *, use_cache: bool = False, **inputs: Any):
        tokens, keep = inputs["input_ids"].shape[1], inputs.get("logits_to_keep")
        many = tokens > self.longest or keep is not None and len(keep) > self.longest
        if many or inputs.keys() != self._inputs or tokens > 1 and self._proof is not None and not self._worth():
            return self.module(use_cache=use_cache, **inputs)
        return (self.run(**inputs),)

    def _worth(self) -> bool:
        """Is the program used for steps of several tokens, now that one more came?"""
        self._several += 1
        return self._several >= TIMES and self.settle() > 1

    def settle(self) -> int:
        """Proves steps of several tokens, if that was not done; answers the longest that is replayed."""
        proof, self._proof = self._proof, None
        if proof is not None:
            try:
                proof(self)
            except Exception as error:  # whatever it is, the modules are there
                self.why, self.longest = str(error), 1
                log.warning("steps of several tokens are not replayed: %s", error)
        return self.longest


class StandIn:
    """Attention of a forward that no cache runs: a mix of q, k and v that tells tokens, heads and layers apart."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: None) -> torch.Tensor:
        """`q [T, Hq, Dk]`, `k [T, Hkv, Dk]`, `v [T, Hkv, Dv]` -> `[T, Hq, Dv]`."""
        heads = torch.arange(q.shape[1], device=q.device) * k.shape[1] // q.shape[1]
        weight = torch.sigmoid((q * k[:, heads]).float().mean(-1, keepdim=True) + 0.01 * layer)
        return v[:, heads] * weight.to(v.dtype)


def hooks(module: torch.nn.Module) -> int:
    """Hooks that a forward calls, but for kvframe's own, which are for transformers' `generate`."""
    everywhere = torch.nn.modules.module
    found = len(everywhere._global_forward_hooks) + len(everywhere._global_forward_pre_hooks)
    for part in module.modules():
        for registered in (part._forward_hooks, part._forward_pre_hooks):
            found += sum(not ours(hook) for hook in registered.values()) if registered else 0
    return found


@contextmanager
def _standing_in(running):
    before = running.cache, running.plan
    running.cache, running.plan = StandIn(), object()
    try:
        yield
    finally:
        running.cache, running.plan = before


@contextmanager
def _poisoned():
    """Memory that is asked for holds NaN: what something else writes there than a function of torch, a recording does
    not know, and a replay would find the right numbers there by chance."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def replayed(
    module: torch.nn.Module, running, inputs: Callable[[int, int, int], dict[str, Any]], longest: int
) -> Replayed:
    """Records and proves.

    Args:
        module: the model, bound. running: what its attention layers share (see kvframe.hf.seam).
        inputs: (T, K, first position) -> the arguments of a forward.
        longest: tokens of a step that is replayed. A model may treat long inputs in another way.
    Raises: CannotReplay, whatever went wrong: the modules are there.
    """
    try:
        return _replayed(module, running, inputs, longest)
    except CannotReplay:
        raise
    except Exception as error:
        raise CannotReplay(f"{type(error).__name__}: {error}") from error


def _replayed(module, running, inputs, longest: int) -> Replayed:
    if hooks(module):
        raise CannotReplay("its modules have hooks")
    with torch.inference_mode(), _standing_in(running), _poisoned():
        first, second = (_record(module, inputs(*size, START), size, size is RECORDED[0]) for size in RECORDED)
        plain = rotations(unified(first, second))
        program = chained(plain, longest)
    program, plain = None if program is plain else program.forget(), plain.forget()

    def proof(found: Replayed, sizes: tuple[int, ...] = (SEVERAL, longest)) -> None:
        with torch.inference_mode(), _standing_in(running), _poisoned():
            given = [inputs(tokens, tokens, START + tokens) for tokens in sizes]
            held = [(some, module(**some)[0]) for some in given]
            _prove(plain.compiled(), held, torch.equal)
            try:
                if found.program is not plain:
                    _prove(found.run, held, _near)
            except CannotReplay as error:
                log.warning("the forward is replayed without chains: %s", error)
                found.use(plain)

    found = Replayed(module, plain if program is None else program, longest, proof)
    proof(found, (1,))
    return found


def _prove(run: Callable[..., torch.Tensor], held: list, same: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
    for given, wanted in held:
        if not same(run(**{name: x for name, x in given.items() if isinstance(x, torch.Tensor)}), wanted):
            raise CannotReplay(f"a replayed forward of {given['input_ids'].shape[1]} tokens gives other logits")


def _near(logits: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((logits - wanted).abs().max() <= NEAR * wanted.abs().max())


def _record(module, given: dict[str, Any], size: tuple[int, int], watched: bool) -> Recording:
    with recording(module, watched) as tape:
        out = module(**given)[0]
    inputs = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    sizes = {"T": size[0]} | ({"K": size[1]} if "logits_to_keep" in inputs else {})
    return Recording(tape.calls, inputs, sizes, out)
