"""A request as a cache sees it, and what may look on while a cache is walked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(eq=False)
class Walked:
    """A request. `computed` of its tokens are stored; `version` counts changes of the weights."""

    id: str
    tokens: np.ndarray
    salt: str = ""
    keep: object = None
    computed: int = 0
    version: int = 0


class Watcher:
    """Looks at a walk (see kvframe.testing.walker). This one sees nothing.

    Attributes:
        version: of the weights; rises with `invalidate`, and what was stored before is worth nothing to new requests.
    """

    version = 0

    def before(self) -> None:
        """A plan is about to be made."""

    def run(self, plan, batch) -> None:
        """A plan was made for `batch`, pairs of a request and its number of new tokens; nothing is committed yet."""

    def verify(self, request: Walked) -> None:
        """The request runs, between two steps."""

    def clear(self) -> None:
        """The cache was reset."""
