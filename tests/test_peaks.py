"""The most bytes that requests held at one moment: of all layer groups together, with tails."""

from __future__ import annotations

import numpy as np
from test_cache import control
from test_engine import ask, tokens
from test_evaluate import run
from test_sealing_engine import INT4, engine

from kvframe.hf import random_model
from kvframe.meter import Meter, Peak
from kvframe.testing.walked import Walked
from kvframe.types import CacheStats, GroupStats


def held(cache):
    """Blocks and tails now, from the tables alone."""
    requests = list(cache.tables.all())
    used = sum(len({int(b) for held in requests for b in cache.tables.view(held, g) if b}) * cache.block_bytes[g]
        for g in range(len(cache.pools)))  # fmt: skip
    return used + len(requests) * sum(cache.tail_bytes)


def step(cache, *batch):
    """Answers what was held when the step had taken all it needs."""
    for request, n in batch:
        assert cache.grow(request, n)
    cache.plan(batch)
    most = held(cache)
    for request, n in batch:
        cache.commit(request, n)
        request.computed += n
    return most


def test_groups_that_peak_at_different_moments_do_not_add_up():
    """Two prompts at once fill the window's group; one long request alone fills the group of full attention."""
    cache = control(["cache=paged", "cache.layout.block_size=4", "cache.num_blocks=60"], max_step_tokens=64)
    a, b, c = (Walked(name, np.full(96, i, np.int32)) for i, name in enumerate("abc"))
    seen = []
    for request in (a, b):
        cache.admit(request)
    seen.append(step(cache, (a, 32), (b, 32)))
    for request in (a, b):
        cache.release(request)
    cache.admit(c)
    seen += [step(cache, (c, 8)) for _ in range(12)]
    stats = cache.stats()
    assert stats.peak == max(seen) and stats.peak_tail == 0
    assert stats.peak < stats.total("peak"), "the sum of two peaks was never there"
    assert stats.peak > stats.total("reserved"), "what the last steps gave back was there"
    cache.start_run()
    assert cache.stats().peak == held(cache), "a new run begins with what is held"
    cache.reset()
    assert cache.stats().peak == 0


def test_tails_count_and_forks_have_their_own():
    cache = control(["cache=paged", *INT4, "cache.layout.block_size=8", "cache.num_blocks=30"], windows=(None,))
    a, b = (Walked(name, np.zeros(40, np.int32)) for name in "ab")
    cache.admit(a)
    step(cache, (a, 10))
    tail, block = cache.tail_bytes[0], cache.block_bytes[0]
    assert tail > 0 and (cache.stats().peak, cache.stats().peak_tail) == (2 * block + tail, tail)
    cache.fork(a, b)
    assert (cache.stats().peak, cache.stats().peak_tail) == (2 * block + 2 * tail, 2 * tail)
    cache.release(b)
    for _ in range(3):
        step(cache, (a, 10))
    assert (cache.stats().peak, cache.stats().peak_tail) == (5 * block + tail, tail) == (held(cache), tail)


def test_a_run_and_an_evaluation_report_it():
    e = engine(index="none")
    e.generate([ask(tokens(20, i), id=f"q{i}", max_new_tokens=5) for i in range(3)])
    summary, tail, block = e.summary(), e.cache.tail_bytes[0], e.cache.block_bytes[0]
    assert summary["tail_bytes_peak"] == 3 * tail > 0
    assert summary["kv_bytes_peak"] == 3 * (tail + 3 * block)  # 24 tokens each are in the cache, in blocks of 8
    model = random_model("tiny", "float32")
    exact, lossy = run(model, "[paged,'cache=paged cache/codec=int4 cache.layout.block_size=32']", "texts=2").rows
    tail = 2 * 32 * sum((la.k_dim + la.v_dim) * la.kv_heads for la in model.layers) * 4
    assert (exact["kv_bytes_peak"], exact["tail_bytes_peak"]) == (2 * 48 * exact["bytes_per_token"], 0)
    assert lossy["tail_bytes_peak"] == tail
    assert lossy["kv_bytes_peak"] == tail + 2 * 64 * lossy["bytes_per_token"]


def group(reserved, tail, peak=0):
    return GroupStats("g", 1, 16, 9, 10, reserved, 0, 0, tail, peak)


def test_of_a_cache_that_does_not_count_the_moments_that_were_looked_at_are_known():
    meter = Meter()
    for full, window, tail in ((10, 50, 4), (40, 10, 4), (40, 30, 8), (20, 0, 2)):
        meter.step(1.0, 1, CacheStats((group(full, tail, 99), group(window, 0, 99))))
    summary = meter.summary(CacheStats((group(0, 0, 99), group(0, 0, 99))))
    assert (summary["kv_bytes_peak"], summary["tail_bytes_peak"]) == (78, 8)
    peak = Peak()
    peak.look(CacheStats((group(10, 5),), peak=20, peak_tail=3))
    assert (peak.total, peak.tail) == (20, 3), "a cache that counts knows better"


def test_a_meter_forgets_the_run_before():
    meter = Meter()
    meter.step(1.0, 1, CacheStats((group(70, 0),)))
    meter.start()
    assert meter.summary(CacheStats((group(1, 1),)))["kv_bytes_peak"] == 2
