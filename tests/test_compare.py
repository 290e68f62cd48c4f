"""`kvframe compare`: figures that a hand can compute, baselines on the same weights, results that survive a stop."""

from __future__ import annotations

import csv
import inspect
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console
from test_evaluate import install_halves
from transformers import ContinuousBatchingConfig

from kvframe.cli import main
from kvframe.comparison import compare as comparing
from kvframe.comparison import measure, summary, timeline
from kvframe.comparison.baselines import Generate
from kvframe.comparison.candidates import contenders, differences
from kvframe.comparison.compare import compare
from kvframe.comparison.plain import plain
from kvframe.comparison.quality import token_match
from kvframe.comparison.store import Store, take_over
from kvframe.comparison.summary import row_table
from kvframe.config import build_workload, compose
from kvframe.errors import CapacityError, ConfigError
from kvframe.hf import linear, random_model, seam
from kvframe.lineup import lineup, running
from kvframe.outputs import RequestOutput
from kvframe.testing.oracle import check_greedy
from kvframe.workloads.mixed import Mixed
from kvframe.workloads.workload import Facts, play

OWN = [
    "model=random", "model.shape=tiny", "model.dtype=float32", "cache.memory=4MiB", "kernel=reference",
    "engine.clock=virtual", "engine.max_step_tokens=48",
]  # fmt: skip
SMALL = ["workload.requests=3", "workload.prompt=[4,30]", "workload.output=[3,9]"]
QUICK = ["quality_tokens=0", "timeline=null", "repeat=1"]
ALL = "caches=[contiguous,paged,'radix cache.layout.block_size=4',int8,hf_dynamic,hf_static,no_cache]"


@pytest.fixture(scope="module")
def model():
    return random_model("tiny", "float32")


def run(model, *overrides, **more):
    overrides = [*OWN, *overrides]
    return compare(compose(overrides, "compare"), overrides, model=model, **more)


def by_name(items, key="cache"):
    return {item[key]: item for item in items}


@pytest.fixture(scope="module")
def results(model):
    """One comparison for several tests."""
    return run(model, ALL, *SMALL, "repeat=2", "quality_tokens=24", "timeline={prompt: 10, output: 30}")


# -- what is measured ----------------------------------------------------------------------------------------


def test_every_candidate_has_its_runs_and_one_row(results):
    names = ["contiguous", "paged", "radix cache.layout.block_size=4", "int8", "hf_dynamic", "hf_static", "no_cache"]
    assert [c["name"] for c in results["candidates"]] == [row["cache"] for row in results["rows"]] == names
    turns = [(run["repetition"], run["cache"]) for run in results["runs"]]
    assert turns == [(r, name) for r in range(2) for name in names], "all once, then all again"
    assert results["complete"] and not results["skipped"] and results["reference"] == "contiguous"
    work = results["workload"]
    for row in results["rows"]:
        assert row["runs"] == 2 and row["output_tokens_per_s_min"] <= row["output_tokens_per_s"] > 0
        if row["cache"] != "no_cache":
            assert (row["requests"], row["output_tokens"]) == (3, work["output_tokens"])
            assert row["prompt_tokens"] == work["prompt_tokens"] and row["ttft_s_p50"] > 0 and row["itl_s_p50"] > 0
    assert set(results["columns"]) <= set(results["rows"][0])


def test_exact_caches_and_baselines_give_the_tokens_of_ref(results, model):
    facts = Facts.of(model)
    (requests,) = build_workload(compose([*OWN, *SMALL], "compare")).rounds(facts)
    for name in ("contiguous", "hf_dynamic", "hf_static", "no_cache"):
        outputs = by_name(results["outputs"][name], "id")
        assert len(outputs) == (2 if name == "no_cache" else 3)
        for request in requests[: len(outputs)]:
            check_greedy(model.module, request.prompt_tokens, outputs[request.id]["tokens"])
    rows = by_name(results["rows"])
    assert all(row["token_match"] == 1.0 for row in results["rows"] if row["exact"])
    assert 0 <= rows["int8"]["token_match"] <= 1.0 and not rows["int8"]["exact"]
    hashes = {(run["cache"], run["tokens_hash"]) for run in results["runs"]}
    assert len(hashes) == len(results["rows"]), "every repetition gave the same tokens"


