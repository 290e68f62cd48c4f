"""Paged: a request takes small blocks as it grows, and gives dead ones back at once.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023 (arXiv:2309.06180). Waste is at most `block_size - 1` slots per request and layer group.
"""

from __future__ import annotations

from kvframe.errors import ConfigError
from kvframe.interfaces import Layout


class Paged(Layout):
    """Blocks of `block_size` slots."""

    def __init__(self, block_size: int = 16):
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ConfigError(
                f"cache.layout.block_size={block_size!r} cannot be used",
                options=["an integer >= 1"],
                fix="cache.layout.block_size=16",
            )
        self.size = block_size

    def block_size(self, max_len: int) -> int:
        return self.size
