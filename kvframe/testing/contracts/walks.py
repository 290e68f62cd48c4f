"""Random walks over a cache, small ones first; when one breaks a promise, fewer calls are looked for that do.

A walk is a script of (call, seed): what a call does is drawn from its own seed, so that it can stay when others go.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kvframe.testing.caller import Caller
from kvframe.testing.contracts.promises import LINES, BrokenPromise, example

Script = list[tuple[str, int]]
SMALL, LONG = 24, 96  # tokens of the longest request in small walks, and in others
MOST = 4000  # calls that may be made to shorten a script


def walks(
    make: Callable[[int], Caller], small: int, small_steps: int, steps: int, often: tuple[str, ...] = (), rarely=0.02
) -> Caller:
    """`small` walks of up to `small_steps` calls with short requests, then one of `steps` calls; answers the last one.

    Args:
        make: longest request -> a walker over a cache that nobody has used.
        often: calls that are drawn more often. rarely: how often everything is reset or invalidated.
    """
    for seed in range(small):
        _walk(lambda: make(SMALL), seed, small_steps * (seed + 1) // small, often, rarely)
    return _walk(lambda: make(LONG), small, steps, often, rarely)


def _walk(make: Callable[[], Caller], seed: int, steps: int, often: tuple[str, ...], rarely: float) -> Caller:
    walker, draw = make(), random.Random(seed)
    usual = walker.MOVES + often

    def script(n: int) -> Script:
        return [
            (draw.choice(walker.RARE if draw.random() < rarely else usual), draw.randrange(1 << 30)) for _ in range(n)
        ]

    error, made = _broken(walker, script(steps))
    if error is not None:
        raise _shortest(make, made, error, script) from error
    return walker


def _broken(walker: Caller, script: Script) -> tuple[BrokenPromise | None, Script]:
    """Makes the calls, and releases what still runs. Answers what promise was broken, and the calls that were made."""
    made: Script = []
    try:
        with example(longest_request=walker.longest):
            for call, seed in script:
                made.append((call, seed))
                walker.random.seed(seed)
                walker.move(call)
            walker.finish()
    except BrokenPromise as error:
        return error, made
    return None, made


def _shortest(make, script: Script, error: BrokenPromise, other: Callable[[int], Script]) -> BrokenPromise:
    """The same promise broken by as few calls as are found. `other` draws a script of so many calls."""
    played = 0

    def tried(shorter: Script) -> bool:
        nonlocal played, script, error
        walker = make()
        found, made = _broken(walker, shorter)
        played += len(made)
        if found is None or found.promise != error.promise:
            return False
        script, error = made, found
        return True

    for n in range(4, min(len(script), LINES)):  # calls depend on those before, so another short script is easier found
        if played > MOST // 2 or any(tried(other(n)) for _ in range(16)):
            break
    size = len(script) // 2
    while size:
        before, at = len(script), 0
        while at < len(script) and played < MOST:
            at += 0 if tried(script[:at] + script[at + size :]) else size
        if size > 1 or len(script) == before:
            size //= 2
    return error
