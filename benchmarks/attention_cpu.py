"""Decode attention of the `cpu` kernel: achieved GB/s against the read bandwidth of this machine, and gather + SDPA.

    python benchmarks/attention_cpu.py [--layers 30] [--rounds 30] [--overhead] [--prefill] [--codecs]

Heads of SmolLM2-135M: 9 query heads, 3 KV heads, size 64. All contestants are timed in turns and the medians are
compared, so that a busy neighbour hits all of them. The layers have planes of their own: a step reads more than the
caches of the CPU hold, as in a model. Shape legend: R requests, S block_size, Hq/Hkv heads, D size, T tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from kvframe_plugins.fp8 import Fp8
from kvframe_plugins.int8 import Int8
from kvframe_plugins.no_codec import NoCodec

from kvframe.interfaces import Retention
from kvframe.kernels.cpu import CpuKernel
from kvframe.storage import LayerStorage
from kvframe.types import GroupPlan, LayerSpec, StepPlan

HQ, HKV, D, S = 9, 3, 64, 16


class Full(Retention):
    forgets = False

    def for_layer(self, layer):
        return self

    def visible(self, q_pos, k_pos):
        return k_pos <= q_pos

    def dead(self, start, stop, num_computed):
        return np.zeros(stop - start, dtype=bool)


@dataclass
class Case:
    kernel: CpuKernel
    layers: list[LayerStorage]
    plan: StepPlan
    q: torch.Tensor  # [T, Hq, D]
    k: torch.Tensor  # [T, Hkv, D]
    v: torch.Tensor  # [T, Hkv, D]

    def attend(self):
        for layer in self.layers:
            self.kernel.attend(self.q, layer, self.plan)

    def store(self):
        for layer in self.layers:
            self.kernel.store(self.k, self.v, layer, self.plan)

    def gather(self):
        """What a kernel without block tables does: gather [R, L, Hkv, D], then SDPA."""
        tables = self.plan.groups[0].tables.long()
        for layer in self.layers:
            k, v = (x["payload"][tables].flatten(1, 2).transpose(1, 2) for x in (layer.k, layer.v))
            F.scaled_dot_product_attention(self.q.unsqueeze(2), k, v, enable_gqa=True)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that one step has to read."""
        keys = int(self.plan.host.groups[0].context_lens.sum())
        return keys * HKV * 2 * D * self.q.element_size() * len(self.layers)


