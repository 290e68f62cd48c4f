"""The Triton kernels against the reference kernel and their plain twins, in the interpreter or on a GPU.

Run by test_triton_interpreter.py. Shape legend: T tokens of a step, Hq/Hkv heads, Dk/Dv sizes.
"""

from __future__ import annotations

import random

import pytest
import test_not_finite
import torch
import triton
import triton.language as tl
from attending import Attending, with_storage
from kvframe_plugins.fp8.formats import FORMATS
from kvframe_plugins.int4 import Int4
from kvframe_plugins.no_codec import NoCodec
from test_kernel_codes import PAIRS, bits

from kvframe.kernels.reference import ReferenceKernel
from kvframe.kernels.triton import decode, prefill, reduce, seal, store
from kvframe.kernels.triton.bits import e4m3_numbers, e5m2_numbers, float8_codes
from kvframe.kernels.triton.kernel import TritonKernel
from kvframe.kernels.triton.launch import Launch, interpreted
from kvframe.kernels.triton.layer import Layer
from kvframe.kernels.triton.work import groups, work
from kvframe.testing.contracts.kernel import Turned
from kvframe.testing.parts import Band
from kvframe.testing.steps import Step, make_spec, make_step
from kvframe.testing.walker import Walker

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
CODECS = {"none": (NoCodec(), NoCodec())} | {name: PAIRS[name] for name in PAIRS if name != "clipped"}
AXES = {
    "dtype": list(NEAR),
    "codec": list(CODECS),
    "rule": [Band(), Band(24), Band(24, 5), Band(300, 4), Band(9, 270), Band(1)],
    "block": [16, 32, 128, 600],
    "heads": [(4, 4), (6, 2), (8, 1), (7, 1), (18, 1)],
    "dims": [(64, 64), (80, 80), (96, 40), (128, 128), (24, 16), (192, 128), (256, 256)],
    "extra": [{}, {"softcap": 4.0}, {"sinks": True}, {"softcap": 3.0, "sinks": True, "scale": 0.3}],
    "requests": [
        [(1, 1), (40, 1), (300, 1)],
        [(70, 30), (33, 33), (2, 2)],
        [(17, 1), (90, 3), (310, 1), (110, 66)],
    ],
}


def cases(n: int, seed: int, axes=AXES) -> list[dict]:
    """n cases; each axis goes through its values in an order of its own, again and again."""
    draw, columns = random.Random(seed), {}
    for name, values in axes.items():
        column = []
        while len(column) < n:
            column += draw.sample(values, len(values))
        columns[name] = column[:n]
    return [{name: column[i] for name, column in columns.items()} for i in range(n)]


DAILY, NIGHTLY = cases(12, 0), cases(300, 1)
GRID = [*DAILY, *(pytest.param(case, marks=pytest.mark.nightly) for case in NIGHTLY)]


def ranged(**options):
    keys = Int4(**options)
    return keys, keys.for_layer(None, "v")


SEALED = {  # keys and values; blocks of 96 hold whole groups of all of them
    "kivi": ranged(),
    "2 bits": ranged(group=8, bits=2, value_group=5, scale_dtype="bfloat16"),
    "keys only": (Int4(group=6, bits=8, scale_dtype="float32"), PAIRS["int8"][1]),
    "values only": (NoCodec(), ranged(group=4, value_group=7)[1]),
    "groups that differ": (Int4(group=48), ranged(group=6)[1]),
}
OPEN = {
    "dtype": list(NEAR), "codec": list(SEALED), "rule": [Band(), Band(24), Band(24, 5), Band(4, 40), Band(9, 270)],
    "block": [96, 384], "heads": [(4, 4), (6, 2), (7, 1)], "dims": [(64, 64), (80, 24), (24, 96)],
    "extra": [{}, {"softcap": 3.0, "sinks": True, "scale": 0.3}],
    "requests": [
        [(1, 1), (32, 1), (96, 1), (97, 1), (300, 1)], [(40, 12), (33, 33), (2, 2), (8, 1), (96, 9)],
    ],
}  # fmt: skip
DAILY_OPEN = cases(5, 0, OPEN)
GROUPS = [*DAILY_OPEN, *(pytest.param(case, marks=pytest.mark.nightly) for case in cases(100, 1, OPEN))]


def make(case: dict, seed=0) -> Step:
    spec = make_spec(*case["heads"], *case["dims"], dtype=case["dtype"], **case["extra"])
    codecs = (CODECS | SEALED)[case["codec"]]
    return make_step(spec, case["requests"], case["block"], case["rule"], seed, codecs=codecs, device=DEVICE)


