"""The watching hooks of one engine: those of every plugin, and of the watchers that its config names.

    watchers = Watchers(plugins().manager, {"log": EventLog("run.jsonl")})
    watchers.kvframe_on_step(step=0, requests=1, tokens=5, seconds=0.1, stats=stats)

Each is called on its own: one that fails is logged, and neither stops the engine nor keeps the others from being
called.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pluggy

from kvframe import hookspecs
from kvframe.errors import PluginError
from kvframe.hookcheck import check_hooks

log = logging.getLogger(__name__)


class Watchers:
    """Calls hooks by name, like pluggy's `manager.hook`; what they answer is nobody's business.

    Args:
        manager: who watches every engine of the process.
        own: name -> an object with hooks as methods, which watches this engine only.

    Raises:
        PluginError: one of `own` has no watching hook, or one that cannot be called.
    """

    def __init__(self, manager: pluggy.PluginManager, own: Mapping[str, Any] = MappingProxyType({})):
        self.own = pluggy.PluginManager(hookspecs.PROJECT)
        self.own.add_hookspecs(hookspecs)
        self._managers = (manager, self.own)
        self._failed: set[tuple[str, str]] = set()
        for name, watcher in own.items():
            try:
                if not check_hooks(watcher):
                    raise PluginError("it has no hook; see kvframe.hookspecs")
            except PluginError as error:
                kind = type(watcher).__qualname__
                raise PluginError(f"the watcher {name} ({kind}) cannot be used: {error.message}") from None
            self.own.register(watcher, name=name)

    def __getattr__(self, hook: str) -> Any:
        if not hook.startswith("kvframe_"):
            raise AttributeError(hook)

        def call(**facts: Any) -> None:
            for manager in self._managers:
                for impl in getattr(manager.hook, hook).get_hookimpls():
                    try:
                        impl.function(*(facts[name] for name in impl.argnames))
                    except Exception:
                        self._tell(hook, impl.plugin_name)

        setattr(self, hook, call)  # made once
        return call

    def _tell(self, hook: str, name: str) -> None:
        """Says so with the traceback the first time, and leaves it at that: a step may be a millisecond."""
        if (hook, name) in self._failed:
            log.debug("%s failed again in %s", name, hook)
            return
        self._failed.add((hook, name))
        log.exception("%s failed in %s; the engine goes on, and this is said once", name, hook)
