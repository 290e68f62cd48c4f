"""Who watches an engine: hooks of plugins, watchers of a config, and the two that come with kvframe."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from kvframe import plugins as loading
from kvframe.cli import main
from kvframe.config import build_engine, build_watchers, compose
from kvframe.errors import ConfigError, KVFrameError, PluginError
from kvframe.hookspecs import hookimpl
from kvframe.outputs import RequestOutput
from kvframe.testing import tiny_model, wrap
from kvframe.types import CacheStats, GroupStats, Request, SamplingParams
from kvframe.watching import Watchers

SMALL = ["kernel=reference", "engine.max_len=64", "engine.clock=virtual", "engine.max_step_tokens=32"]
SHORT = ["cache=radix", "cache.layout.block_size=4", "cache.num_blocks=24"]
STATS = CacheStats((GroupStats("full", 2, 16, 8, 100, 300, 250, 400, 0, 300),), hit_tokens=7)


@functools.cache
def model(arch: str):
    return wrap(tiny_model(arch))


def ask(n: int, seed: int, new: int = 4) -> Request:
    prompt = np.random.default_rng(seed).integers(3, 250, n).tolist()
    return Request(prompt_tokens=prompt, sampling=SamplingParams(max_new_tokens=new, ignore_eos=True))


def engine_of(*overrides: str, arch: str = "llama"):
    return build_engine(compose([*SMALL, *overrides]), model(arch))


def lines(path) -> list[dict]:
    text = Path(path).read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


class Spy:
    """Remembers what it was told, in order."""

    def __init__(self):
        self.seen: list[tuple] = []

    @hookimpl
    def kvframe_on_step(self, step, requests, tokens, seconds, stats):
        self.seen.append(("step", step, stats.evictions))

    @hookimpl
    def kvframe_on_evict(self, step, blocks, nbytes, reason):
        self.seen.append(("evict", step, blocks, nbytes, reason))

    @hookimpl
    def kvframe_on_finish(self, output):
        self.seen.append(("finish", output.id, output.finish_reason))

    def of(self, kind: str) -> list[tuple]:
        return [event for event in self.seen if event[0] == kind]


def spied(*overrides: str, arch: str = "llama"):
    engine, spy = engine_of(*overrides, arch=arch), Spy()
    engine.telling.hooks = Watchers(loading.plugins().manager, {"spy": spy})
    return engine, spy


# -- evictions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_evictions_are_told_once_per_step_by_layer_group_and_before_the_step(arch):
    engine, spy = spied(*SHORT, arch=arch)
    engine.generate([ask(40, seed) for seed in range(5)])
    evicted, stats = spy.of("evict"), engine.cache.stats()
    assert stats.evictions > 0 and stats.evictions == sum(group.evictions for group in stats.groups)
    for group in stats.groups:
        assert sum(event[2].get(group.name, 0) for event in evicted) == group.evictions
    assert all(n > 0 for event in evicted for n in event[2].values())
    size = {group.name: group.block_bytes for group in stats.groups}
    assert all(event[3] == sum(n * size[name] for name, n in event[2].items()) for event in evicted)
    steps = [event[1] for event in evicted]
    assert len(steps) == len(set(steps)) and {event[4] for event in evicted} == {"eviction"}
    for step in steps:
        kinds = [event[0] for event in spy.seen if event[0] != "finish" and event[1] == step]
        assert kinds == ["evict", "step"]


def test_nothing_is_told_where_nothing_went():
    engine, spy = spied("cache=radix", "cache.num_blocks=64")
    engine.generate([ask(40, seed) for seed in range(3)])
    assert not spy.of("evict") and spy.of("step") and engine.cache.stats().evictions == 0


def test_a_second_run_counts_from_the_beginning():
    engine, spy = spied(*SHORT)
    for run in range(3):
        before = len(spy.of("evict"))
        engine.generate([ask(40, 10 * run + seed) for seed in range(4)])
        told = sum(sum(event[2].values()) for event in spy.of("evict")[before:])
        assert told == engine.cache.stats().evictions > 0


def test_nobody_sees_the_steps_of_a_warm_up():
    engine, spy = spied(*SHORT)
    engine.warm()
    assert spy.seen == []


# -- watchers ------------------------------------------------------------------------------------------------


def test_one_that_fails_is_said_once_and_keeps_nobody_from_being_called(caplog, install):
    class Broken:
        @hookimpl
        def kvframe_on_step(self, step):
            raise ValueError(f"no luck in step {step}")

    install("public", "seen = []\n@hookimpl\ndef kvframe_on_step(step):\n    seen.append(step)\n")
    manager, before, after = loading.plugins().manager, Spy(), Spy()
    watchers = Watchers(manager, {"before": before, "broken": Broken(), "after": after})
    for step in range(3):
        watchers.kvframe_on_step(step=step, requests=1, tokens=1, seconds=0.1, stats=STATS)
    assert len(before.seen) == len(after.seen) == 3 and manager.get_plugin("public").seen == [0, 1, 2]
    assert caplog.text.count("broken failed in kvframe_on_step") == 1 and "no luck in step 0" in caplog.text


def test_watchers_of_a_config_watch_that_engine_only(tmp_path):
    cfg = [f"watch.event_log.path={tmp_path / name}" for name in ("one.jsonl", "two.jsonl")]
    one, two = (engine_of("cache.num_blocks=64", "watch=event_log", override) for override in cfg)
    other = engine_of("cache.num_blocks=64")
    one.generate([ask(5, 0)])
    other.generate([ask(5, 0)])
    assert len(lines(tmp_path / "one.jsonl")) > 3 and (tmp_path / "two.jsonl").read_text() == ""
    two.generate([ask(5, 0)])
    assert lines(tmp_path / "one.jsonl")[-1]["run"] != lines(tmp_path / "two.jsonl")[-1]["run"]


def test_several_watchers_and_two_of_one_kind(tmp_path):
    pytest.importorskip("prometheus_client")
    watch = ["watch=[event_log,prometheus]", f"watch.event_log.path={tmp_path / 'a'}"]
    second = ["+watch@watch.second=event_log", f"watch.second.path={tmp_path / 'b'}"]
    watchers = build_watchers(compose([*watch, *second]))
    assert {name for name, _ in watchers.own.list_name_plugin()} == {"event_log", "prometheus", "second"}
    watchers.kvframe_on_evict(step=1, blocks={"full": 2}, nbytes=9, reason="eviction")
    assert [row["event"] for row in lines(tmp_path / "a")] == [row["event"] for row in lines(tmp_path / "b")]


def test_a_watcher_of_a_plugin_and_a_file_that_does_not_say_where_it_stands(install):
    code = "class Mine:\n    @hookimpl\n    def kvframe_on_step(self, step):\n        pass\n"
    install("mine", code, {"watch/mine.yaml": "# Mine.\n_target_: kv_mine_module.Mine\n"})
    assert [name for name, _ in build_watchers(compose(["watch=mine"])).own.list_name_plugin()] == ["watch"]


WRONG = {
    "watch=event_lg": r"watch=event_lg does not exist\n  valid: event_log, none",
    "watch=[event_log,prom]": r"watch=prom does not exist\n  valid: prometheus, ",
    "watch=null": r"watch=null names no option\n  valid: event_log, none",
    "watch.event_log.path=x": r"watch=event_log is not chosen\n  fix: watch=event_log watch.event_log.path=x",
}


@pytest.mark.parametrize("override", WRONG)
def test_a_typo_is_answered_with_the_valid_names(override):
    with pytest.raises(ConfigError, match=WRONG[override]):
        compose([override])


def test_what_is_missing_wrong_or_no_watcher_is_said_before_a_model_is_loaded(tmp_path):
    def message(*overrides: str) -> str:
        with pytest.raises(KVFrameError) as error:
            build_watchers(compose(overrides))
        return str(error.value)

    assert "watch.event_log.path must be given" in message("watch=event_log")
    assert "has no parameter 'colour'" in message("watch=prometheus", "+watch.prometheus.colour=1")
    assert "fix: watch.event_log.path=" in message("watch=event_log", f"watch.event_log.path={tmp_path}")
    assert "watch.log=1 is not a watcher" in message("+watch.log=1")
    assert "it has no hook" in message("+watch.log._target_=builtins.object")


def test_a_watcher_with_a_hook_that_cannot_be_called():
    class Typo:
        @hookimpl
        def kvframe_on_step(self, stat):
            pass

    with pytest.raises(PluginError, match="watcher typo .*Typo.* hook kvframe_on_step takes the argument 'stat'"):
        Watchers(loading.plugins().manager, {"typo": Typo()})


# -- the event log -------------------------------------------------------------------------------------------


def test_the_event_log_has_a_line_for_all_that_happens_and_no_text(tmp_path):
    path = tmp_path / "deep/events.jsonl"
    engine = engine_of(*SHORT, "watch=event_log", f"watch.event_log.path={path}")
    outputs = engine.generate([*(ask(40, seed) for seed in range(4)), ask(100, 9)])
    rows, summary = lines(path), engine.summary()
    assert rows[0]["event"] == "start" and len({row["run"] for row in rows}) == 1
    of = lambda kind: [row for row in rows if row["event"] == kind]
    assert [row["step"] for row in of("step")] == list(range(summary["steps"]))
    assert sum(row["tokens"] for row in of("step")) == summary["computed_tokens"]
    assert sum(sum(row["blocks"].values()) for row in of("evict")) == summary["evictions"] > 0
    assert {row["id"]: row["output_tokens"] for row in of("finish")} == {o.id: len(o.output_tokens) for o in outputs}
    assert of("finish")[0]["finish_reason"] == "refused" and "fix:" in of("finish")[0]["error"]
    assert not any({"text", "prompt"} & set(row) for row in rows)


def test_a_file_that_is_there_is_added_to_also_behind_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "start"}\n{"event": "st')
    watchers = build_watchers(compose(["watch=event_log", f"watch.event_log.path={path}"]))
    watchers.kvframe_on_step(step=0, requests=1, tokens=1, seconds=float("nan"), stats=STATS)
    first, cut, start, step = path.read_text().splitlines()
    assert (first, cut) == ('{"event": "start"}', '{"event": "st') and json.loads(start)["event"] == "start"
    assert json.loads(step)["seconds"] is None and json.loads(step)["used"] == 250


def test_the_last_line_outlives_a_process_that_is_killed(tmp_path):
    code = f"""