def on_host(planes: dict) -> dict:
    return {name: plane.cpu() for name, plane in planes.items()}


def written(case: dict) -> str:
    return " ".join(str(value) for value in case.values())


def agree(step: Step) -> torch.Tensor:
    """The same codes bit by bit, and the attention of the reference in fp32."""
    kernel, storage = TritonKernel(), step.storage
    codecs = storage.codec_k, storage.codec_v
    assert not kernel.unsupported(storage.spec, codecs, storage.retention, DEVICE, storage.block_size)
    other = step.copy()
    got = step.run(kernel)
    ReferenceKernel().store(other.k, other.v, other.storage, other.plan)
    for mine, theirs in ((storage.k, other.storage.k), (storage.v, other.storage.v)):
        assert bits(on_host(mine)) == bits(on_host(theirs))
    for mine, theirs in ((storage.tail_k, other.storage.tail_k), (storage.tail_v, other.storage.tail_v)):
        assert mine is None or bits({"tail": mine.plane.cpu()}) == bits({"tail": theirs.plane.cpu()})
    other.q, other.second = other.q.float(), None if step.second is None else step.second.float()
    want = other.attend(ReferenceKernel())
    assert got.dtype == step.q.dtype and got.shape == want.shape
    limit = NEAR[storage.spec.dtype]
    torch.testing.assert_close(got.float(), want, atol=limit * max(1.0, float(want.abs().max())), rtol=limit)
    return got


def test_every_value_is_tried_daily():
    for axes, daily in ((AXES, DAILY), (OPEN, DAILY_OPEN)):
        for name, values in axes.items():
            assert all(any(case[name] == value for case in daily) for value in values), name


@pytest.mark.parametrize("case", GRID, ids=written)
def test_attention(case):
    agree(make(case))


@pytest.mark.parametrize("case", GROUPS, ids=written)
def test_groups_and_tails(case):
    """Codes, tails and attention under codecs that seal."""
    agree(make(case))


@pytest.mark.parametrize("codec", ["kivi", pytest.param("2 bits", marks=pytest.mark.nightly), "keys only"])
def test_codes_of_groups_of_odd_numbers(codec):
    """NaN, infinities, numbers that no scale reaches, one value all over, and the ends of float16 and bfloat16."""
    step = make_step(make_spec(2, 2, 32, 32), [(96, 96)], 96, codecs=SEALED[codec], device=DEVICE)
    odd = [torch.nan, torch.inf, -torch.inf, 1e30, -1e38, 65504.0, 65519.0, -6e-8, 3e-8, 2.0**-126, 1e-45, 0.0, 1 / 3]
    for x in (step.k, step.v):
        for i, number in enumerate(odd):
            x[7 * i, i % 2, 3 * i % 32] = number
        x[48:54, 1] = -5.7
    other = step.copy()
    TritonKernel().store(step.k, step.v, step.storage, step.plan)
    ReferenceKernel().store(other.k, other.v, other.storage, other.plan)
    for mine, theirs in ((step.storage.k, other.storage.k), (step.storage.v, other.storage.v)):
        for name, plane in on_host(mine).items():
            want = theirs[name].cpu()
            where = (plane.float() != want.float()) & ~(plane.float().isnan() & want.float().isnan())
            assert not where.any(), (name, plane[where][:4], want[where][:4])


def test_a_cache_that_seals():
    """Hits, forks, windows, cuts and evictions, each step held to the rule; a layer that reads another's."""
    if DEVICE != "cpu":
        pytest.skip("it is held to the rule on the host")
    more = ["cache/codec=int4", "cache.codec.group=8", "cache/retention=sliding_window", "cache.retention.window=9"]
    cache = with_storage(
        ["cache=radix", "cache.layout.block_size=8", "cache.memory=100KiB", *more], kernels=(TritonKernel(),)
    )
    assert {layer.kernel.name for layer in cache.storage.layers} == {"triton"}
    Walker(cache, seed=3, watcher=Attending(cache)).walk(9)


