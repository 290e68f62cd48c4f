"""What comes with a request beside its prompt, and the time that a cache goes by."""

from __future__ import annotations

import pytest
from test_engine import ask, engine, tokens

from kvframe.clock import make_clock
from kvframe.commands.prompts import read_requests
from kvframe.errors import ConfigError
from kvframe.types import Keep


def test_keep_is_read_from_a_prompts_file(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "keep": {"priority": 1, "pin": 60}}\n{"prompt": "b", "keep": {}}\n"c"\n')
    requests = read_requests(None, str(file), {}, False)
    assert [request.keep for request in requests] == [Keep(priority=1, pin=60.0), Keep(), Keep()]
    e = engine()
    e.add(requests[0])
    assert e.intake.living("r0", 0).keep == Keep(1, 60.0), "the cache sees it"


@pytest.mark.parametrize(
    "keep, message",
    {
        "3": r"keep=3 cannot be used\n  valid: {\"priority\": 1, \"pin\": 60}",
        "null": r"keep=null cannot be used",
        "[1]": r"keep=\[1\] cannot be used",
        '{"priorty": 1}': r"keep has no key 'priorty'\n  valid: priority, pin",
        '{"priority": 1.5}': r"keep.priority=1.5 cannot be used\n  valid: an integer",
        '{"pin": -1}': r"keep.pin=-1.0 cannot be used\n  valid: seconds >= 0",
        '{"pin": "1m"}': r"keep.pin='1m' cannot be used",
    }.items(),
)
def test_a_keep_that_cannot_be_used_is_named_with_its_line(tmp_path, keep, message):
    file = tmp_path / "p.jsonl"
    file.write_text(f'"fine"\n{{"prompt": "a", "keep": {keep}}}\n')
    with pytest.raises(ConfigError, match="p.jsonl, line 2: " + message):
        read_requests(None, str(file), {}, False)


@pytest.mark.parametrize("name", ["wall", "virtual"])
def test_elapsed_goes_on_over_runs(name):
    clock = make_clock(name)
    seen = [clock.elapsed()]
    for _ in range(3):
        clock.start()
        seen.append(clock.elapsed())
        assert clock.now() < 0.005
        clock.wait_until(0.01)
        clock.stepped()
        seen.append(clock.elapsed())
    assert seen == sorted(seen) and seen[-1] - seen[0] >= 0.03 and len(set(seen)) >= 4
    assert name == "wall" or seen[-1] == pytest.approx(0.06)


def test_the_cache_goes_by_the_time_of_the_engine():
    e = engine()
    seen = [e.cache.now()]
    for i in range(3):
        for _ in e.stream([ask(tokens(5, i))]):
            seen.append(e.cache.now())
    assert seen == sorted(seen) and seen[-1] == pytest.approx(3 * 6 * e.clock.STEP)