import os, signal
from kvframe.config import build_watchers, compose
w = build_watchers(compose(["watch=event_log", "watch.event_log.path={tmp_path / "events.jsonl"}"]))
for step in range(50):
    w.kvframe_on_evict(step=step, blocks={{"full": 1}}, nbytes=1, reason="eviction")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode < 0
    assert lines(tmp_path / "events.jsonl")[-1]["step"] == 49


# -- Prometheus ----------------------------------------------------------------------------------------------


def test_prometheus_counts_what_the_engine_did():
    client = pytest.importorskip("prometheus_client")
    a, b = (engine_of(*SHORT, "watch=prometheus", f"watch.prometheus.engine=test-{name}") for name in "ab")
    requests = [*(ask(40, seed) for seed in (0, 1, 2, 3)), ask(40, 3), ask(100, 9)]
    a.generate(requests)
    hits = a.cache.hit_tokens
    a.generate(requests)
    b.generate(requests[:1])
    value = lambda name, engine="test-a", **more: client.REGISTRY.get_sample_value(
        f"kvframe_{name}", {"engine": engine, **more}
    )
    summary = a.summary()
    assert value("requests_total", reason="length") == 10 and value("requests_total", reason="refused") == 2
    assert value("requests_total", "test-b", reason="length") == 1
    assert value("hit_tokens_total") == hits + a.cache.hit_tokens > 0
    assert value("evicted_blocks_total", group="full") >= summary["evictions"] > 0
    assert value("output_tokens_total") == 2 * summary["output_tokens"] == 40
    assert value("prompt_tokens_total") == 400 and value("prompt_tokens_total", "test-b") == 40
    assert value("ttft_seconds_count") == value("itl_seconds_count") == 10
    assert value("step_seconds_count") == value("steps_total") > summary["steps"]
    assert value("cache_bytes", group="full", state="reserved") > 0 and value("step_requests") > 0


