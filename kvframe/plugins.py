"""Discovery and loading of plugins, one entry point at a time.

A broken plugin does not take the others down: it is recorded with its reason (`kvframe list --plugins`). With
`KVFRAME_STRICT=1` (or `strict=True`) it is fatal. `KVFRAME_PLUGINS=none` or `KVFRAME_PLUGINS=a,b` limits which plugins
of other packages are loaded. Imports neither torch nor hydra.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from kvframe import hookspecs
from kvframe.configfiles import ConfigFolder
from kvframe.errors import KVFrameError, PluginError

GROUP = "kvframe"
OWN_DISTRIBUTION = "kvframe"

log = logging.getLogger("kvframe.plugins")


@dataclass
class Plugin:
    """One entry point and what became of it.

    Attributes:
        name: name of the entry point; value: what it names, e.g. "kvframe_mycache".
        distribution, version: the installed package that brings it.
        seconds: time it took to import and register.
        config: its config folder, or None when it brings none.
        error: why it is not in use, or None.
    """

    name: str
    value: str
    distribution: str
    version: str
    seconds: float = 0.0
    config: ConfigFolder | None = None
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.name} (from {self.distribution} {self.version})"


class Plugins:
    """The loaded plugins.

    Attributes:
        manager: the pluggy manager; `manager.hook.kvframe_on_step(...)` calls every plugin that implements it.
        loaded: the plugins in use, the built-in one first.
        broken: the plugins that are not, each with its `error`.
    """

    def __init__(self):
        self.manager = pluggy.PluginManager(GROUP)
        self.manager.add_hookspecs(hookspecs)
        self.loaded: list[Plugin] = []
        self.broken: list[Plugin] = []

    @classmethod
    def discover(cls, *, strict: bool | None = None, only: str | None = None, points=None) -> Plugins:
        """Loads what is installed.

        Args:
            strict: a broken plugin raises; None: KVFRAME_STRICT=1 says so.
            only: names of third-party plugins to load, with commas, or "none"; None: KVFRAME_PLUGINS, else all.
            points: entry points to load instead of the installed ones (for tests).

        Raises:
            PluginError: two packages claim one plugin name or bring one config file, or a plugin is broken and
                `strict` is set.
        """
        strict = os.environ.get("KVFRAME_STRICT") == "1" if strict is None else strict
        only = os.environ.get("KVFRAME_PLUGINS") if only is None else only
        plugins = cls()
        found = _ordered(entry_points(group=GROUP) if points is None else points)
        for point in _selected(found, only):
            plugin = Plugin(point.name, point.value, *_origin(point))
            start = time.perf_counter()
            try:
                plugins._load(point, plugin)
            except Exception as error:  # whatever somebody else's module raises
                plugin.error = error.message if isinstance(error, KVFrameError) else f"{type(error).__name__}: {error}"
                if strict:
                    raise PluginError(
                        f"plugin {plugin} is broken: {plugin.error}",
                        fix="repair or uninstall it, or leave it out with KVFRAME_PLUGINS=none",
                    ) from error
                log.warning("plugin %s is broken and left out: %s", plugin, plugin.error)
            plugin.seconds = time.perf_counter() - start
            (plugins.broken if plugin.error else plugins.loaded).append(plugin)
        plugins._check_files()
        return plugins

    def _load(self, point: EntryPoint, plugin: Plugin) -> None:
        module = point.load()
        api = getattr(module, "api", None)
        if api is not None:
            from kvframe.interfaces import API  # imports numpy: only when it is asked for

            if api != API:
                raise PluginError(f"it was written for kvframe interfaces {api}, and this kvframe has interfaces {API}")
        self._check_hooks(module)
        path = getattr(module, "kvframe_config_path", None)
        if path is not None and self.manager.parse_hookimpl_opts(module, "kvframe_config_path") is not None:
            plugin.config = ConfigFolder(path(), provider=plugin.name)
            plugin.config.check()
        self.manager.register(module, name=plugin.name)

    def _check_hooks(self, module: Any) -> None:
        """Every hook exists and takes only arguments that the hook has."""
        valid = {name: list(inspect.signature(getattr(hookspecs, name)).parameters) for name in _hook_names()}
        for name in dir(module):
            options = self.manager.parse_hookimpl_opts(module, name)
            if options is None:
                continue
            hook = getattr(module, name)
            name = options.get("specname") or name
            if name not in valid:
                raise PluginError(f"it implements the hook {name!r}, which does not exist; hooks: {', '.join(valid)}")
            for argument in inspect.signature(hook).parameters:
                if argument not in valid[name]:
                    arguments = ", ".join(valid[name]) or "none"
                    raise PluginError(
                        f"its hook {name} takes the argument {argument!r}, which does not exist; arguments: {arguments}"
                    )

    def _check_files(self) -> None:
        owners: dict[str, Plugin] = {}
        for plugin in self.loaded if len(self.loaded) > 1 else ():
            for file in plugin.config.walk() if plugin.config else ():
                first = owners.setdefault(file.path, plugin)
                if first is not plugin:
                    raise PluginError(
                        f"the plugins {first} and {plugin} both bring the config file {file.path}",
                        fix=f"uninstall one of them, or leave {plugin.name} out with KVFRAME_PLUGINS=none",
                    )

    def configs(self) -> list[ConfigFolder]:
        """The config folders of the plugins in use, in order."""
        return [plugin.config for plugin in self.loaded if plugin.config]


_current: Plugins | None = None


def plugins(*, reload: bool = False) -> Plugins:
    """The plugins of this process; discovered on first use."""
    global _current
    if _current is None or reload:
        _current = Plugins.discover()
    return _current


def _hook_names() -> list[str]:
    return [name for name in vars(hookspecs) if name.startswith("kvframe_")]


def _origin(point: EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist is not None else ("?", "?")


def _ordered(points) -> list[EntryPoint]:
    """The built-in ones first, then by name. A distribution that is seen twice (once in the checkout) counts once."""
    unique = {(_origin(point)[0], point.name, point.value): point for point in points}.values()
    ordered = sorted(unique, key=lambda point: (_origin(point)[0] != OWN_DISTRIBUTION, point.name, _origin(point)))
    names: dict[str, EntryPoint] = {}
    for point in ordered:
        first = names.setdefault(point.name, point)
        if first is not point:
            raise PluginError(
                f"two packages claim the plugin name {point.name!r}: "
                f"{' '.join(_origin(first))} and {' '.join(_origin(point))}",
                fix=f"uninstall one of them: pip uninstall {_origin(point)[0]}",
            )
    return ordered


def _selected(points: list[EntryPoint], only: str | None) -> list[EntryPoint]:
    if only is None or only.strip() == "":
        return points
    wanted = {name.strip() for name in only.split(",")} - {"", "none"}
    others = [point.name for point in points if _origin(point)[0] != OWN_DISTRIBUTION]
    for name in sorted(wanted - set(others)):
        raise PluginError(
            f"KVFRAME_PLUGINS names {name!r}, which is not installed",
            options=["none", *others],
            fix="correct the name, or unset KVFRAME_PLUGINS to load all",
        )
    return [point for point in points if _origin(point)[0] == OWN_DISTRIBUTION or point.name in wanted]
