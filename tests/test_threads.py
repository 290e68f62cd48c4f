"""Threads give way to other processes, and to nobody else."""

from __future__ import annotations

import pytest
import torch

from kvframe import threads


@pytest.fixture
def watched(monkeypatch):
    """A machine of two cores whose clocks the test sets: (wall, busy, own) seconds."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads.psutil, "cpu_count", lambda: 2)
    clock = [0.0, 0.0, 0.0]
    monkeypatch.setattr(threads.Threads, "_read", lambda self: tuple(clock))
    monkeypatch.setattr(threads.time, "perf_counter", lambda: clock[0])
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)

    def after(wall, busy, own):
        clock[0] += wall
        clock[1] += busy
        clock[2] += own

    return after, used


def test_a_busy_neighbour_costs_one_thread_and_gets_it_back(watched):
    after, used = watched
    pace = threads.Threads(adapt=True)
    after(1.0, 2.0, 2.0)  # two cores busy, both ours
    assert pace.look() == 2
    after(1.0, 2.0, 1.0)  # one of them is somebody else's
    assert pace.look() == 1
    with pace.step():
        assert used == [1]
    assert used == [1, 2], "the setting comes back after the step"
    after(0.1, 0.2, 0.0)
    assert pace.look() == 1, "too early to look again"
    after(1.0, 1.1, 1.0)
    assert pace.look() == 2


def test_a_full_machine_leaves_one_thread(watched):
    after, _ = watched
    pace = threads.Threads(adapt=True)
    after(1.0, 2.0, 0.0)
    assert pace.look() == 1


def test_without_adapting_nothing_changes(watched):
    after, used = watched
    pace = threads.Threads(adapt=False)
    after(1.0, 2.0, 0.0)
    with pace.step():
        pass
    assert pace.look() == 2 and used == []


def test_the_real_counters_can_be_read():
    wall, busy, own = threads.Threads(adapt=True)._read()
    assert wall > 0 and busy > 0 and own > 0