@pytest.mark.parametrize("codec, dtype", [("none", "bfloat16"), ("e4m3", "float32")])
@pytest.mark.parametrize("rule", [Turned(24, 5), Turned(9, 70)], ids=str)
def test_second_query_meets_the_sinks(codec, dtype, rule):
    spec, requests = make_spec(6, 2, dtype=dtype), [(40, 1), (90, 40), (8, 1)]
    step = make_step(spec, requests, 16, rule, codecs=CODECS[codec], device=DEVICE)
    positions = step.plan.host.positions
    own = torch.from_numpy(rule.sink_position(positions) == positions).to(DEVICE)
    step.second = torch.where(own[:, None, None], step.q, step.q.flip(0))
    agree(step)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_missing_blocks_are_skipped(codec):
    """A table entry 0 in what is visible, in every kind of tile; block 0 holds poison."""
    step = make_step(make_spec(6, 2), [(200, 1), (300, 40), (90, 1)], 16, codecs=CODECS[codec], device=DEVICE)
    for plan in (step.plan.host, step.plan):
        tables = plan.groups[0].tables
        tables[0, 2], tables[0, 5], tables[1, 0], tables[1, 9], tables[2, 0] = 0, 0, 0, 0, 0
    agree(step)


# -- alone and in a batch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, codec, rule",
    [("float32", "none", Band()), ("bfloat16", "int8", Band(300, 4)), ("float16", "e4m3", Band(24, 5))],
)
def test_a_request_does_not_depend_on_its_neighbours(dtype, codec, rule):
    """Bit by bit, decode and prefill, beside longer contexts (more parts) and other chunks."""
    requests, at = [(40, 1), (290, 1), (33, 20), (900, 1)], 0
    spec = make_spec(6, 2, dtype=dtype)
    batch = make_step(spec, requests, 16, rule, codecs=CODECS[codec], device=DEVICE).run(TritonKernel())
    for length, chunk in requests[:3]:
        step = make_step(spec, [(length, chunk)], 16, rule, codecs=CODECS[codec], device=DEVICE)
        assert torch.equal(step.run(TritonKernel()), batch[at : at + chunk]), (length, chunk)
        at += chunk


# -- NaN and infinities ----------------------------------------------------------------------------------------


SPOILED = [("none", "plain", "v"), ("none", "softcap", "k"), ("int4", "sizes", "v")]
SPOILED += [
    pytest.param(*case, marks=pytest.mark.nightly)
    for case in [("e4m3", "plain", "v"), ("none", "turned sinks", "v"), ("int4", "plain", "k")]
]


@pytest.mark.parametrize("codec, layer, kind", SPOILED)
def test_who_does_not_see_a_token_is_not_spoiled_by_it(monkeypatch, codec, layer, kind):
    if DEVICE != "cpu":
        pytest.skip("its cache is on the host")
    monkeypatch.setitem(test_not_finite.KERNELS, "triton", TritonKernel)
    at, window, length = test_not_finite.AT, test_not_finite.WINDOW, test_not_finite.L
    chunks = (20, 1, 69)  # the one that holds the token is cut into tiles of keys, before and behind it
    run = test_not_finite.Run("triton", "fp8" if codec == "e4m3" else codec, layer, True)
    blind = torch.arange(length)
    # keys of a group are encoded together, and spoiled together
    blind = (blind < at) | (blind >= at + (length if (codec, kind) == ("int4", "k") else window))
    clean = run.of(chunks)
    assert clean.isfinite().all()
    for wild in test_not_finite.WILD:
        got = run.of(chunks, wild, kind)
        assert torch.equal(got[blind], clean[blind]), wild
        if codec == "none" and kind == "v":
            hit = got[~blind, 3:, 5]  # the query heads of KV head 1
            torch.testing.assert_close(hit, torch.full_like(hit, wild), equal_nan=True)