def test_quality_is_measured_against_the_reference(results):
    rows = by_name(results["rows"])
    assert rows["contiguous"]["kl_mean"] == 0 and rows["int8"]["kl_mean"] > 1e-7
    for name in ("paged", "hf_dynamic", "hf_static", "no_cache"):
        assert rows[name]["kl_mean"] < 1e-9 and rows[name]["top1"] == 1.0
    assert results["quality"]["int8"]["positions"] == 23


def test_the_bytes_of_a_baseline_are_those_of_its_tensors(results, model):
    rows, work = by_name(results["rows"]), results["workload"]
    (requests,) = build_workload(compose([*OWN, *SMALL], "compare")).rounds(Facts.of(model))
    width, most = max(len(r.prompt_tokens) for r in requests), max(r.sampling.max_new_tokens for r in requests)
    token = rows["paged"]["bytes_per_token"]
    assert token == rows["hf_dynamic"]["bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, size, fp32
    assert rows["hf_dynamic"]["kv_bytes_peak"] == 3 * (width + most - 1) * token  # the last token is never stored
    assert rows["hf_static"]["kv_bytes_peak"] == pytest.approx(3 * (width + most) * token, abs=3 * token)
    for slots, name in ((lambda n: width + n - 1, "hf_dynamic"), (lambda n: width + most, "hf_static")):
        live = lambda n: sum(len(r.prompt_tokens) + n - 1 for r in requests if n <= r.sampling.max_new_tokens)
        wasted = [1 - live(n) / (3 * slots(n)) for n in range(1, most + 1)]  # after each step, however long it took
        assert min(wasted) - 0.05 <= rows[name]["waste"] <= max(wasted) + 0.05 and min(wasted) > 0, name
    assert rows["no_cache"]["kv_bytes_peak"] == 0 and rows["no_cache"]["waste"] is None
    assert rows["contiguous"]["kv_bytes_peak"] == 3 * work["longest"] * token
    assert rows["hf_dynamic"]["hit_rate"] is None and rows["paged"]["hit_rate"] == 0


def test_a_baseline_that_does_less_work_says_so_and_is_not_the_best(results):
    row = by_name(results["rows"])["no_cache"]
    assert row["note"] == "ran 2 of 3 requests" and row["requests"] == 2
    assert not row["pareto"] and row["best"] == ""


def test_the_timeline_shows_staircase_rent_and_line(results):
    lines = results["timeline"]
    assert set(lines) == {"contiguous", "paged", "radix cache.layout.block_size=4", "int8", "hf_dynamic", "hf_static"}
    for name, line in lines.items():
        token = by_name(results["rows"])[name]["bytes_per_token"]
        assert line["tokens"][0] == 10 and line["tokens"][-1] == 40 and len({len(v) for v in line.values()}) == 1
        assert line["used"] == [n * token for n in line["tokens"]]
    token = 512
    assert lines["paged"]["reserved"] == [-(-n // 16) * 16 * token for n in lines["paged"]["tokens"]]
    assert set(lines["contiguous"]["reserved"]) == {40 * token} == set(lines["hf_static"]["reserved"])
    assert lines["hf_dynamic"]["reserved"] == lines["hf_dynamic"]["used"]


def test_the_memory_of_a_cache_is_that_of_its_tensors(results, model):
    assert list(results["memory"]) == ["contiguous", "paged", "radix cache.layout.block_size=4", "int8"]
    rows = by_name(results["rows"])
    for name, found in results["memory"].items():
        assert found["weights"] == {"float32": model.weight_bytes}
        assert sum(found["kv_allocated"].values()) == rows[name]["kv_bytes_pool"]
        # the widest tensors of a step: logits of its requests, and gate and up of the MLP for each token
        assert found["activations_tokens"] <= 48
        config = model.module.config
        assert found["activations_peak"] >= found["activations_tokens"] * config.intermediate_size * 4 * 2
        parts = [*found["weights"].values(), *found["kv_allocated"].values(), found["activations_peak"]]
        assert found["total"] == sum(parts) + found["weight_copies"]
    assert results["memory"]["int8"]["kv_allocated"].keys() == {"int8", "float32"}


def test_a_window_reaches_its_plateau(model):
    entry = "caches=['sliding_window cache.retention.window=8 cache.retention.sinks=0 cache.layout.block_size=4']"
    found = run(model, entry, *SMALL, "quality_tokens=8", "repeat=1", "timeline={prompt: 4, output: 60}")
    line = found["timeline"][found["candidates"][1]["name"]]
    assert "its KL is of 8 tokens, which show no difference; requests have up to" in found["rows"][1]["note"]
    reserved = np.array(line["reserved"]) // (4 * 512)
    assert reserved[0] == 1 and reserved.max() == 3 and set(reserved[-30:].tolist()) == {2, 3}
    assert max(line["used"]) == 8 * 512 - 512 or max(line["used"]) == 8 * 512


def test_reserved_and_used_are_what_the_block_tables_and_the_tensors_say(model):
    """In use: live positions of each request times what the planes hold per slot. Allocated: the tensors that exist."""
    overrides = [*OWN, *SMALL, "caches=['radix cache.layout.block_size=4 cache.num_blocks=64']"]
    ((contender,), _, _), seen = contenders(compose(overrides, "compare"), overrides, model, 39), []
    with contender.open(model, lambda n: None) as player:
        cache = player.engine.cache
        layers = cache.storage.layers
        planes = {p.data_ptr(): p for layer in layers for p in (*layer.k.values(), *layer.v.values())}
        slot = sum(p.nbytes / (p.shape[0] * p.shape[1]) for p in planes.values())

        told = cache.stats

        def look():
            stats, live, blocks = told(), {}, set()
            for held in cache.tables.all():
                table, length = cache.tables.view(held, 0), int(cache.tables.lengths[held.row])
                blocks |= {int(b) for b in table if b}
                for position in range(length):
                    live[int(table[position // 4]), position % 4] = True
            seen.append((stats.total("used"), len(live) * slot, stats.total("reserved"), len(blocks) * 4 * slot))
            return stats

        cache.stats = look
        play(build_workload(compose(overrides, "compare")), Facts.of(model), player.answer)
        pool = player.figures()["kv_bytes_pool"]
        assert pool == pytest.approx(sum(p.nbytes for p in planes.values()), rel=0.02) and pool == 65 * 4 * slot
    assert len(seen) > 5
    for used, live, reserved, blocks in seen:
        assert used == pytest.approx(live, rel=0.02) and used <= reserved == pytest.approx(blocks, rel=0.02)


# -- hits ----------------------------------------------------------------------------------------------------


def test_hits_of_shared_prefixes_are_those_of_a_hand(model):
    shared = ["workload=shared_prefix", "workload.requests=5", "workload.prefix=32", "workload.prompt=[3,6]"]
    shared += ["workload.output=4"]
    first = run(model, "caches=[paged,radix]", *shared, *QUICK)
    rows = by_name(first["rows"])
    assert rows["radix"]["cached_tokens"] == (5 - 2) * 32 and rows["paged"]["cached_tokens"] == 0
    assert rows["radix"]["hit_rate"] == 96 / first["workload"]["prompt_tokens"]
    assert rows["radix"]["computed_tokens"] == rows["paged"]["computed_tokens"] - 96
    assert rows["radix"]["token_match"] == 1.0
    second = run(model, "caches=[paged,radix]", *shared, *QUICK)
    timed = {key for key, column in summary.COLUMNS.items() if column.spread}
    for one, two in zip(first["runs"], second["runs"]):
        assert {k: v for k, v in one.items() if k not in timed} == {k: v for k, v in two.items() if k not in timed}
        assert one["ttft_s_p50"] == two["ttft_s_p50"] and one["itl_s_p99"] == two["itl_s_p99"], "the clock is virtual"
    assert first["outputs"] == second["outputs"]


def test_hits_of_chats_are_all_that_was_said_before(model):
    chats = ["workload=multi_turn", "workload.chats=2", "workload.turns=3", "workload.system=16", "workload.user=[3,7]"]
    chats += ["workload.output=5"]
    found = run(model, "caches=[paged,'radix cache.layout.block_size=4',hf_dynamic]", *chats, *QUICK)
    _, radix, baseline = found["rows"]
    prompts, tokens = [], {output["id"]: output["tokens"] for output in found["outputs"]["paged"]}

    def answer(requests):
        prompts.extend(len(request.prompt_tokens) for request in requests)
        return [RequestOutput(request.id, output_tokens=tokens[request.id]) for request in requests]

    play(build_workload(compose([*OWN, *chats], "compare")), Facts.of(model), answer)
    # the second chat finds the system prompt; each later turn what was stored before, in whole blocks: the last token
    # of an answer was not computed
    hits = 16 + sum((prompt + 5 - 1) // 4 * 4 for prompt in prompts[:4])
    assert radix["cached_tokens"] == hits and radix["hit_rate"] == hits / sum(prompts)
    assert radix["token_match"] == baseline["token_match"] == 1.0 and baseline["requests"] == 6


# -- baselines -----------------------------------------------------------------------------------------------


def test_continuous_batching_of_transformers_gives_the_same_tokens(model):
    if "page_size" not in inspect.signature(ContinuousBatchingConfig.__init__).parameters:
        with pytest.raises(ConfigError, match="cannot look at the pages of transformers 5"):
            run(model, "caches=[paged,hf_continuous]", *SMALL, *QUICK)
        return
    found = run(model, "caches=[paged,'hf_continuous baseline.num_blocks=16 baseline.page_size=8']", *SMALL, *QUICK)
    row = found["rows"][1]
    assert row["token_match"] == 1.0 and row["output_tokens"] == found["rows"][0]["output_tokens"]
    assert row["bytes_per_token"] == 512 and row["ttft_s_p50"] > 0 and row["itl_s_p50"] > 0
    assert row["kv_bytes_pool"] >= 16 * 8 * 512 and row["steps"] is None
    entry = "hf_continuous baseline.page_size=8 baseline.num_blocks=2"
    with pytest.raises(CapacityError, match=f"(?s){entry}': .*: 16 tokens; the longest request has 30.*fix: "):
        run(model, f"caches=['{entry}']", *SMALL, *QUICK)


def test_a_batch_that_is_too_large_runs_in_parts(model):
    found = run(model, "caches=[paged,'hf_dynamic baseline.batch=2']", *SMALL, *QUICK)
    assert found["rows"][1]["token_match"] == 1.0 and found["rows"][1]["requests"] == 3
    assert found["rows"][1]["ttft_s_p99"] > found["rows"][1]["ttft_s_p50"], "the second part waits for the first"


def test_the_model_is_transformers_inside_and_ours_afterwards(monkeypatch):
    monkeypatch.setattr(linear, "native_bf16", lambda: False)
    model = random_model("tiny", "bfloat16")
    assert model.pack_weights() > 0
    layer = next(part for part in model.module.modules() if isinstance(part, torch.nn.Linear))
    packed = vars(layer)["forward"]
    with plain(model) as module:
        assert "forward" not in vars(layer) and module.config._attn_implementation == "sdpa"
        with plain(model, pack_weights=True):
            pass
    with plain(model, pack_weights=True):
        assert vars(layer)["forward"] is packed
    assert vars(layer)["forward"] is packed and model.module.config._attn_implementation == seam.NAME
    with pytest.raises(ZeroDivisionError), plain(model):
        raise ZeroDivisionError
    assert vars(layer)["forward"] is packed and model.module.config._attn_implementation == seam.NAME


def test_a_cache_runs_as_before_after_a_baseline(model):
    requests = next(iter(Mixed(requests=1, prompt=5, output=4).rounds(Facts.of(model))))
    (candidate,), tokens = lineup(["paged"], OWN, "compare"), []
    for _ in range(2):
        with running(candidate, model) as engine:
            tokens.append(engine.generate(requests)[0].output_tokens)
        with Generate().open(model, lambda n: None, 9) as player:
            tokens.append(player.answer(requests)[0].output_tokens)
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]


# -- the list ------------------------------------------------------------------------------------------------


def test_null_is_every_preset_and_the_named_baselines(model, install, monkeypatch):
    install("odd", files={"cache/odd.yaml": "# Odd.\ndefaults:\n  - paged\nnum_blocks: 0\n"})
    options = {"cache": ["odd", "paged"], "baseline": ["hf_dynamic", "no_cache"]}
    monkeypatch.setattr("kvframe.lineup.groups", lambda: options)
    found = run(model, *SMALL, *QUICK)
    assert [row["cache"] for row in found["rows"]] == ["paged", "hf_dynamic"]
    assert "cache.num_blocks=0" in found["skipped"]["odd"]
    with pytest.raises(ConfigError, match="'odd': cache.num_blocks=0"):
        run(model, "caches=[odd,paged]", *SMALL, *QUICK)


def test_a_reference_is_added_where_none_is_exact(model, install):
    install_halves(install)
    found = run(model, "caches=[halves,'paged cache/codec=halves']", *SMALL, *QUICK)
    assert [row["cache"] for row in found["rows"]] == ["paged", "halves", "paged cache/codec=halves"]
    assert found["rows"][0]["reference"] and "no cache of the list is exact: paged was added" in found["notes"][0]
    assert found["rows"][1]["token_match"] < 1.0 and found["rows"][1]["kl_mean"] is None


def test_a_name_of_two_groups_must_be_told_apart(install):
    install("two", files={"baseline/paged.yaml": "# Not a preset.\n_target_: kvframe.comparison.baselines.Generate\n"})
    with pytest.raises(ConfigError, match="'paged' is an option of cache and of baseline\n  valid: 'cache=paged', '"):
        lineup(["paged"], OWN, "compare", ("baseline",))
    one, two = lineup(["cache=paged", "baseline=paged"], OWN, "compare", ("baseline",))
    assert "baseline" not in one.cfg and two.cfg.baseline._target_.endswith("Generate")
    (plain_one,) = lineup(["paged"], OWN, "evaluate")
    assert plain_one.name == "paged", "other commands know presets only"


def test_one_that_fails_later_is_left_out_and_the_others_go_on(model, monkeypatch):
    play_it = measure.run

    def sometimes(contender, *args):
        if contender.name == "radix":
            raise RuntimeError("no more")
        return play_it(contender, *args)

    monkeypatch.setattr(measure, "run", sometimes)
    found = run(model, "caches=[paged,radix]", *SMALL, "quality_tokens=0", "timeline=null", "repeat=2")
    assert found["skipped"] == {"radix": "RuntimeError: no more"} and found["complete"]
    assert [run["cache"] for run in found["runs"]] == ["paged", "paged"]


# -- resume --------------------------------------------------------------------------------------------------


class Stop(KeyboardInterrupt):
    """Ctrl-C after so many runs."""

    def __init__(self, monkeypatch, runs):
        self.done, play_it = 0, measure.run

        def until(*args):
            if self.done >= runs:
                raise KeyboardInterrupt
            self.done += 1
            return play_it(*args)

        monkeypatch.setattr(comparing.measure, "run", until)


def test_a_stopped_comparison_goes_on(model, monkeypatch, tmp_path):
    path = tmp_path / "results.json"
    more = ["caches=[paged,hf_dynamic]", *SMALL, "repeat=2", "quality_tokens=16", "timeline=null"]
    with monkeypatch.context() as patch:
        Stop(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run(model, *more, path=path)
    half = json.loads(path.read_text())
    assert not half["complete"] and len(half["runs"]) == 3 and len(half["rows"]) == 2 and len(half["quality"]) == 2
    with monkeypatch.context() as patch:
        count = Stop(patch, 99)
        patch.setattr(comparing, "Quality", None)  # it is there
        whole = run(model, *more, "resume=true", path=path)
        assert count.done == 1, "what was there is not run again"
    written = json.loads(path.read_text())
    assert written["complete"] and written["runs"][:3] == half["runs"] and len(written["runs"]) == 4
    assert written["rows"] == json.loads(json.dumps(whole["rows"]))
    with monkeypatch.context() as patch:
        count = Stop(patch, 99)
        more[0] = "caches=[radix,paged]"
        grown = run(model, *more, "resume=true", path=path)
        assert count.done == 2 and not grown["skipped"], "somebody new plays; somebody who is not asked for stays"
    assert [row["cache"] for row in grown["rows"]] == ["radix", "paged", "hf_dynamic"]
    assert grown["reference"] == "paged" and grown["quality"]["hf_dynamic"] == half["quality"]["hf_dynamic"]


def test_another_config_is_not_mixed_with_old_results(results, model, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    with pytest.raises(ConfigError, match="under another config: workload.seed: 0 there, 1 here.*\n  fix: another"):
        run(model, "caches=[paged]", *SMALL, *QUICK, "workload.seed=1", "resume=true", path=path)
    assert json.loads(path.read_text()) == results
    for keys, value, message in (
        (("config", "model", "seed"), 3, "model.seed: 0 there, 3 here"),
        (("candidates", 1, "config", "cache", "layout", "block_size"), 8, "paged.cache.layout.block_size: .* there, 8"),
        (("candidates", 4, "config", "baseline", "batch"), 2, "hf_dynamic.baseline.batch: 64 there, 2 here"),
        (("workload", "digest"), "f", "the workload's prompts"),
    ):
        now = json.loads(json.dumps(results))
        *way, last = keys
        node = now
        for key in way:
            node = node[key]
        node[last] = value
        with pytest.raises(ConfigError, match=f"measured under another config: {message}"):
            take_over(results, now, path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is not a results.json of this kvframe compare"):
        Store(path, resume=True)
    with pytest.raises(ConfigError, match="resume=true goes on with the results of out=, which is not given"):
        Store(None, resume=True)


def test_differences_name_the_key():
    assert differences({"a": {"b": 1}, "c": [1]}, {"a": {"b": 2}, "c": (1,)}, "x") == ["x.a.b: 1 there, 2 here"]
    assert differences({"a": 1}, {}) == ["a: 1 there, null here"]


# -- rows and the table --------------------------------------------------------------------------------------


def made(name, speed, peak, kl=None, exact=False, **more):
    row = dict.fromkeys(summary.COLUMNS) | {"cache": name, "exact": exact, "best": "", "pareto": False}
    return {**row, "output_tokens_per_s": speed, "kv_bytes_peak": peak, "kl_mean": kl, **more}


def test_the_front_is_what_nobody_beats():
    rows = [
        made("exact", 10, 100, 1e-9, exact=True),
        made("as exact, larger", 10, 200, 0.0, exact=True),
        made("small", 10, 50, 1e-3),
        made("small, worse", 9, 50, 1e-2),
        made("fast", 20, 300, 0.0, exact=True),
        made("none", 1, 0, 0.0, exact=True),
    ]
    assert [row["cache"] for row in summary.front(rows)] == ["exact", "small", "fast", "none"]
    best = lambda key: [row["cache"] for row in summary.best(key, rows)]
    assert best("output_tokens_per_s") == ["fast"] and best("kl_mean") == ["small"]
    assert best("kv_bytes_peak") == ["small", "small, worse"], "who keeps nothing is no small cache"
    assert best("waste") == best("kv_bytes_used") == []


def test_who_is_not_exact_and_not_measured_is_not_on_the_front():
    rows = [made("exact", 10, 100, exact=True), made("unknown", 20, 50), made("short", 30, 40, kl=0.0)]
    assert [row["cache"] for row in summary.front(rows[:2])] == ["unknown"], "nobody was measured: speed and memory"
    rows.append(made("known", 5, 60, kl=1e-3))
    assert [row["cache"] for row in summary.front(rows)] == ["exact", "known"]
    assert summary.unseen(rows[2]) and not summary.unseen(rows[3]) and summary.best("kl_mean", rows) == []


def test_figures_that_the_runs_do_not_tell_apart_are_both_the_best():
    def row(name, low, middle, high):
        return made(name, middle, 1, runs=3, output_tokens_per_s_min=low, output_tokens_per_s_max=high)

    rows = [row("a", 9, 10, 12), row("b", 8, 9, 9.5), row("c", 1, 2, 3)]
    assert [r["cache"] for r in summary.best("output_tokens_per_s", rows)] == ["a", "b"]


def test_a_text_is_as_long_as_it_takes_to_see_what_a_window_loses(model, monkeypatch):
    monkeypatch.setattr(comparing, "FEW", 16)
    window = "'paged cache/retention=sliding_window cache.retention.window=24 cache.retention.sinks=0'"
    small = ["workload.requests=1", "workload.prompt=60", "workload.output=2", "repeat=1", "timeline=null"]
    found = run(model, f"caches=[paged,{window}]", *small)
    assert {quality["positions"] + 1 for quality in found["quality"].values()} == {62}
    lossy = found["rows"][1]
    assert lossy["kl_mean"] > 1e-6 and not summary.unseen(lossy)


def test_what_was_there_before_is_kept(model, tmp_path):
    path = tmp_path / "results.json"
    first = run(model, "caches=[paged]", *SMALL, *QUICK, path=path)
    second = run(model, "caches=[int8]", *SMALL, *QUICK, path=path)
    assert json.loads((tmp_path / "results-1.json").read_text())["rows"] == json.loads(json.dumps(first["rows"]))
    assert any("results-1.json" in note for note in second["notes"])


def test_utilization_counts_the_tokens_of_open_groups(model):
    found = run(model, "caches=[paged,int4]", "workload.requests=1", "workload.prompt=9", "workload.output=2", *QUICK)
    row = by_name(found["rows"])["int4"]
    assert 0 < row["utilization"] < 1, "eleven tokens, all of them in the tail"


def test_tokens_match_up_to_the_first_difference():
    one = [{"id": "a", "prompt": "p", "tokens": [1, 2, 3, 4]}, {"id": "b", "prompt": "p", "tokens": [5, 6]}]
    two = [{"id": "a", "prompt": "p", "tokens": [1, 2, 9, 4]}, {"id": "b", "prompt": "other", "tokens": [5, 6]}]
    assert token_match(one, one) == 1.0 and token_match(one, two) == 0.25
    assert token_match(one, two[:1]) == 0.5 and token_match(one, []) is None is token_match(None, one)


def test_thinning_keeps_both_sides_of_every_jump():
    points = [(n, n // 16, n, 0) for n in range(1000)]
    kept = timeline.thin(points, 256)
    assert len(kept) == 256 and kept == sorted(kept) and kept[0][0] == 0 and kept[-1][0] == 999
    assert {n for n, *_ in kept} >= {16 * i - side for i in range(1, 62) for side in (0, 1)}
    assert len(timeline.thin([(n, n, n, 0) for n in range(1000)], 256)) == 256
    assert timeline.thin(points[:9]) == points[:9] and timeline.thin(points) == points
    assert timeline.stops(100, 2, chunk=40) == [40, 80, 100, 101, 102]


def test_the_table_fits_100_columns(results):
    text = io.StringIO()
    Console(file=text, width=100, markup=False, highlight=False).print(row_table(results, results["rows"]))
    lines = text.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 100 and "…" not in text.getvalue()
    for word in ("tok/s", "TTFT p50", "ITL p50", "KV peak", "B/token", "waste", "hits", "KL", "contiguous", "Pareto"):
        assert word in text.getvalue(), word
    narrow = io.StringIO()
    Console(file=narrow, width=80).print(row_table(results, results["rows"], 80))
    shown = narrow.getvalue()
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    assert all(word in shown for word in ("contiguous", "hf_dynamic", "tok/s", "KV peak", summary.FRONT))
    assert any("*" in line for line in lines) and sum(summary.FRONT in line for line in lines) >= 3


# -- the command ---------------------------------------------------------------------------------------------


def test_the_command_writes_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *OWN, *SMALL, *QUICK, "caches=[paged,no_cache]", "out=results/"]) == 0
    found = json.loads(Path("results/results.json").read_text())
    assert found["complete"] and found["schema"] == 2 and found["versions"]["torch"] and found["machine"]["threads"]
    rows = list(csv.DictReader(Path("results/results.csv").open()))
    assert [row["cache"] for row in rows] == ["paged", "no_cache"] and float(rows[0]["output_tokens_per_s"]) > 0
    assert {"results.csv", "results.json"} <= {path.name for path in Path("results").iterdir()}
    told = capsys.readouterr()
    assert "paged (reference)" in told.out and "no_cache: ran 2 of 3 requests" in told.err
    assert not (tmp_path / "outputs").exists()


WRONG = {
    "repeat=0": "repeat=0 cannot be used", "quality_tokens=1": "quality_tokens=1 cannot", "timeline=3": "timeline=3",
    "timeline.prompt=0": "timeline=", "resume=maybe": "resume='maybe'", "text=gone": "text=gone cannot be read",
    "caches=[pagd]": "the preset 'pagd', which does not exist\n  valid: paged", "caches=[]": "names no cache",
    "caches=['no_cache baseline.cache=some']": "baseline.cache='some' does not exist\n  valid: dynamic, static, none",
    "caches=['hf_dynamic baseline.batch=0']": "baseline.batch=0", "+baseline.cache=static": "baseline= chooses nothing",
    "caches=['paged engine.max_len=9']": "'paged engine.max_len=9' takes requests of at most 9 tokens; the workload's",
    "caches=['hf_dynamic model.dtype=float32']": "sets model.dtype, which all caches have in common",
}  # fmt: skip


def test_mistakes_are_told_before_the_work(model, tmp_path):
    base = compose([*OWN, *SMALL, "caches=[paged]"], "compare")
    for override, message in WRONG.items():
        key, _, value = override.lstrip("+").partition("=")
        cfg = base.copy()
        OmegaConf.update(cfg, key, OmegaConf.create(f"value: {value}").value, force_add=True)
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            compare(cfg, [*OWN, *SMALL], model=model, path=tmp_path / "out" / "results.json")
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_a_folder_is_meant(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "out=results.json"]) == 2
    assert "out=results.json names a file; the results of a comparison are several" in capsys.readouterr().err