def make(requests: int, context: int, dtype: torch.dtype, layers: int, chunk: int = 1, codec=None) -> Case:
    """`requests` of `context` tokens, the last `chunk` of them new; blocks lie scattered in the pool."""
    rng = np.random.default_rng(0)
    columns = -(-context // S)
    tables = (rng.permutation(requests * columns) + 1).reshape(requests, columns).astype(np.int32)
    positions = np.tile(np.arange(context - chunk, context), requests)
    slots = tables[np.repeat(np.arange(requests), chunk), positions // S].astype(np.int64) * S + positions % S
    starts = np.arange(0, requests * chunk + 1, chunk, dtype=np.int32)
    lengths, rows = np.full(requests, context, dtype=np.int32), np.arange(requests, dtype=np.int32)
    host = StepPlan(positions, starts, (GroupPlan(slots, tables, lengths),), rows, (), chunk, context)
    device = GroupPlan(*(torch.from_numpy(a) for a in (slots, tables, lengths)))
    plan = replace(host, groups=(device,), host=host)
    spec = LayerSpec(0, HQ, HKV, D, D, D**-0.5, dtype=str(dtype).removeprefix("torch."))
    kernel, codec = CpuKernel(), codec or NoCodec()
    codec = codec.for_layer(spec, "k")
    shape = (requests * columns + 1, S, HKV, D)
    storages = [
        LayerStorage(
            spec, Full(), 0, codec, codec, codec.encode(torch.randn(shape).to(dtype)),
            codec.encode(torch.randn(shape).to(dtype)), S, kernel,
        )
        for _ in range(layers)
    ]  # fmt: skip
    q, k, v = (torch.randn(requests * chunk, h, D).to(dtype) for h in (HQ, HKV, HKV))
    return Case(kernel, storages, plan, q, k, v)


def in_turns(rounds: int, **functions) -> dict[str, float]:
    """Median seconds of each function; one call of each per round."""
    times = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def decode(layers: int, rounds: int) -> None:
    memory = torch.ones(1 << 25)  # 128 MiB
    print(f"{'case':>24} {'kernel':>18} {'read':>10} {'bytes/bandwidth':>16} {'gather+SDPA':>12} {'store':>9}")
    for requests, context in ((32, 512), (8, 4096), (1, 512)):
        for dtype in (torch.bfloat16, torch.float32):
            case = make(requests, context, dtype, max(2, layers * 32 * 512 // (requests * context) // 2))
            n = len(case.layers)
            t = in_turns(rounds, read=memory.sum, kernel=case.attend, gather=case.gather, store=case.store)
            bandwidth, speed = memory.nbytes / t["read"] / 1e9, case.nbytes / t["kernel"] / 1e9
            name = f"{requests} x {context} {case.layers[0].spec.dtype}"
            print(
                f"{name:>24} {t['kernel'] / n * 1e6:7.0f}us {speed:4.1f}GB/s {bandwidth:6.1f}GB/s"
                f" {bandwidth / speed:15.2f}x {t['gather'] / t['kernel']:11.1f}x {t['store'] / n * 1e6:7.1f}us",
                flush=True,
            )


def overhead(layers: int, rounds: int) -> None:
    """A decode step as a model runs it: linear -> attention -> linear, per layer, minus what the linears cost alone."""
    for requests, context in ((1, 64), (1, 512), (8, 512), (32, 512)):
        case = make(requests, context, torch.float32, layers)
        up, down = torch.randn(HQ * D, HQ * D), torch.randn(HQ * D, HQ * D)

        def step(attention=None, case=case, up=up, down=down):
            x = case.q.flatten(1)
            for layer in case.layers:
                q = F.linear(x, up).view(-1, HQ, D)
                if attention:
                    case.kernel.store(case.k, case.v, layer, case.plan)
                    q = case.kernel.attend(q, layer, case.plan)
                x = F.linear(q.flatten(1), down) * 1e-3

        t = in_turns(rounds, linears=step, step=lambda: step(True), alone=case.attend, store=case.store)
        t = {name: seconds / layers * 1e6 for name, seconds in t.items()}
        print(
            f"{requests:3d} x {context}: linears {t['linears']:6.0f}us, with attention {t['step']:6.0f}us, difference"
            f" {t['step'] - t['linears']:6.0f}us; attention alone {t['alone']:6.0f}us, store alone {t['store']:5.1f}us"
        )


def prefill(rounds: int) -> None:
    """Chunks of one request, token by token (compiled) and by GEMM: where FEW comes from."""
    from kvframe.kernels import cpu_work

    for dtype in (torch.float32, torch.bfloat16):
        for context in (64, 512, 4096):
            line = []
            for chunk in (2, 4, 8, 16, 32, 64):
                case = make(1, context, dtype, 4, chunk)

                def run(few, case=case):
                    cpu_work.FEW, case.kernel._plan = few, None
                    case.attend()

                t = in_turns(rounds, tokens=lambda run=run: run(1000), gemm=lambda run=run: run(0))
                line.append(f"{chunk}: {t['tokens'] / 4 * 1e6:.0f}/{t['gemm'] / 4 * 1e6:.0f}")
            print(f"{dtype} context {context}, us per layer token by token / gemm:  " + "  ".join(line))


def codecs(layers: int, rounds: int) -> None:
    """Attention and store of one layer in codes, against the numbers themselves: 8 requests of 1,024 tokens."""
    chosen = {
        "none": NoCodec(), "int8": Int8(), "e4m3": Fp8(), "e5m2": Fp8("e5m2"), "e4m3 fixed": Fp8(scales=0.01),
        "none fp32": NoCodec(),
    }  # fmt: skip
    cases = {
        name: make(8, 1024, torch.float32 if "fp32" in name else torch.bfloat16, layers, codec=codec)
        for name, codec in chosen.items()
    }
    attend = in_turns(rounds, **{name: case.attend for name, case in cases.items()})
    store = in_turns(rounds, **{name: case.store for name, case in cases.items()})
    for name, case in cases.items():
        nbytes = sum(p.nbytes for p in (*case.layers[0].k.values(), *case.layers[0].v.values()))
        print(
            f"{name:>12}: {nbytes / 2**20:5.2f} MiB, attention {attend[name] / layers * 1e6:6.0f}us, "
            f"{attend[name] / attend['none']:4.2f} x none; store {store[name] / layers * 1e6:5.1f}us"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--overhead", action="store_true", help="alternate linear layers and attention instead")
    parser.add_argument("--prefill", action="store_true", help="compare the two ways of attending to a chunk instead")
    parser.add_argument("--codecs", action="store_true", help="compare planes of codes with plain ones instead")
    options = parser.parse_args()
    if options.codecs:
        codecs(options.layers, options.rounds)
    elif options.overhead:
        overhead(options.layers, options.rounds)
    elif options.prefill:
        prefill(options.rounds)
    else:
        decode(options.layers, options.rounds)
