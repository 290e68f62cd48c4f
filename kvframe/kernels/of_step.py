"""What the layers of a step share, in the hands of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from kvframe.types import StepPlan


class OfStep:
    """What several layers need of a step, made for the first of them; of the last step only."""

    def __init__(self):
        self._plan: StepPlan | None = None
        self._made: dict[Hashable, Any] = {}

    def get(self, plan: StepPlan, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` answered when this key came first in the step."""
        if self._plan is not plan:
            self._plan, self._made = plan, {}
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
