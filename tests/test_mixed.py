"""Mixed precision by configuration: codecs for keys, values and single layers.

Shape legend: L tokens of a request, H KV heads, D size of a vector, G tokens of a sealing group.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from kvframe_plugins.fp8 import Fp8
from kvframe_plugins.int4 import Int4
from kvframe_plugins.int8 import Int8
from kvframe_plugins.lru import LRU
from kvframe_plugins.mixed import Mixed
from kvframe_plugins.model_retention import ModelRetention
from kvframe_plugins.no_codec import NoCodec
from kvframe_plugins.no_index import NoIndex
from kvframe_plugins.paged import Paged
from omegaconf import OmegaConf
from strategies import make_engine
from test_cache import control
from test_engine import ask, tokens
from test_rollback import until

from kvframe.cache import BlockKVCache
from kvframe.config import compose
from kvframe.create import create
from kvframe.errors import ConfigError, IncompatibleCacheError, OptionError
from kvframe.interfaces import CacheContext
from kvframe.testing import check_greedy, tiny_model, wrap
from kvframe.testing.harness import run_checked
from kvframe.types import LayerSpec

MIXED = ["cache=paged", "cache/codec=mixed"]
SPELLED = ["cache/codec=mixed", "cache/codec@cache.codec.v=fp8", "+cache/codec@cache.codec.layers.0=none"]
FIRST = "+cache/codec@cache.codec.layers.0"


def test_the_spelling_that_hydra_takes():
    codec = compose(["cache=paged", *SPELLED, "cache.codec.v.format=e5m2"]).cache.codec
    names = [codec[key]["_target_"].rpartition(".")[2] for key in "kv"]
    assert names == ["Int8", "Fp8"] and codec.v.format == "e5m2"
    assert codec.layers["0"]["_target_"].endswith("NoCodec")


def test_each_layer_and_kind_gets_its_codec_and_bytes_follow():
    cache = control(["cache=paged", *SPELLED, "cache.num_blocks=8"], windows=(None, None))
    bound = [type(cache.codec.for_layer(layer, kind)).__name__ for layer in cache.context.layers for kind in "kv"]
    assert bound == ["NoCodec", "NoCodec", "Int8", "Fp8"]
    plain, coded = 2 * 2 * 8 * 4, 2 * 2 * (8 + 4)  # kinds x heads x (size 8 in fp32; or bytes and a scale)
    assert cache.token_bytes == [plain + coded]


# -- what is stored ------------------------------------------------------------------------------------------


def watched(cache) -> list[dict]:
    """Per layer: (row, position) -> the key and the value that the model computed, from now on."""
    seen, attend = [{} for _ in cache.storage.layers], cache.attend

    def watch(layer, q, k, v, plan):
        starts, positions = plan.host.query_starts, plan.host.positions
        for r, row in enumerate(plan.host.rows.tolist()):
            for t in range(int(starts[r]), int(starts[r + 1])):
                seen[layer][row, int(positions[t])] = k[t].clone(), v[t].clone()
        return attend(layer, q, k, v, plan)

    cache.attend = watch
    return seen


def sealed_and_open(x, codec, planes, tail, table, row) -> tuple:
    """`x [L, H, D]` -> what is stored of it as codes give it back, what is in the tail, and what both must be."""
    group, flat = codec.group, {name: plane[table].flatten(0, 1) for name, plane in planes.items()}
    sealed = len(x) // group * group
    if group == 1:
        return codec.decode({name: plane[:sealed] for name, plane in flat.items()}, x.dtype), x[:0], x, x[:0]
    per, n = {name: spec.per for name, spec in codec.planes(x.shape[-1]).items()}, sealed // group
    parts = {
        name: plane[:n] if per[name] == "group" else plane[:sealed].unflatten(0, (n, group))
        for name, plane in flat.items()
    }
    own = codec.decode(codec.encode(x[:sealed].unflatten(0, (n, group))), x.dtype)
    return codec.decode(parts, x.dtype).flatten(0, 1), tail.plane[row, : len(x) - sealed], own.flatten(0, 1), x[sealed:]


@pytest.mark.parametrize("sealing, plain", ["kv", "vk"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_sealed_on_one_side_and_plain_on_the_other(sealing, plain, chunk):
    """What lies in the slots is what the codec makes of the exact keys and values, and bit by bit these themselves."""
    codecs = [f"cache/codec@cache.codec.{sealing}=int4", f"cache/codec@cache.codec.{plain}=none"]
    options = ["cache/codec=mixed", *codecs, f"cache.codec.{sealing}.group=8", "cache.memory=4MiB"]
    engine = make_engine(
        wrap(tiny_model("llama")), "paged-16 radix model", chunk=chunk, overrides=options, max_requests=2
    )
    cache, seen = engine.cache, watched(engine.cache)
    assert not cache.exact and (cache.unit, cache.block_size) == (8, 16)
    for i in range(2):
        engine.add(ask(tokens(21 + 20 * i, i), id=f"q{i}", max_new_tokens=20))
    until(engine, "q1", 5)
    lengths = []
    for held in cache.tables.all():
        lengths.append(length := int(cache.tables.lengths[held.row]))
        table = torch.from_numpy(cache.tables.view(held, 0).astype(np.int64))
        for layer, exact in zip(cache.storage.layers, seen):
            k, v = (torch.stack([exact[held.row, p][kind] for p in range(length)]) for kind in (0, 1))  # [L, H, D]
            for kind, x in (("k", k), ("v", v)):
                codec, planes = getattr(layer, f"codec_{kind}"), getattr(layer, kind)
                assert codec.group == (8 if kind == sealing else 1)
                stored, tail, wanted, rest = sealed_and_open(
                    x, codec, planes, getattr(layer, f"tail_{kind}"), table, held.row
                )
                assert torch.equal(stored, wanted) and torch.equal(tail, rest)
                if kind == plain:
                    assert torch.equal(stored, x)
                else:
                    assert not torch.equal(stored, x[: len(stored)]) and len(rest) == length % 8
    assert any(length % 8 for length in lengths) and len(lengths) == 2


def test_mixed_of_exact_codecs_is_exact():
    overrides = ["cache/codec=mixed", "cache/codec@cache.codec.k=none", "cache/codec@cache.codec.v=none"]
    model = wrap(tiny_model("qwen3"))
    engine = make_engine(model, "paged-16", overrides=overrides, max_requests=4)
    assert engine.cache.exact
    for output in run_checked(engine, [ask(tokens(20, i)) for i in range(3)]):
        assert check_greedy(model.module, output.prompt_tokens, output.output_tokens) > 0


# -- mistakes ------------------------------------------------------------------------------------------------


def reasons(codec, *sizes) -> list[str]:
    """The conflicts under layers whose keys and values have these sizes."""
    layers = tuple(LayerSpec(i, 4, 2, k, v, 1.0) for i, (k, v) in enumerate(sizes))
    try:
        BlockKVCache(CacheContext(layers, max_len=96), Paged(), NoIndex(), LRU(), ModelRetention(), codec, num_blocks=4)
    except IncompatibleCacheError as error:
        return list(error.reasons)
    return []


NONE, I4, I8 = NoCodec(), Int4(), Int8()
SCALES = "scales=null, or kvframe calibrate out=calib.json and then cache.codec.v.scales=calib.json"


@pytest.mark.parametrize(
    "codec, sizes, fixes",
    [
        (Mixed(I4, I8), [(8, 15)], []),  # the codec of the keys is not asked about values
        (Mixed(I4, I8), [(15, 8)], ["k.bits=8"]),
        (Mixed(I8, I4), [(15, 8)], []),
        (Mixed(I8, I4), [(8, 15)], ["v.bits=8"]),
        (Mixed(I4, I8, {0: NONE}), [(15, 15), (8, 15)], []),  # nor about a layer that has another one
        (Mixed(I8, I8, {0: I4}), [(8, 15), (8, 8)], ["layers.0.bits=8"]),
        (Mixed(I8, I8, {0: I4}), [(8, 8), (15, 15)], []),
        (Mixed(Int8(group_size=6), I8), [(12, 8), (8, 6)], ["k.group_size=null"]),
        (Mixed(I8, Int8(group_size=6), {0: NONE}), [(8, 8), (8, 6)], []),
        (Mixed(I4, I4, {0: NONE}), [(15, 15)], []),  # they serve nothing
        (Mixed(I8, Mixed(I8, I4)), [(15, 15)], ["v.v.bits=8"]),
        (Mixed(I8, Fp8(scales={0: 1})), [(8, 8), (8, 8)], [f"v.{SCALES}"]),
        (Mixed(I8, Fp8(scales={0: 1}), {1: NONE}), [(8, 8), (8, 8)], []),
    ],
)
def test_each_codec_is_asked_about_what_it_serves(codec, sizes, fixes):
    found = reasons(codec, *sizes)
    assert len(found) == len(fixes), found
    assert all(reason.endswith(f": cache.codec.{fix}") for reason, fix in zip(found, fixes)), found


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_another_codec_in_the_same_place():
    from kvframe_plugins.bitsandbytes import NF4

    assert reasons(NF4(), (8, 15))[0].endswith(": cache/codec=bnb8")
    assert reasons(Mixed(I8, NF4()), (8, 15))[0].endswith(": cache/codec@cache.codec.v=bnb8")
    assert reasons(Mixed(I8, I8, {0: NF4()}), (8, 15))[0].endswith(": cache/codec@cache.codec.layers.0=bnb8")


def node(target: str, **options) -> dict:
    return {"_target_": f"kvframe_plugins.{target}", **options}


def mixed(k=None, v=None, **options) -> dict:
    plain = node("no_codec.NoCodec")
    return node("mixed.Mixed", k=plain if k is None else k, v=plain if v is None else v, **options)


@pytest.mark.parametrize(
    "codec, message",
    [
        (node("int4.Int4", bits=3), "cache.codec.bits=3 cannot be used\n  valid: 4, 2, 8\n  fix: cache.codec.bits=4"),
        (mixed(v=node("int4.Int4", bits=3)), "cache.codec.v.bits=3 cannot be used\n  valid: 4, 2, 8\n  fix: cache"),
        (mixed(k=node("int8.Int8", percentile=0)), "cache.codec.k.percentile=0 cannot be used"),
        (mixed(layers={"0": node("int4.Int4", group=7)}), "cache.codec.layers.0.group=7 cannot be used"),
        (mixed(v=node("fp8.Fp8", scales="x.json")), "cache.codec.v.scales='x.json' cannot be read"),
        (mixed(v=mixed(k=node("int8.Int8", group_size=0))), "cache.codec.v.k.group_size=0 cannot be used"),
        (mixed(k=0), "cache.codec.k=0 is no codec\n  fix: cache/codec@cache.codec.k=none"),
        (mixed(v="int8"), "cache.codec.v='int8' is no codec"),
        (mixed(layers=5), "cache.codec.layers=5 cannot be used"),
        (mixed(layers={"0": "int4"}), "cache.codec.layers={'0': 'int4'} cannot be used\n  valid: a codec for each"),
        (mixed(layers={"a": node("no_codec.NoCodec")}), "cache.codec.layers={'a': 'NoCodec'} cannot be used"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_messages_name_the_override_that_exists(codec, message):
    with pytest.raises(OptionError) as error:
        create(OmegaConf.create(codec), "cache.codec")
    assert str(error.value).startswith(message) and "\n  fix: " in str(error.value)


def test_mistakes_are_told_through_hydra():
    with pytest.raises(
        OptionError, match="^cache.codec.layers.0.bits=3 cannot .*\n.*\n  fix: cache.codec.layers.0.bits=4$"
    ):
        control([*MIXED, f"{FIRST}=int4", "cache.codec.layers.0.bits=3"])
    with pytest.raises(IncompatibleCacheError, match="names layer 7, the model has 0 .. 3: leave cache.codec.layers.7"):
        control([*MIXED, "+cache/codec@cache.codec.layers.7=none"])
    with pytest.raises(ConfigError, match="int88"):
        compose([*MIXED, "cache/codec@cache.codec.k=int88"])