# -- twins -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*cases(6, 2), *cases(1, 2, OPEN)], ids=written)
def test_twins(case):
    """Each kernel and the plain function of the same signature."""
    step, near = make(case), NEAR[case["dtype"]]
    layer, group, starts = Layer.of(step.storage), step.plan.groups[0], step.plan.query_starts
    todo, raw = work(step.plan, layer.group, layer.prefill_tiles().rows), {}
    if layer.k.written and layer.v.written:
        twin = step.copy()
        raw = stored(step, layer, store.store, seal.seal)
        raws = stored(twin, Layer.of(twin.storage), store.store_plain, seal.seal_plain)
        for mine, theirs in ((step.storage.k, twin.storage.k), (step.storage.v, twin.storage.v)):
            assert bits(on_host(mine)) == bits(on_host(theirs))
        assert all(torch.equal(raw[kind][0], raws[kind][0]) for kind in raw if raw[kind][0] is not None)
    else:
        ReferenceKernel().store(step.k, step.v, step.storage, step.plan)
    outs = [torch.zeros(len(step.q), layer.q_heads, layer.v.dim, dtype=step.q.dtype, device=DEVICE) for _ in "kp"]
    if todo.decoding:
        args = layer, group.tables, group.context_lens, starts, todo.rows
        n = todo.decoding, layer.most_parts(step.plan.max_context), step.plan.rows
        got = decode.decode(step.q, None, *args, *n)
        want = decode.decode_plain(step.q, None, *args, *n)
        lengths = group.context_lens.cpu()[todo.rows.cpu().long() if todo.rows is not None else slice(None)]
        for row, length in enumerate(lengths.tolist()):
            for mine, theirs in zip(got, want):
                mine, theirs = (x[row, : layer.parts(length)] for x in (mine, theirs))
                limit = near * max(1.0, float(theirs[theirs.isfinite()].abs().max()))
                torch.testing.assert_close(mine, theirs, atol=4 * limit, rtol=near)
        reduce.reduce(*want, layer, *args[2:], outs[0])
        reduce.reduce_plain(*want, layer, *args[2:], outs[1])
    if todo.tiles is not None:
        args = step.q, None, layer, group.tables, group.context_lens, starts, todo.tiles
        prefill.prefill(*args, outs[0], raw)
        prefill.prefill_plain(*args, outs[1], raw)
    torch.testing.assert_close(*outs, atol=near * max(1.0, float(outs[1].abs().max())), rtol=near)


def stored(step: Step, layer: Layer, store, seal) -> dict[str, tuple]:
    """Stores a step with one of the twins; what queries of chunks see of open groups, see `prefill`."""
    group, plan, raw = step.plan.groups[0], step.plan, {}
    sides = (("k", step.k, layer.k), ("v", step.v, layer.v))
    if not layer.seals:
        store(step.k, step.v, layer, group.slots)
    for only, (kind, x, side) in enumerate(sides):
        if not layer.seals:
            continue
        if side.group == 1:
            store(step.k, step.v, layer, group.slots, only)
            continue
        todo = groups(plan, side.group)
        vectors = None if todo is None else x.new_zeros(int(todo.starts[-1]), *x.shape[1:])
        addresses = group.tables, group.context_lens, plan.query_starts, plan.rows
        seal(x, side, step.storage.block_size, *addresses, todo, vectors)
        raw[kind] = vectors, None if todo is None else todo.base
    return raw


# -- bits ------------------------------------------------------------------------------------------------------


@triton.jit
def turn(codes, numbers, x, made, E4M3: tl.constexpr, N: tl.constexpr):
    """Codes to numbers, and numbers to codes."""
    i = tl.arange(0, N)
    if E4M3:
        tl.store(numbers + i, e4m3_numbers(tl.load(codes + i)))
        tl.store(made + i, float8_codes(tl.load(x + i), tl.load(x + i), 3, 7))
    else:
        tl.store(numbers + i, e5m2_numbers(tl.load(codes + i)).to(tl.float32))
        tl.store(made + i, float8_codes(tl.load(x + i), tl.load(x + i), 2, 15))


@pytest.mark.parametrize("name", FORMATS)
def test_bits(name):
    """All codes, and numbers at, beside and between them."""
    form = FORMATS[name]
    values = torch.from_numpy(form.values().copy())
    some = values[values.isfinite()].sort().values
    middles = (some[1:].double() + some[:-1].double()).div(2).float()
    around = torch.cat([some, middles])
    beside = [torch.nextafter(around, torch.tensor(far)) for far in (-torch.inf, torch.inf)]
    draws = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * form.largest / 3
    nans = torch.tensor([torch.nan, -torch.nan])
    x = torch.cat([around, *beside, draws]).clamp(-form.largest, form.largest)
    x = torch.cat([x, nans, torch.zeros(4096 - len(x) - 2)])
    codes = torch.arange(4096).to(torch.uint8)
    numbers, made = torch.zeros(4096), torch.zeros(4096, dtype=torch.uint8)
    args = {"codes": codes, "numbers": numbers, "x": x, "made": made}
    args = {key: value.to(DEVICE) for key, value in args.items()}
    Launch(turn, (1,), args, {"E4M3": name == "e4m3", "N": 4096}).run()
    dtype = getattr(torch, form.dtype)
    assert torch.equal(args["made"].cpu(), x.to(dtype).view(torch.uint8))
    want = codes.view(dtype).float()
    assert torch.equal(args["numbers"].cpu().nan_to_num(nan=1e9), want.nan_to_num(nan=1e9))


def test_runs_where_it_should():
    assert interpreted(decode.decode_kernel) is (DEVICE == "cpu")
