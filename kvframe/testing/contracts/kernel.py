"""KernelContract: what kvframe.interfaces.Kernel promises.

Shape legend: R requests, T tokens of a step, L tokens of a request, C new ones, Hq/Hkv heads, Dk/Dv sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvframe.testing.attending import Attending
from kvframe.testing.codecs import Sealed
from kvframe.testing.contracts.kernel_groups import KernelGroups
from kvframe.testing.contracts.kernel_steps import HEADS, MIXED, NEAR, RULES
from kvframe.testing.contracts.part import cache_of
from kvframe.testing.contracts.promises import differs, example, promise
from kvframe.testing.parts import Band, Blocks, some_layers
from kvframe.testing.steps import make_spec, make_step
from kvframe.testing.trie import TrieIndex
from kvframe.testing.walker import Walker


@dataclass(frozen=True)
class Turned(Band):
    """Sinks are looked at from position sinks + window - 1 at most."""

    def sink_position(self, q_pos):
        return np.minimum(q_pos, self.sinks + self.window - 1)


class KernelContract(KernelGroups):
    """Subclass it and define `make(self) -> Kernel`.

    What `unsupported` names is not tried. What it leaves is held to the definition of attention, in storage that is
    poison wherever nobody may look.

    Attributes:
        device: where it runs.
        bitwise: decode steps of a request are bit by bit the same alone and in a batch; False: within 1e-6.
        sizes: of blocks to try; most steps have the first one.
    """

    bitwise = False

    # -- what it serves --------------------------------------------------------------------------------------

    @promise("unsupported answers a list of reasons for anything that it is asked, and the same one when asked again")
    def test_unsupported(self):
        kernel, odd = self.make(), ("cpu", "cuda:0", "meta")
        specs = [
            make_spec(),
            make_spec(dtype="float16"),
            make_spec(k_dim=12, v_dim=7),
            make_spec(softcap=5.0, sinks=True),
        ]
        for spec in specs:
            for codecs in [*self.codecs().values(), (Sealed(), Sealed())]:
                for name, rule in RULES.items():
                    for device in {self.device, *odd}:
                        with example(layer=spec, codecs=[type(c).__name__ for c in codecs], rule=name, device=device):
                            found = kernel.unsupported(spec, codecs, rule, device, self.sizes[0])
                            assert isinstance(found, list), f"it answered a {type(found).__name__}"
                            assert all(isinstance(reason, str) and reason for reason in found), f"it answered {found}"
                            again = kernel.unsupported(spec, codecs, rule, device, self.sizes[0])
                            assert found == again, "another answer"
        assert isinstance(kernel.name, str) and kernel.name, f"its name is {kernel.name!r}"

    @promise("warm says nothing about what cannot work, and leaves a kernel that works")
    def test_warm(self):
        kernel = self.make()
        for device in dict.fromkeys((self.device, "auto", "cuda:0")):
            for dtype in ("float32", "float16"):
                with example(device=device, dtype=dtype):
                    kernel.warm(device, dtype)
                    kernel.warm(device, dtype, Sealed())
        dtype, codecs = self.first(kernel)
        self.agrees(kernel, self.step(kernel, make_spec(4, 2, dtype=dtype), [(17, 1), (5, 5)], codecs=codecs))

    @promise("a kernel serves something: float32 or bfloat16, some mask and some codec")
    def test_serves_something(self):
        kernel, why = self.make(), []
        for dtype in NEAR:
            for codecs in self.codecs().values():
                for rule in RULES.values():
                    why += self.reasons(kernel, make_spec(4, 2, dtype=dtype), codecs, rule, self.sizes[0]) or [""]
        assert "" in why, f"on {self.device} it says: {'; '.join(dict.fromkeys(why))}"

    # -- attention -------------------------------------------------------------------------------------------

    @promise("attention is that of the definition, at every edge of a block")
    def test_edges_of_blocks(self):
        kernel, tried = self.make(), 0
        dtype, codecs = self.first(kernel)
        for size in self.sizes[:2]:
            for rule in ("full", "window and sinks"):
                for length in (1, size - 1, size, size + 1, 2 * size, 2 * size + 1):
                    for chunk in dict.fromkeys((1, min(2, length), length)):
                        spec = make_spec(4, 2, dtype=dtype)
                        step = self.step(kernel, spec, [(length, chunk)], size, RULES[rule], codecs)
                        tried += self.agrees(kernel, step, rule=rule)
        self.tried(tried)

    @promise("attention is that of the definition, for every mask, codec, dtype and mixture of requests")
    def test_masks_codecs_and_ragged_batches(self):
        kernel, turn, tried = self.make(), 0, 0
        for name, codecs in self.codecs().items():
            for rule in RULES:
                for dtype in NEAR:
                    turn += 1
                    spec = make_spec(*HEADS[turn % 3], dtype=dtype)
                    step = self.step(
                        kernel, spec, MIXED, self.sizes[turn // 3 % len(self.sizes)], RULES[rule], codecs, turn
                    )
                    tried += self.agrees(kernel, step, rule=rule, codecs=name)
        self.tried(tried)

    @promise("attention is that of the definition, for every shape of heads, softcap and learned sinks")
    def test_shapes_of_heads(self):
        kernel, requests, turn, tried = self.make(), [(40, 1), (70, 30), (33, 5)], 0, 0
        extras = ({}, {"softcap": 5.0}, {"sinks": True}, {"softcap": 3.0, "sinks": True, "scale": 0.3})
        for name, codecs in self.codecs().items():
            for dims in ((8, 8), (24, 16), (16, 40), (80, 80), (192, 128)):
                for extra in extras[turn % 2 :: 2]:
                    turn += 1
                    spec = make_spec(*(*HEADS, (5, 1), (7, 1))[turn % 5], *dims, **extra)
                    step = self.step(kernel, spec, requests, self.sizes[0], RULES["window and sinks"], codecs, turn)
                    tried += self.agrees(kernel, step, codecs=name, extra=extra)
        self.tried(tried)

    @promise("a second query meets the sinks, where the retention has a sink_position")
    def test_second_query(self):
        kernel, tried = self.make(), 0
        for name, codecs in self.codecs().items():
            step = self.step(kernel, make_spec(6, 2), MIXED, self.sizes[0], Turned(24, 5), codecs)
            if step is not None:
                positions = step.plan.host.positions
                own = torch.from_numpy(step.storage.retention.sink_position(positions) == positions).to(self.device)
                step.second = torch.where(own[:, None, None], step.q, step.q.flip(0))
            tried += self.agrees(kernel, step, codecs=name)
        self.tried(tried)

    # -- what it leaves alone ----------------------------------------------------------------------------------

    @promise(
        "store writes the codes of each new token to its slot, bit by bit as the codec says, and touches no other slot"
    )
    def test_store(self):
        kernel = self.make()
        for name, codecs in self.codecs().items():
            for dtype in NEAR:
                step = self.step(
                    kernel, make_spec(4, 2, dtype=dtype), [(1, 1), (40, 1), (33, 20)], self.sizes[0], None, codecs
                )
                if step is None:
                    continue
                before, slots = step.copy().storage, step.plan.groups[0].slots
                kernel.store(step.k, step.v, step.storage, step.plan)
                kinds = (("k", step.k, step.storage.k, before.k), ("v", step.v, step.storage.v, before.v))
                for (kind, x, now, then), codec in zip(kinds, codecs):
                    for plane, codes in codec.encode(x.cpu()).items():
                        view = then[plane].view(-1, *then[plane].shape[2:])
                        view[slots] = codes.to(view.device, view.dtype)
                        with example(codecs=name, dtype=dtype, kind=kind, plane=plane):
                            assert not differs(now[plane].cpu(), then[plane].cpu()), "other bits than those"

    @promise("a slot that no query may see is not read: whatever lies there, the answer is the same")
    def test_poison(self):
        kernel = self.make()
        spec, requests = make_spec(4, 2), [(17, 1), (40, 20), (50, 1)]
        for name, codecs in self.codecs().items():
            for rule in RULES:
                step = self.step(kernel, spec, requests, self.sizes[0], RULES[rule], codecs)
                if step is None:
                    continue
                zeros = make_step(
                    spec, requests, self.sizes[0], RULES[rule], codecs=codecs, device=self.device, clean=True
                )
                with example(rule=rule, codecs=name, block_size=self.sizes[0], requests=requests):
                    poisoned = step.run(kernel)
                    assert bool(poisoned.isfinite().all()), "an answer is no number"
                    off = float((poisoned.double() - zeros.run(kernel).double()).abs().max())
                    assert off <= 1e-6, f"zeros instead of poison move it by {off:.3g}"

    @promise("q, k and v stay as they were, and may be strided as a model makes them")
    def test_arguments(self):
        kernel = self.make()
        codecs = self.first(kernel)[1]
        for dtype in NEAR:
            step = self.step(kernel, make_spec(6, 2, dtype=dtype), MIXED, self.sizes[0], codecs=codecs)
            if step is None:
                continue
            given = [x.clone() for x in (step.q, step.k, step.v)]
            want = step.run(kernel)
            assert not any(differs(a, b) for a, b in zip(given, (step.q, step.k, step.v))), "an argument was changed"
            joined = torch.cat(given, dim=1)
            layouts = {
                "cut out of one tensor": [joined[:, :6], joined[:, 6:8], joined[:, 8:]],
                "heads before tokens": [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given],
                "numbers before heads": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given],
            }
            for name, (step.q, step.k, step.v) in layouts.items():
                with example(dtype=dtype, memory=name):
                    off = (step.run(kernel).float() - want.float()).abs().max()
                    assert float(off) <= NEAR[dtype] / 10, f"it moves the answer by {float(off):.3g}"

    @promise("a request does not depend on its neighbours in the batch")
    def test_neighbours(self):
        kernel = self.make()
        for name, codecs in self.codecs().items():
            for dtype in NEAR:
                spec, at = make_spec(9, 3, dtype=dtype), 0
                step = self.step(kernel, spec, MIXED, self.sizes[0], RULES["window and sinks"], codecs)
                if step is None:
                    continue
                batch = step.run(kernel)
                for length, chunk in MIXED:
                    alone = make_step(
                        spec,
                        [(length, chunk)],
                        self.sizes[0],
                        RULES["window and sinks"],
                        codecs=codecs,
                        device=self.device,
                    ).run(kernel)
                    with example(codecs=name, dtype=dtype, request=f"{length} tokens, the last {chunk} of them new"):
                        mine = batch[at : at + chunk]
                        if self.bitwise and chunk == 1:
                            assert not differs(alone, mine), "bits differ (bitwise is True)"
                        limit = 1e-6 if dtype == "float32" else NEAR[dtype]
                        off = float((alone.double() - mine.double()).abs().max().nan_to_num(nan=torch.inf))
                        assert off <= limit, f"alone and in a batch differ by {off:.3g}"
                    at += chunk

    @promise("a kernel keeps nothing from one step to the next that changes a result")
    def test_steps_in_turn(self):
        kernel, steps = self.make(), []
        dtype, codecs = self.first(kernel)
        for i, rule in enumerate(RULES.values()):
            spec = make_spec(4, 2, dtype=dtype)
            steps.append(self.step(kernel, spec, [(60 + i, 1), (50, 20)], self.sizes[0], rule, codecs, seed=i))
        steps = [step for step in steps if step is not None]
        first = [step.run(kernel) for step in steps]
        for step, want in zip(reversed(steps), reversed(first)):
            assert not differs(step.attend(kernel), want), "another answer the second time"

    @promise("under `graphs` a decode step reads the tensors of its plan, where another step may lie the next time")
    def test_graphs(self):
        kernel, tried, lengths = self.make(), 0, (70, 33, 5)
        for name, codecs in self.codecs().items():
            for rule in RULES:
                first, other = (
                    self.step(
                        kernel, make_spec(4, 2), [(n, 1) for n in order], self.sizes[0], RULES[rule], codecs, seed
                    )
                    for seed, order in enumerate((lengths, lengths[::-1]))
                )
                if first is not None and kernel.graphs(first.storage):
                    first.plan = self.without_host(first.plan)
                    tried += self.agrees(kernel, first, rule=rule, codecs=name)
                    tried += self.agrees(kernel, first.holding(other), rule=rule, codecs=name)

    # -- in a cache ------------------------------------------------------------------------------------------

    @promise("a cache on this kernel computes the attention of what it stores: chunks, hits, forks, evictions, poison")
    def test_in_a_cache(self):
        kernel, layers, tried = self.make(), some_layers((None, 10), (0,), dims=(8, 8)), 0
        codecs = [pair[0] for pair in self.codecs().values()]
        codecs += [pair[0] for pair in self.sealed().values() if kernel.sealing and 4 % pair[0].group == 0]
        for codec in {(type(codec), codec.group): codec for codec in codecs}.values():
            if self.device != "cpu" or any(self.reasons(kernel, x, (codec, codec), Band(x.window), 4) for x in layers):
                continue
            cache = cache_of(layers, {"kernels": (kernel,)}, layout=Blocks(4), index=TrieIndex(), codec=codec)
            with example(codec=type(codec).__name__):
                walker = Walker(cache, seed=3, watcher=Attending(cache))
                walker.walk(40)
                assert walker.watcher.outputs > 50, "the walk compared nothing"
            tried += 1
        self.tried(tried)
