"""A walk that Hypothesis chooses, and makes shorter when something fails."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvframe.testing.walker import Caller

USE = ["grow", "grow", "grow", "release", "preempt", "fork", "truncate", "peek"]
SEEDS = st.integers(0, 1 << 16)


def walk_and_shrink(make: Callable[[int], Caller], examples: int = 25, calls: int = 30, extra: tuple[str, ...] = ()) -> int:
    """So many walks of at most so many calls; answers the calls that were made.

    Args:
        make: seed -> a walker over a cache that nobody uses.
        extra: calls of the walker beside the usual ones.
    """
    made = [0]

    class Machine(RuleBasedStateMachine):
        """The walker's calls. What a call does comes from a seed of its own: drawing each token by itself would make
        this ten times slower."""

        walker: Caller | None = None

        @initialize(seed=SEEDS)
        def start(self, seed):
            self.walker = make(seed)

        def move(self, name, seed):
            self.walker.random.seed(seed)
            self.walker.move(name)
            made[0] += 1

        @rule(seed=SEEDS)
        def admit(self, seed):
            self.move("admit", seed)

        @precondition(lambda self: self.walker.running)
        @rule(name=st.sampled_from(USE), seed=SEEDS)
        def use(self, name, seed):
            self.move(name, seed)

        @rule(name=st.sampled_from([*extra, "invalidate", "reset"]), seed=SEEDS)
        def disturb(self, name, seed):
            self.move(name, seed)

        def teardown(self):
            if self.walker is not None:
                self.walker.finish()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples, stateful_step_count=calls, deadline=None, derandomize=True, database=None,
            report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    return made[0]
