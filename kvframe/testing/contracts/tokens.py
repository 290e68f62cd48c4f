"""CacheTokens: what a cache does to the tokens of a model, in an engine and by teacher forcing."""

from __future__ import annotations

import functools

import numpy as np
import torch

from kvframe.interfaces import CacheContext
from kvframe.testing.contracts.promises import Contract, example, promise
from kvframe.testing.walked import Walked
from kvframe.types import Request, SamplingParams

TEXTS = (3, 1, 16, 17, 33)  # tokens of the prompts that an engine gets; all begin alike
NEW = 3


@functools.cache
def model_of(arch: str):
    """A tiny model, wrapped; shared by all suites of a process, as engines may share one."""
    from kvframe.hf import wrap
    from kvframe.testing.models import tiny_model

    return wrap(tiny_model(arch))


@functools.cache
def _checked(arch: str, prompt: tuple[int, ...], output: tuple[int, ...]) -> int:
    """REF by teacher forcing; the same output of another cache needs no second look."""
    from kvframe.testing.oracle import check_greedy

    return check_greedy(model_of(arch).module, prompt, output)


class CacheTokens(Contract):
    """Part of KVCacheContract, which says what `bound` and `archs` are."""

    def _for_model(self, model, **options) -> CacheContext:
        return self.context(
            layers=model.layers,
            dtype=model.dtype,
            learned_sinks=model.learned_sinks,
            trained_len=model.max_len,
            **options,
        )

    @promise(
        "an exact cache gives the tokens of the model itself, cold and warm; any other declares its distance (`bound`)"
    )
    def test_tokens_of_an_engine(self):
        from kvframe.engine import Engine
        from kvframe.testing.harness import run_checked

        for arch in self.archs:
            model = model_of(arch)
            context = self._for_model(model, max_requests=4, max_step_tokens=32)
            cache, total = self.make(context), 0
            if cache.exact:
                assert self.bound is None, f"exact is True, and bound={self.bound}"
            else:
                assert self.bound is not None, "exact is False, and the test class has no `bound`"
            engine = Engine(model, cache, max_len=context.max_len, max_requests=4, max_step_tokens=32, clock="virtual")
            sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
            texts = _texts() if cache.exact else _texts()[-2:]  # these are not compared, see test_distance_to_the_model
            for when in ("cold", "warm"):
                for output in run_checked(engine, [Request(prompt_tokens=t, sampling=sampling) for t in texts]):
                    with example(model=arch, prompt=f"{len(output.prompt_tokens)} tokens", when=when):
                        assert len(output.output_tokens) == NEW, f"{output.finish_reason}: {output.error}"
                        if cache.exact:
                            total += _checked(arch, tuple(output.prompt_tokens), tuple(output.output_tokens))
            assert not cache.exact or total > NEW * len(TEXTS), "ties of the tiny model leave too little to compare"

    def _distance(self) -> float:
        """The largest mean of KL(REF || cache) over the archs, in nats."""
        from kvframe.testing.oracle import teacher_logits

        worst = 0.0
        for arch in self.archs:
            model = model_of(arch)
            context = self._for_model(model)
            cache, text = self.make(context), np.random.default_rng(6).integers(3, 250, 70).tolist()
            model.bind(cache)
            request, logits = Walked("a", np.array(text, np.int32)), []
            assert cache.admit(request) == 0, "an empty cache found something"
            while request.computed < len(text):
                n = min(len(text) - request.computed, 25)
                while not cache.grow(request, n):
                    n //= 2
                    assert n, "an empty cache has no room"
                plan, at = cache.plan([(request, n)]), request.computed
                logits.append(model.forward(request.tokens[at : at + n], plan, np.arange(n)))
                cache.commit(request, n)
                request.computed += n
            ref, own = teacher_logits(model.module, text).log_softmax(-1), torch.cat(logits).log_softmax(-1)
            worst = max(worst, float((ref.exp() * (ref - own)).sum(-1).mean()))
        return worst

    @promise(
        "a cache that is not exact is within its declared distance to the model, and declares at most 4 times of it"
    )
    def test_distance_to_the_model(self):
        if self.bound is None:
            return
        measured = self._distance()
        with example(models=self.archs, bound=self.bound):
            assert measured <= self.bound, f"the mean KL is {measured:.4g} nats"
            assert self.bound <= 4 * measured, f"too wide: the mean KL is {measured:.4g} nats"


def _texts() -> list[list[int]]:
    """Prompts with a common beginning and ends of their own."""
    draws = np.random.default_rng(5)
    shared = draws.integers(3, 250, max(TEXTS)).tolist()
    return [shared[: n - n // 4] + draws.integers(3, 250, n // 4).tolist() for n in TEXTS]
