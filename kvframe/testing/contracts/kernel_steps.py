"""KernelSteps: the steps that KernelContract runs, and how they are held to the definition of attention.

Shape legend: L tokens of a request, C new ones, Hq/Hkv heads, Dk/Dv sizes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvframe.interfaces import Codec, Kernel, Retention
from kvframe.testing.codecs import Eights
from kvframe.testing.contracts.promises import Contract, example
from kvframe.testing.parts import Band, Stripes, Verbatim
from kvframe.testing.steps import Step, make_spec, make_step
from kvframe.types import StepPlan

MIXED = [(1, 1), (2, 2), (40, 1), (17, 1), (70, 30), (33, 33), (300, 1), (90, 3), (64, 1)]
RULES = {
    "full": Band(),
    "window": Band(24),
    "window and sinks": Band(24, 5),
    "its own position only": Band(1),
    "more sinks than window": Band(9, 70),
    "stripes": Stripes(8, 4),
}
HEADS = [(4, 4), (9, 3), (8, 1)]  # query and KV heads
NEAR = {"float32": 1e-5, "bfloat16": 2e-2}


class KernelSteps(Contract):
    """Part of KernelContract, which says what `device` and `sizes` are."""

    device = "cpu"
    sizes = (16, 4, 1, 64)

    def codecs(self) -> dict[str, tuple[Codec, Codec]]:
        """Codecs of keys and values to try; overwrite it to try others. None of them may seal."""
        eight, plain = Eights(), Verbatim()
        return {"verbatim": (plain, plain), "8 bits": (eight, eight), "8 bits for values": (plain, eight)}

    def reasons(self, kernel: Kernel, spec, codecs, rule: Retention, size: int) -> list[str]:
        found = kernel.unsupported(spec, codecs, rule, self.device, size)
        second = rule.sink_position(np.zeros(1, np.int64)) is not None and not kernel.sink_queries
        return [*found, "no second query"] if second else found

    def step(
        self,
        kernel: Kernel,
        spec,
        requests,
        size: int | None = None,
        rule: Retention | None = None,
        codecs=None,
        seed=0,
    ) -> Step | None:
        """A step that the kernel serves, or None."""
        size, rule, codecs = size or self.sizes[0], rule or Band(), codecs or (Verbatim(), Verbatim())
        if self.reasons(kernel, spec, codecs, rule, size):
            return None
        return make_step(spec, requests, size, rule, seed, codecs=codecs, device=self.device)

    def first(self, kernel: Kernel) -> tuple[str, tuple[Codec, Codec]]:
        """A dtype and codecs that the kernel serves under a plain mask; skips when there is none."""
        for dtype in NEAR:
            for codecs in self.codecs().values():
                if not self.reasons(kernel, make_spec(6, 2, dtype=dtype), codecs, Band(), self.sizes[0]):
                    return dtype, codecs
        pytest.skip("it serves no plain mask")

    def without_host(self, plan: StepPlan) -> StepPlan:
        """What a captured graph has of a plan."""
        return replace(plan, host=None)

    def tried(self, steps: int) -> None:
        """Says so when nothing was tried."""
        if not steps:
            pytest.skip("it serves nothing of this")

    def agrees(self, kernel: Kernel, step: Step | None, **shown) -> int:
        """Runs a step and holds it to the definition; answers how many steps that were."""
        if step is None:
            return 0
        limit, spec = NEAR[step.storage.spec.dtype], step.storage.spec
        shown = {"heads": f"{spec.q_heads} and {spec.kv_heads}", "sizes": f"{spec.k_dim} and {spec.v_dim}",
                 "dtype": spec.dtype, "block_size": step.storage.block_size, **shown}  # fmt: skip
        with example(**shown):
            got = step.run(kernel)
            assert got.dtype == step.q.dtype and got.shape == (len(step.q), spec.q_heads, spec.v_dim), f"{got.shape}"
            got, want, at = got.cpu().double(), step.wanted(), 0
            limit *= max(1.0, float(want.abs().max()))
            for length, chunk in step.requests:
                error = float((got[at : at + chunk] - want[at : at + chunk]).abs().max().nan_to_num(nan=torch.inf))
                with example(request=f"{length} tokens, the last {chunk} of them new"):
                    assert error <= limit, f"off by {error:.3g} (allowed: {limit:.3g})"
                at += chunk
        return 1
