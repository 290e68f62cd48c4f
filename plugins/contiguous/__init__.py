"""Contiguous: every request reserves one run of `max_len` slots when it starts.

The simplest layout and the most wasteful one: a request of 100 tokens holds as much as the longest one could.
As a block of `max_len` slots it shares all code with `paged`. Dead slots are masked, their memory returns only
when the request ends.
"""

from __future__ import annotations

from kvframe.interfaces import Layout


class Contiguous(Layout):
    """One block per request."""

    def block_size(self, max_len: int, unit: int = 1) -> int:
        return max_len
