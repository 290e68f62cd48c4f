"""Paged: a request takes small blocks as it grows, and gives dead ones back at once.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023 (arXiv:2309.06180). Waste is at most `block_size - 1` slots per request and layer group.
"""

from __future__ import annotations

import math

from kvframe.errors import OptionError
from kvframe.interfaces import Layout

USUAL = 16


class Paged(Layout):
    """Blocks of `block_size` slots; None: of 16, or the smallest multiple of 16 that holds whole groups of the codec.

    Raises: OptionError for a size that cannot be.
    """

    def __init__(self, block_size: int | None = None):
        whole = isinstance(block_size, int) and not isinstance(block_size, bool) and block_size >= 1
        if block_size is not None and not whole:
            raise OptionError("block_size", block_size, options=["null", "an integer >= 1"], fix="{name}=null")
        self.size = block_size

    def block_size(self, max_len: int, unit: int = 1) -> int:
        return math.lcm(USUAL, unit) if self.size is None else self.size
