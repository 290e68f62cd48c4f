"""Every Triton kernel compiled for chips that need not be there: what a step would start, see Launch.compile.

Run by test_triton_compiled.py, without TRITON_INTERPRET. Shape legend: Dk/Dv sizes of vectors.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from kvframe_plugins.int4 import Int4
from kvframe_plugins.no_codec import NoCodec
from test_kernel_codes import PAIRS

from kvframe.kernels.triton import decode, prefill, reduce, seal, store
from kvframe.kernels.triton.launch import Launch
from kvframe.kernels.triton.layer import Layer
from kvframe.kernels.triton.work import groups
from kvframe.testing.contracts.kernel import Turned
from kvframe.testing.parts import Band
from kvframe.testing.steps import make_spec, make_step

KIB = 1 << 10
SHARED = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB}  # bytes that a block may have
KEYS = Int4()
CODECS = {"none": (NoCodec(), NoCodec())} | {name: PAIRS[name] for name in ("int8", "e4m3", "e5m2", "two", "table")}
CODECS |= {"int4": (KEYS, KEYS.for_layer(None, "v")), "int4 keys": (KEYS, PAIRS["int8"][1])}
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def launches(dtype, codec, dims, heads, block, rule, extra, chip: int) -> dict[str, Launch]:
    """What a step of such a layer starts on a chip."""
    spec = make_spec(*heads, *dims, dtype=dtype, **extra)
    block = max(block, CODECS[codec][0].group)
    step = make_step(spec, [(40, 1), (90, 3)], block, rule, codecs=CODECS[codec])
    layer, group, starts = Layer.of(step.storage), step.plan.groups[0], step.plan.query_starts
    second = step.q if isinstance(rule, Turned) else None
    step_args = layer, group.tables, group.context_lens, starts
    first, *parts = decode.start(step.q, second, *step_args, None, 1, 1, step.plan.rows)
    found = {
        "decode": first,
        "reduce": reduce.start(*parts, layer, *step_args[2:], None, step.q.new_empty(4, heads[0], dims[1])),
    }
    out, tiles = step.q.new_empty(4, heads[0], dims[1]), torch.zeros(1, 2, dtype=torch.int32)
    raw, addresses = {}, (group.tables, group.context_lens, starts, step.plan.rows)
    for kind, x, side in (("k", step.k, layer.k), ("v", step.v, layer.v)):
        if side.group > 1:
            todo = groups(step.plan, side.group)
            raw[kind] = x.new_empty(int(todo.starts[-1]), *x.shape[1:]), todo.base
            (found[f"seal {kind}"],) = seal.starts_of(x, side, block, *addresses, None, None)
            chunks = seal.starts_of(x, side, block, *addresses, todo, raw[kind][0])
            found[f"chunks {kind}"], found[f"tail {kind}"] = chunks
    found["prefill"], found["careful"] = prefill.start(step.q, second, *step_args, tiles, out, raw)
    if layer.k.written and layer.v.written and not layer.seals:
        found["store"] = store.start(step.k, step.v, layer, group.slots)
    for launch in found.values():
        if "HARDWARE" in launch.meta:
            launch.meta["HARDWARE"] = chip >= 89
    return found


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers, bytes of stack and of local memory of a thread."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    said = subprocess.run([TOOL, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}


LLAMA = {"heads": (32, 8), "dims": (128, 128), "block": 16, "rule": Band(), "extra": {}}
SINKS = {"softcap": 30.0, "sinks": True}
ODD = {"heads": (14, 2), "dims": (80, 80), "block": 4096, "rule": Band(1024, 4), "extra": SINKS}
WIDE = {"heads": (8, 4), "dims": (256, 256), "block": 32, "rule": Band(1024), "extra": {"softcap": 50.0}}
MLA = {"heads": (16, 16), "dims": (192, 128), "block": 16, "rule": Band(), "extra": {}}
TURNED = {"heads": (9, 3), "dims": (64, 64), "block": 16, "rule": Turned(512, 4), "extra": {}}
LAYERS = {"llama": LLAMA, "odd": ODD, "wide": WIDE, "mla": MLA, "turned": TURNED}
ALL = ("decode", "reduce", "prefill", "careful", "store")
MORE = [("llama", "none"), ("odd", "e4m3"), ("mla", "table")]  # layers and codecs of the other dtypes
FAST = ("decode", "reduce", "store")
GRID = {
    (chip, dtype, codec, layer, kernel): pytest.mark.nightly
    for chip in SHARED
    for dtype in ("bfloat16", "float16", "float32")
    for codec in CODECS
    for layer in LAYERS
    for kernel in ALL
    if (kernel != "store" or codec not in ("two", "table", "int4", "int4 keys"))
    and (dtype == "bfloat16" or (layer, codec) in MORE)
    and (kernel != "careful" or codec in ("none", "e4m3", "int4"))
}
SEALS = tuple(f"{what} {kind}" for what in ("seal", "chunks", "tail") for kind in "kv")
for chip in SHARED:
    for layer in LAYERS:
        for kernel in SEALS:
            GRID[chip, "bfloat16", "int4", layer, kernel] = pytest.mark.nightly
for chip in SHARED:
    for kernel in FAST:
        GRID[chip, "bfloat16", "e4m3", "llama", kernel] = ()
    GRID[chip, "bfloat16", "none", "llama", "decode"] = GRID[chip, "bfloat16", "none", "llama", "prefill"] = ()
for codec in ("none", "int8"):
    for kernel in FAST:
        GRID[90, "bfloat16", codec, "llama", kernel] = ()
GRID[90, "float16", "e5m2", "odd", "decode"] = GRID[90, "bfloat16", "none", "wide", "decode"] = ()
GRID[90, "bfloat16", "two", "turned", "decode"] = GRID[90, "float32", "none", "mla", "decode"] = ()
GRID[90, "bfloat16", "int8", "odd", "prefill"] = ()
for kernel in ("decode", "prefill", "seal k", "seal v", "chunks k"):
    GRID[90, "bfloat16", "int4", "llama", kernel] = ()


CASES = [pytest.param(*key, marks=mark) for key, mark in GRID.items()]


@pytest.mark.parametrize("chip, dtype, codec, layer, kernel", CASES)
def test_compiles(chip, dtype, codec, layer, kernel, tmp_path):
    """Within the shared memory of the chip; the decode kernel keeps all in registers."""
    compiled = launches(dtype, codec, **LAYERS[layer], chip=chip)[kernel].compile(chip)
    assert compiled.metadata.shared <= SHARED[chip]
    used = resources(compiled.asm["cubin"], tmp_path)
    assert used["REG"] > 0
    if kernel in (*FAST, *SEALS):
        assert used["STACK"] == used["LOCAL"] == 0, used
