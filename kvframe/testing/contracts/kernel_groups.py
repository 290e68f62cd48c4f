"""KernelGroups: what a kernel promises that serves codecs which seal groups of tokens (`Kernel.sealing`).

Shape legend: L tokens of a request, C new ones, G sealing group.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvframe.interfaces import Codec, Kernel
from kvframe.testing.codecs import Sealed
from kvframe.testing.contracts.kernel_steps import MIXED, NEAR, RULES, KernelSteps
from kvframe.testing.contracts.promises import differs, example, promise
from kvframe.testing.parts import Verbatim
from kvframe.testing.steps import Step, make_spec, make_step, seal

EDGES = [(1, 1), (7, 1), (8, 1), (9, 1), (16, 1), (8, 8), (9, 9), (40, 9), (33, 33), (70, 20), (17, 2)]
DECODES = [(1, 1), (7, 1), (8, 1), (9, 1), (16, 1), (33, 1), (72, 1), (300, 1)]


class KernelGroups(KernelSteps):
    """Part of KernelContract."""

    def sealed(self) -> dict[str, tuple[Codec, Codec]]:
        """Codecs of keys and values that seal, of which blocks of 48 slots hold whole groups; overwrite it to try
        others."""
        return {"groups of 4": (Sealed(4), Sealed(4)), "keys of 8, values of 6": (Sealed(8), Sealed(6)),
                "values only": (Verbatim(), Sealed(4))}  # fmt: skip

    def _served(self, kernel: Kernel) -> dict[str, tuple[Codec, Codec]]:
        """Those that it serves; skips when there are none."""
        found = {
            name: codecs
            for name, codecs in (self.sealed().items() if kernel.sealing else ())
            if not self.reasons(kernel, make_spec(6, 2), codecs, RULES["full"], 48)
        }
        if not found:
            pytest.skip("it serves no codec that seals")
        return found

    @promise("a query sees its own group in full precision and those before as codes, however a request is cut")
    def test_groups(self):
        kernel, tried = self.make(), 0
        for turn, (name, codecs) in enumerate(self._served(kernel).items()):
            for i, rule in enumerate(RULES):
                dtype, requests = list(NEAR)[(turn + i) % 2], (DECODES, EDGES, MIXED)[i % 3]
                step = self.step(kernel, make_spec(6, 2, dtype=dtype), requests, 48, RULES[rule], codecs, turn)
                tried += self.agrees(kernel, step, rule=rule, codecs=name)
        self.tried(tried)

    @promise(
        "groups that a step fills are sealed, bit by bit as the codec says; no other slot and no other row changes"
    )
    def test_store_groups(self):
        kernel = self.make()
        for name, codecs in self._served(kernel).items():
            for dtype in NEAR:
                step = self.step(kernel, make_spec(4, 2, dtype=dtype), EDGES, 48, None, codecs)
                if step is None:
                    continue
                want = step.copy()
                kernel.store(step.k, step.v, step.storage, step.plan)
                with example(codecs=name, dtype=dtype):
                    self._stored(step, want)

    def _stored(self, step: Step, want: Step) -> None:
        """Holds what `step` stored to what lies in `want`, which has not stored yet, and the tokens of the step."""
        now, then, table = step.storage, want.storage, want.plan.host.groups[0].tables
        for kind, codec, i in (("k", now.codec_k, 1), ("v", now.codec_v, 2)):
            if codec.group == 1:
                continue
            planes = getattr(then, kind)
            for r, (length, chunk) in enumerate(step.requests):
                x, past, own = step.texts[r][i], length - chunk, (length - 1) // codec.group * codec.group
                seal(codec, planes, x, np.arange(past // codec.group * codec.group, length), table[r], length, 48)
                with example(kind=kind, request=f"{length} tokens, the last {chunk} of them new"):
                    mine = getattr(now, f"tail_{kind}").plane[r, : length - own].cpu()
                    assert not differs(mine, x[own:]), "the tail is not the group of the last token"
            for name, plane in planes.items():
                with example(kind=kind, plane=name):
                    assert not differs(getattr(now, kind)[name].cpu(), plane.cpu()), "other bits than those"

    @promise("what lies behind an open group is not read, nor the row of another request")
    def test_poison_of_tails(self):
        kernel = self.make()
        for name, codecs in self._served(kernel).items():
            for rule in RULES:
                step = self.step(kernel, make_spec(4, 2), EDGES, 48, RULES[rule], codecs)
                if step is None:
                    continue
                zeros = make_step(
                    make_spec(4, 2), EDGES, 48, RULES[rule], codecs=codecs, device=self.device, clean=True
                )
                with example(rule=rule, codecs=name):
                    poisoned = step.run(kernel)
                    assert bool(poisoned.isfinite().all()), "an answer is no number"
                    off = float((poisoned.double() - zeros.run(kernel).double()).abs().max())
                    assert off <= 1e-6, f"zeros instead of poison move it by {off:.3g}"

    @promise("under `graphs` the tails are read and written where the tensors of the plan say")
    def test_graphs_of_groups(self):
        kernel, tried, lengths = self.make(), 0, (72, 33, 8)
        for name, codecs in self._served(kernel).items():
            first, other = (
                self.step(kernel, make_spec(4, 2), [(n, 1) for n in order], 48, RULES["window and sinks"], codecs, seed)
                for seed, order in enumerate((lengths, lengths[::-1]))
            )
            if first is not None and kernel.graphs(first.storage):
                first.plan = self.without_host(first.plan)
                tried += self.agrees(kernel, first, codecs=name)
                tried += self.agrees(kernel, first.holding(other), codecs=name)
        self.tried(tried)

    @promise("a request that seals does not depend on its neighbours in the batch")
    def test_neighbours_of_groups(self):
        kernel = self.make()
        name, codecs = next(iter(self._served(kernel).items()))
        for requests in (EDGES, DECODES):
            batch, at = self.step(kernel, make_spec(6, 2), requests, 48, None, codecs).run(kernel), 0
            for length, chunk in requests:
                alone = make_step(make_spec(6, 2), [(length, chunk)], 48, codecs=codecs, device=self.device).run(kernel)
                with example(codecs=name, request=f"{length} tokens, the last {chunk} of them new"):
                    off = float((alone - batch[at : at + chunk]).abs().max().nan_to_num(nan=torch.inf))
                    assert off <= 1e-6, f"alone and in a batch differ by {off:.3g}"
                at += chunk
