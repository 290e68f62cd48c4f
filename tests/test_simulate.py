"""`kvframe simulate`: both modes against plain models of what a cache should find, and the command as people use it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvframe.cli import main
from kvframe.config import compose, groups
from kvframe.errors import ConfigError
from kvframe.simulation import Trace, read_trace, simulate
from kvframe.simulation.reference import window_in_ids

CONVERSATION = Path(__file__).parents[2] / "shared" / "data" / "mooncake_conversation_trace.jsonl"
SIZE = 32  # tokens per hash id in the traces that are made here


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def line(ids, *, at=0, inputs=None, outputs=5) -> dict:
    """A request of the file: `at` in ms; `inputs` tokens, all that the ids have if None."""
    inputs = len(ids) * SIZE if inputs is None else inputs
    return {"timestamp": at, "input_length": inputs, "output_length": outputs, "hash_ids": list(ids)}


def written(lines, path="t.jsonl") -> Trace:
    Path(path).write_text("".join(json.dumps(one) + "\n" for one in lines))
    return read_trace(path, SIZE)


def conversations(seed=0, users=40, requests=300, gap=50) -> list[dict]:
    """Users who come back with a longer prompt: it begins with the last one up to its last id, and all begin alike."""
    rng, fresh = np.random.default_rng(seed), iter(range(10**15, 10**16))  # ids that fit no int32
    prompts = {user: [7, 8] for user in range(users)}
    lines = []
    for i in range(requests):
        user = int(min(rng.geometric(0.1) - 1, users - 1))
        ids = prompts[user] = [
            *prompts[user][: max(2, len(prompts[user]) - 1)],
            *(next(fresh) for _ in range(rng.integers(1, 5))),
        ]
        if len(ids) > 20:
            prompts[user] = [7, 8]
        inputs = len(ids) * SIZE - int(rng.integers(0, SIZE))
        lines.append(line(ids, at=i * gap, inputs=inputs, outputs=int(rng.integers(1, 60))))
    return lines


def run(trace: Trace, *overrides: str) -> list[dict]:
    return simulate(compose(["trace=made", f"tokens_per_id={SIZE}", *overrides], "simulate"), trace)


# -- mode=reference ------------------------------------------------------------------------------------------


def plain_lru(trace: Trace, capacity: int) -> tuple[int, int, int]:
    """Hit ids, hit tokens, evictions of a cache of prefixes: who was used longest ago goes first, of one request's ids
    the last first."""
    used: dict[tuple, tuple[int, int]] = {}  # prefix -> (time of its last use, - its length)
    hits = tokens = evictions = 0
    for time, request in enumerate(trace.requests):
        ids = tuple(request.ids.tolist())
        if len(ids) > capacity:
            continue
        prefixes = [ids[:n] for n in range(1, len(ids) + 1)]
        found = next((n for n, prefix in enumerate(prefixes) if prefix not in used), len(ids))
        hits += found
        tokens += request.input_length if found == len(ids) else found * SIZE
        for prefix in prefixes[:found]:
            used[prefix] = (time, -len(prefix))
        while len(used) + len(ids) - found > capacity:
            del used[min((p for p in used if used[p][0] < time), key=used.get)]
            evictions += 1
        for prefix in prefixes[found:]:
            used[prefix] = (time, -len(prefix))
    return hits, tokens, evictions


@pytest.mark.parametrize("seed", range(3))
def test_reference_finds_what_a_plain_model_finds(seed):
    trace = written(conversations(seed))
    capacities = [25, 40, 100, 300, 10_000]
    rows = run(trace, f"capacities={capacities}")
    for row, capacity in zip(rows, capacities, strict=True):
        hits, tokens, evictions = plain_lru(trace, capacity)
        assert (row["hit_blocks"], row["hit_tokens"], row["evictions"]) == (hits, tokens, evictions), capacity
        assert row["hit_rate_blocks"] == hits / trace.ids and row["hit_rate_tokens"] == tokens / trace.input_tokens
        assert row["num_blocks"] == capacity >= row["peak_blocks"] >= row["peak_live_blocks"]
        assert row["requests"] == 300 and row["preemptions"] == row["refused"] == 0
    assert 0 < rows[0]["hit_blocks"] < rows[2]["hit_blocks"] < rows[-1]["hit_blocks"]


def test_an_unbounded_cache_finds_every_prefix_that_was_there():
    trace = written(conversations())
    seen, hits = set(), 0
    for request in trace.requests:
        prefixes = {tuple(request.ids[:n].tolist()) for n in range(1, len(request.ids) + 1)}
        hits += len(prefixes & seen)
        seen |= prefixes
    (row,) = run(trace)
    assert row["num_blocks"] is None and row["evictions"] == 0 and row["peak_blocks"] == len(seen)
    assert row["hit_blocks"] == hits and row["hit_rate_blocks"] == row["ideal_hit_rate_blocks"] == hits / trace.ids
    assert row["hit_rate_tokens"] == row["ideal_hit_rate_tokens"]


def test_a_repeated_prompt_is_a_hit_of_all_its_tokens():
    trace = written([line([1, 2, 3], inputs=70), line([1, 2, 3], inputs=70), line([1, 2], inputs=40)])
    (row,) = run(trace)
    assert (row["hit_blocks"], row["hit_tokens"]) == (5, 110) and row["input_blocks"] == 8


def test_requests_that_are_larger_than_the_cache_are_counted():
    trace = written([line(range(5)), line(range(3)), line(range(5))])
    (row,) = run(trace, "capacities=[4]")
    assert row["refused"] == 2 and row["requests"] == 3 and row["hit_blocks"] == 0 and row["input_blocks"] == 13


def test_the_config_chooses_the_cache_and_not_its_blocks():
    trace = written(conversations(requests=50))
    small, large = (run(trace, "cache.layout.block_size=" + size)[0] for size in ("4", "64"))
    for name in ("seconds", "requests_per_s"):
        small.pop(name), large.pop(name)
    assert small == large
    assert run(trace, "cache/index=none")[0]["hit_blocks"] == 0
    with pytest.raises(ConfigError, match="not made of parts\n  fix: mode=engine"):
        run(trace, "~cache.layout")


@pytest.mark.parametrize("window", (1, 2, 31, 32, 33, 34, 64, 65, 66, 200))
def test_a_window_of_tokens_in_ids(window):
    first = 10 * SIZE  # the first token of id 10
    sees = {position // SIZE for position in range(first - window + 1, first + 1)}
    assert window_in_ids(window, SIZE) == len(sees) and window_in_ids(None, SIZE) is None


def test_layer_groups_are_told_apart():
    trace = written(conversations())
    (both,) = run(trace, "windows=[null,64]", "capacities=[100]")
    assert both["groups"].keys() == {"full", "window3"}
    assert all(g["peak_blocks"] <= g["num_blocks"] for g in both["groups"].values())
    assert both["peak_blocks"] == both["groups"]["full"]["peak_blocks"]
    (free,) = run(trace, "windows=[null,64]")
    assert free["hit_rate_blocks"] == free["ideal_hit_rate_blocks"] and free["evictions"] == 0
    (window,) = run(trace, "windows=[64]", "capacities=[60]")
    (full,) = run(trace, "capacities=[60]")
    assert window["refused"] == 0 and window["hit_blocks"] > full["hit_blocks"], "only the last blocks are needed"


# -- mode=engine ---------------------------------------------------------------------------------------------

ENGINE = ["mode=engine", "engine.max_step_tokens=128", "cache.layout.block_size=16"]


def expected_hits(trace: Trace, size: int) -> tuple[int, int]:
    """Hit tokens and hit blocks with one request after another and a cache that is never full: all that an earlier
    request has in complete blocks, but for the last token."""
    earlier, tokens, blocks = [], 0, 0
    for request in trace.requests:
        most = 0
        for other in earlier:
            ids = next((i for i, (a, b) in enumerate(zip(request.ids, other.ids)) if a != b), None)
            shared = ids * SIZE if ids is not None else min(len(request.ids), len(other.ids)) * SIZE
            stored = (other.input_length + other.output_length - 1) // size * size
            most = max(most, min(shared, stored, other.input_length, request.input_length - 1))
        earlier.append(request)
        tokens, blocks = tokens + most, blocks + most // size
    return tokens, blocks


@pytest.mark.parametrize("size", (1, 16, 24))
def test_engine_finds_what_earlier_requests_left(size):
    trace = written(conversations(requests=80, gap=100_000))
    (row,) = run(trace, *ENGINE, f"cache.layout.block_size={size}")
    assert (row["hit_tokens"], row["hit_blocks"]) == expected_hits(trace, size) and row["hit_tokens"] > 0
    assert row["input_blocks"] == sum(-(-r.input_length // size) for r in trace.requests)
    assert row["output_tokens"] == trace.output_tokens and row["refused"] == row["preemptions"] == 0


@pytest.mark.parametrize("windows", ("[null]", "[null,64]", "[64]"))
@pytest.mark.parametrize("policy", ("fcfs", "prefix"))
def test_engine_serves_every_request_and_the_books_balance(policy, windows):
    trace = written(conversations(requests=100, gap=1))
    overrides = [*ENGINE, f"engine.policy={policy}", f"windows={windows}"]
    rows = run(trace, *overrides, "engine.max_requests=16", "capacities=[60,null]")  # ends in cache.check()
    for row in rows:
        assert row["refused"] == row["cut"] == 0 and row["output_tokens"] == trace.output_tokens
        lost = row["preemptions"] > 0  # is computed again
        needs = trace.input_tokens - row["hit_tokens"] + trace.output_tokens - len(trace.requests)
        assert row["computed_tokens"] == needs or lost
        assert row["peak_live_blocks"] <= row["peak_blocks"]
        assert row["num_blocks"] is None or row["peak_blocks"] <= row["num_blocks"]
    assert rows[-1]["evictions"] == rows[-1]["preemptions"] == 0
    assert rows[0]["preemptions"] > 0 or windows == "[64]"


def test_requests_that_run_hold_what_the_cache_could_have_kept():
    trace = written(conversations(gap=1))
    for capacity in (80, 100):
        options = [*ENGINE, f"capacities=[{capacity}]"]
        (alone,), (many,) = (run(trace, *options, f"engine.max_requests={n}") for n in (1, 16))
        assert 0 < many["hit_tokens"] < alone["hit_tokens"]
        assert many["peak_live_blocks"] > alone["peak_live_blocks"] and many["simulated_s"] < alone["simulated_s"]


def test_simulated_time_is_that_of_the_steps():
    trace = written([line(range(10), inputs=300, outputs=3)])
    (row,) = run(trace, *ENGINE, "step_s=0.5", "token_s=0.001")
    assert row["steps"] == 3 + 2, (
        "chunks of 128, 128 and 44 tokens, whose last one gives a token; two steps for two more"
    )
    assert row["simulated_s"] == pytest.approx(5 * 0.5 + 302 * 0.001)
    assert row["ttft_s_p50"] == pytest.approx(3 * 0.5 + 0.3)


def test_arrivals_are_respected():
    trace = written(
        [line([1, 2], at=0, outputs=2), line([1, 2], at=60_000, outputs=2), line([3], at=60_000, outputs=1)]
    )
    (row,) = run(trace, *ENGINE, "step_s=1", "token_s=0")
    assert row["simulated_s"] == 62 and row["ttft_s_p99"] == 1 and row["hit_tokens"] == 63
    (row,) = run(trace, *ENGINE, "step_s=1", "token_s=0", "engine.max_requests=1")
    assert row["simulated_s"] == 63, "the third waits for the second"


def test_a_prefix_that_is_being_computed_is_waited_for():
    trace = written([line(range(20), outputs=2), line(range(20), outputs=2)])
    (row,) = run(trace, *ENGINE)
    assert row["hit_tokens"] >= 18 * SIZE


def test_what_cannot_fit_is_refused_or_cut():
    trace = written([line(range(20)), line([1], outputs=500), line([2])])
    (row,) = run(trace, *ENGINE, "capacities=[8]")
    assert (row["refused"], row["cut"], row["requests"]) == (1, 1, 3)
    assert row["output_tokens"] == (8 * 16 + 1 - SIZE) + 5
    (row,) = run(trace, *ENGINE, "engine.max_len=100")
    assert (row["refused"], row["cut"]) == (1, 1) and row["output_tokens"] == 100 - SIZE + 5


def test_any_layout_can_be_simulated():
    trace = written(conversations(requests=40))
    rows = run(trace, "mode=engine", "cache=contiguous", "capacities=[3,null]")
    assert [row["block_size"] for row in rows] == [trace.longest] * 2
    assert rows[0]["peak_live_blocks"] <= 3 and all(row["output_tokens"] == trace.output_tokens for row in rows)


# -- Python --------------------------------------------------------------------------------------------------


def test_progress_is_told_of_every_request():
    seen = []

    @contextmanager
    def progress(title, total):
        seen.append([title, total, 0])

        def advance(n):
            seen[-1][2] += n

        yield advance

    trace = written([line(range(20)), *conversations(requests=30)])
    for mode in ("reference", "engine"):
        overrides = ["trace=made", f"tokens_per_id={SIZE}", f"mode={mode}", "capacities=[25,null]"]
        simulate(compose(overrides, "simulate"), trace, progress=progress)
    assert seen == [["25 blocks", 31, 31], ["unbounded", 31, 31]] * 2


def test_rows_name_the_parts_as_the_config_does():
    trace = written([line([1])])
    (row,) = run(trace, "capacities=[2]")
    assert (row["layout"], row["index"], row["eviction"], row["mode"]) == ("paged", "radix", "lru", "reference")


def test_without_capacities_the_config_says_how_many_blocks():
    assert run(written([line([1])]), "cache.num_blocks=3")[0]["num_blocks"] == 3


def test_a_trace_is_read_in_order_of_arrival():
    lines = [line([9, 5], at=20), line([5], at=10), line([9], at=20, outputs=0)]
    trace = written(lines)
    assert [r.arrival for r in trace.requests] == [0.01, 0.02, 0.02] and trace.distinct == 2
    assert [r.ids.tolist() for r in trace.requests] == [[1], [0, 1], [0]]
    assert len(read_trace("t.jsonl", SIZE, first=2).requests) == 2
    (row,) = run(trace, *ENGINE)
    assert row["output_tokens"] == 5 + 5 + 1, "an input that is computed gives a token"


# -- the command ---------------------------------------------------------------------------------------------


def test_the_command_writes_rows_config_and_versions(here, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    written(conversations(requests=60))
    arguments = ["simulate", "trace=t.jsonl", f"tokens_per_id={SIZE}", "cache=radix", "cache/eviction=lru"]
    assert main([*arguments, "capacities=[30,100,null]", "out=sim.json", "plot=p/sim.png"]) == 0
    found = json.loads(Path("sim.json").read_text())
    wanted = {"num_blocks", "eviction", "mode", "requests", "hit_rate_blocks", "hit_rate_tokens", "evictions"}
    assert all(wanted | {"peak_blocks", "seconds"} <= set(row) for row in found["rows"])
    assert [row["num_blocks"] for row in found["rows"]] == [30, 100, None] and found["rows"][0]["eviction"] == "lru"
    assert found["config"]["cache"]["layout"]["block_size"] is None and "kvframe" in found["versions"]
    assert Path("p/sim.png").read_bytes().startswith(b"\x89PNG")
    out, err = capsys.readouterr()
    assert "unbounded" in out and "hit blocks" in out and "written: sim.json" in err
    assert main([*arguments, "capacities=[30]", "windows=[null,64]", "out=sim.csv", "mode=engine"]) == 0
    (row,) = csv.DictReader(Path("sim.csv").read_text().splitlines())
    assert row["num_blocks"] == "30" and row["mode"] == "engine" and "full.peak_blocks" in row


def test_refused_requests_are_told(here, capsys):
    written([line(range(9)), line([1])])
    assert main(["simulate", "trace=t.jsonl", f"tokens_per_id={SIZE}", "capacities=[4]"]) == 1
    assert "1 of 2 requests are larger than 4 blocks" in capsys.readouterr().err


def test_a_sweep_over_block_sizes(here):
    written(conversations(requests=20))
    sweep = ["-m", "cache.layout.block_size=8,32", "hydra.sweep.dir=s", "out=sim.csv", "plot=sim.svg"]
    assert main(["simulate", "trace=t.jsonl", f"tokens_per_id={SIZE}", "mode=engine", *sweep]) == 0
    jobs = json.loads(Path("s/sweep.json").read_text())["jobs"]
    assert [job["out"] for job in jobs] == ["0/sim.csv", "1/sim.csv"] and Path("s/1/sim.svg").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "trace must be given\n  fix: trace=FILE.jsonl"),
        (["trace=no.jsonl"], "trace=no.jsonl cannot be read: No such file"),
        (["trace=t.jsonl", "mode=fast"], "mode=fast does not exist\n  valid: "),
        (["trace=t.jsonl", "capacities=[100,0]"], "capacities=[100, 0] cannot be used"),
        (["trace=t.jsonl", "capacities=[]"], "fix: capacities=[1000,10000,null]"),
        (["trace=t.jsonl", "capacities=many"], "capacities=['many'] cannot be used"),
        (["trace=t.jsonl", "windows=[0]"], "windows=[0] cannot be used"),
        (["trace=t.jsonl", "requests=0"], "requests=0 cannot be used"),
        (["trace=t.jsonl", "requests=1.5"], "requests=1.5 cannot be used"),
        (["trace=t.jsonl", "tokens_per_id=x"], "tokens_per_id='x' cannot be used"),
        (["trace=t.jsonl", "step_s=-1"], "step_s=-1 cannot be used\n  valid: seconds >= 0"),
        (["trace=t.jsonl", "engine.max_requests=0", "mode=engine"], "engine.max_requests=0 cannot be used"),
        (["trace=t.jsonl", "engine.policy=best", "mode=engine"], "engine.policy='best' does not exist"),
        (["trace=t.jsonl", "cache/eviction=lruu"], "cache/eviction=lruu does not exist"),
        (["trace=t.jsonl", "out=x.txt"], "out=x.txt has the ending '.txt'\n  valid: .json, .csv"),
        (["trace=t.jsonl", "plot=x.bmp"], "valid: .png, .svg, .pdf"),
        (["trace=t.jsonl", "plot=t.jsonl/x.png"], "plot=t.jsonl/x.png cannot be written"),
        (["-m", "trace=t.jsonl", "mode=engine,reference", "plot=/tmp/x.png"], "fix: plot=x.png hydra.sweep.dir=/tmp"),
        (["trace=t.jsonl", "model=smollm2"], "model"),
    ],
)
def test_mistakes_are_told(arguments, message, capsys, here):
    written([line([1])])
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert [path.name for path in here.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"timestamp": 0', "t.jsonl, line 3 is not JSON: "),
        ("[1]", "line 3: a request is an object, not [1]"),
        ({"hash_ids": None}, "line 3: hash_ids=null cannot be used\n  valid: a list of integers"),
        ({"hash_ids": [1.5]}, "hash_ids=[1.5] cannot be used"),
        ({"timestamp": -1}, "timestamp=-1 cannot be used\n  valid: milliseconds >= 0"),
        ({"input_length": 0}, "input_length=0 cannot be used"),
        ({"output_length": "5"}, 'output_length="5" cannot be used'),
        ({"input_length": 33}, "1 hash_ids of tokens_per_id=32 tokens are not the 33 tokens"),
    ],
)
def test_a_bad_line_is_named(text, message):
    text = text if isinstance(text, str) else json.dumps(line([1]) | text)
    Path("t.jsonl").write_text(json.dumps(line([1])) + "\n\n" + text + "\n")
    with pytest.raises(ConfigError) as error:
        read_trace("t.jsonl", SIZE)
    assert message in str(error.value)


def test_a_missing_key_and_an_empty_file_are_named():
    Path("t.jsonl").write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n')
    with pytest.raises(ConfigError, match="no key 'hash_ids'"):
        read_trace("t.jsonl", SIZE)
    Path("t.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no requests"):
        read_trace("t.jsonl", SIZE)


def test_a_plot_without_matplotlib_says_how_to_get_it(monkeypatch, capsys):
    written([line([1])])
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["simulate", "trace=t.jsonl", f"tokens_per_id={SIZE}", "plot=x.png"]) == 2
    assert 'fix: pip install "kvframe[plots]"' in capsys.readouterr().err


def test_simulating_imports_no_torch(here):
    written(conversations(requests=10))
    arguments = ["simulate", "trace=t.jsonl", f"tokens_per_id={SIZE}", "capacities=[20]", "out=sim.json", "plot=p.svg"]
    code = "import sys; from kvframe.cli import main\n"
    code += "".join(f"assert main({[*arguments, 'mode=' + mode]}) == 0\n" for mode in ("reference", "engine"))
    code += "assert not {'torch', 'transformers', 'kvframe.engine'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- the conversation trace of Mooncake ----------------------------------------------------------------------

LRU = ((1000, 0.0445), (30_000, 0.3257), (50_000, 0.3546))
LFU = ((1000, 0.0774), (3000, 0.1164), (10_000, 0.1873))
KNOWN = [("lru", 10_000, 0.2116)]
KNOWN += [pytest.param("lru", *known, marks=pytest.mark.nightly) for known in LRU]
KNOWN += [pytest.param("lfu", *known, marks=pytest.mark.nightly) for known in LFU]


@pytest.mark.skipif(not CONVERSATION.exists(), reason="the trace is not here")
@pytest.mark.parametrize("eviction, capacity, rate", KNOWN)
def test_the_conversation_trace(eviction, capacity, rate):
    if eviction not in groups()["cache/eviction"]:
        pytest.skip(f"cache/eviction={eviction} is not installed")
    overrides = [f"trace={CONVERSATION}", f"cache/eviction={eviction}", f"capacities=[{capacity}]"]
    (row,) = simulate(compose(overrides, "simulate"))
    assert row["requests"] == 12_031 and row["input_blocks"] == 288_500 and row["refused"] == 0
    assert row["hit_rate_blocks"] == pytest.approx(rate, abs=0.002)
    assert row["ideal_hit_rate_blocks"] == pytest.approx(0.3664, abs=1e-4)
    assert row["seconds"] < 60


@pytest.mark.nightly
@pytest.mark.skipif(not CONVERSATION.exists(), reason="the trace is not here")
def test_the_conversation_trace_through_the_engine():
    overrides = [f"trace={CONVERSATION}", "mode=engine", "requests=1000", "capacities=[20000,null]"]
    small, ideal = simulate(compose(overrides, "simulate"))
    assert small["refused"] == 0 and 0 < small["hit_rate_tokens"] < ideal["hit_rate_tokens"]
    assert ideal["hit_rate_tokens"] == pytest.approx(ideal["ideal_hit_rate_tokens"], abs=0.005)
