"""One request alone, token by token: the bytes that it holds.

    paged        ▁▂▂▂▃▃▃▄▄▄    blocks are taken one by one: reserved is a staircase over what is used
    contiguous   ▇▇▇▇▇▇▇▇▇▇    all of it from the beginning
    a window     ▁▂▃▄▄▄▄▄▄▄    from its size on dead blocks go back

The cache is the real one, with its tensors; the model is not asked, since what a request holds depends on how many
tokens it has and not on what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvframe.evaluation.teacher import Text

POINTS = 2048  # of a line; the default has fewer
CHUNK = 64  # tokens of the prompt in one step


def stops(prompt: int, output: int, chunk: int = CHUNK) -> list[int]:
    """How many tokens there are after each step: the prompt in chunks, the output one by one."""
    return [*range(chunk, prompt, chunk), *range(prompt, prompt + output + 1)]


def follow(cache: Any, stops: Sequence[int]) -> dict[str, list[int]]:
    """Columns tokens, reserved, used and tail (bytes) of a request that grows to each of `stops` tokens; fewer where
    there is no room."""
    request = Text(np.arange(stops[-1] + 1, dtype=np.int32), salt="timeline")
    points: list[tuple[int, int, int, int]] = []
    if cache.admit(request) is None:
        return columns(points)
    try:
        for stop in stops:
            n = stop - request.computed
            if not cache.grow(request, n):
                break
            cache.plan([(request, n)])
            cache.commit(request, n)
            request.computed = stop
            stats = cache.stats()
            points.append((stop, stats.total("reserved"), stats.total("used"), stats.total("tail")))
    finally:
        cache.release(request)
    return columns(thin(points))


def columns(points: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    names = ("tokens", "reserved", "used", "tail")
    return {name: [int(point[i]) for point in points] for i, name in enumerate(names)}


def thin(points: Sequence[tuple[int, int, int, int]], most: int = POINTS) -> list[tuple[int, int, int, int]]:
    """At most `most` of the points: both sides of every jump of `reserved` as far as they fit, and the others evenly.

    reserved 1 1 1 1 2 2 2 2 3      the last 1, the first and last 2, the first 3, and the ends
    """
    if len(points) <= most:
        return list(points)
    jumps = [i for i in range(1, len(points)) if points[i][1] != points[i - 1][1]]
    kept = {0, len(points) - 1, *jumps, *(i - 1 for i in jumps)}
    if len(kept) > most:
        kept = {0, len(points) - 1}
    rest = [i for i in range(len(points)) if i not in kept]
    kept |= set(evenly(rest, most - len(kept)))
    return [points[i] for i in sorted(kept)]


def evenly(items: Sequence[Any], most: int = POINTS) -> list[Any]:
    """At most `most` of the items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, most).astype(int)]