def test_prometheus_counts_preemptions():
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    from kvframe_plugins.prometheus import Prometheus

    watcher = Prometheus(engine="x", registry=registry)
    watcher.kvframe_on_finish(RequestOutput("r0", prompt_tokens=[1], finish_reason="stop", preemptions=3))
    assert registry.get_sample_value("kvframe_preemptions_total", {"engine": "x"}) == 3


def test_prometheus_serves_its_metrics_once_for_all_engines():
    client = pytest.importorskip("prometheus_client")
    from kvframe_plugins.prometheus import Prometheus

    registry = client.CollectorRegistry()
    one = Prometheus(port=0, engine="one", registry=registry)
    two = Prometheus(port=one.port, engine="two", registry=registry)
    for watcher in (one, two):
        watcher.kvframe_on_step(requests=2, tokens=5, seconds=0.5, stats=STATS)
    with urllib.request.urlopen(f"http://127.0.0.1:{one.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert len(re.findall(r'kvframe_computed_tokens_total{engine="(?:one|two)"} 5.0', text)) == 2
    assert 'kvframe_cache_bytes{engine="one",group="full",state="evictable"} 400.0' in text
    with pytest.raises(ConfigError, match=rf"watch.prometheus.port={one.port} cannot be had"):
        build_watchers(compose(["watch=prometheus", f"watch.prometheus.port={one.port}"]))
    with pytest.raises(ConfigError, match="watch.prometheus.port=70000"):
        build_watchers(compose(["watch=prometheus", "watch.prometheus.port=70000"]))


def test_without_the_package_the_fix_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(KVFrameError, match=r'pip install "kvframe\[prometheus\]"'):
        build_watchers(compose(["watch=prometheus"]))


# -- the command line ----------------------------------------------------------------------------------------


def test_watchers_are_chosen_and_swept_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny = ["model=random", "cache.num_blocks=8", "engine.max_len=64", "kernel=reference", "prompt=hi"]
    path = ["watch=event_log", "watch.event_log.path=run.jsonl"]
    assert main(["generate", "-m", *tiny, *path, "sampling.max_new_tokens=1,2"]) == 0
    assert len({row["run"] for row in lines("run.jsonl")}) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.jsonl"]
    capsys.readouterr()
    main(["generate", "watch=event_log", "--help"])
    text = capsys.readouterr().out
    assert re.search(r"watch +event_log\*, none, prometheus\n", text) and "watch.event_log.path=???" in text
