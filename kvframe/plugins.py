"""Discovery and loading of plugins, one entry point at a time.

A broken plugin does not take the others down: it is recorded with its reason (`kvframe list --plugins`). With
`strict=true` on the command line, `KVFRAME_STRICT=1` or `Plugins.discover(strict=True)` it is fatal.
`KVFRAME_PLUGINS=none` or `KVFRAME_PLUGINS=a,b` limits which plugins of other packages are loaded. Imports neither
torch, numpy nor hydra, and of a plugin only what its entry point names: parts are imported when they are built.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import pluggy

from kvframe import API, entrypoints, hookspecs
from kvframe.configfiles import ConfigFolder
from kvframe.entrypoints import Point
from kvframe.errors import KVFrameError, PluginError
from kvframe.hookcheck import check_hooks

GROUP = hookspecs.PROJECT
OWN_DISTRIBUTION = "kvframe"
SWITCH = {"1": True, "true": True, "yes": True, "": False, "0": False, "false": False, "no": False}

log = logging.getLogger("kvframe.plugins")


@dataclass
class Plugin:
    """One entry point and what became of it.

    Attributes:
        name: name of the entry point; value: what it names, e.g. "kvframe_mycache".
        distribution, version: the installed package that brings it.
        location: file of the module that was loaded, or "".
        seconds: time it took to import and register.
        config: its config folder, or None when it brings none.
        error: why it is not in use, or None; cause: what was raised.
    """

    name: str
    value: str
    distribution: str
    version: str
    location: str = ""
    seconds: float = 0.0
    config: ConfigFolder | None = None
    error: str | None = None
    cause: BaseException | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.name} (from {self.distribution} {self.version})"


class Plugins:
    """The loaded plugins.

    Attributes:
        manager: the pluggy manager; `manager.hook.kvframe_on_step(...)` calls every plugin that implements it.
        loaded: the plugins in use, the built-in one first.
        broken: the plugins that are not, each with its `error`.
        left_out: the plugins that KVFRAME_PLUGINS kept from being loaded.
        seconds: time that all of it took.
    """

    def __init__(self):
        self.manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self.loaded: list[Plugin] = []
        self.broken: list[Plugin] = []
        self.left_out: list[Plugin] = []
        self.seconds = 0.0

    @classmethod
    def discover(
        cls, *, strict: bool | None = None, only: str | None = None, points: Iterable[Point] | None = None
    ) -> Plugins:
        """Loads what is installed.

        Args:
            strict: a broken plugin raises; None: KVFRAME_STRICT=1 says so.
            only: names of third-party plugins to load, with commas, or "none"; None: KVFRAME_PLUGINS, else all.
            points: entry points to load instead of the installed ones.

        Raises:
            PluginError: two packages claim one plugin name or bring one config file, KVFRAME_PLUGINS names what is not
                there, or a plugin is broken and `strict` is set.
        """
        began = time.perf_counter()
        strict = _switch("KVFRAME_STRICT") if strict is None else strict
        only = os.environ.get("KVFRAME_PLUGINS") if only is None else only
        plugins = cls()
        chosen, others = _selected(_ordered(entrypoints.installed(GROUP) if points is None else points), only)
        _refuse_duplicates(chosen)
        plugins.left_out = [_plugin(point) for point in others]
        for point in chosen:
            plugin, start = _plugin(point), time.perf_counter()
            try:
                plugins._load(point, plugin)
            except (Exception, SystemExit) as error:  # whatever somebody else's module raises
                plugin.error = error.message if isinstance(error, KVFrameError) else f"{type(error).__name__}: {error}"
                plugin.cause, plugin.config = error, None
                if not strict:
                    log.warning("plugin %s is broken and left out: %s", plugin, plugin.error)
            plugin.seconds = time.perf_counter() - start
            (plugins.broken if plugin.error else plugins.loaded).append(plugin)
        if strict:
            plugins.refuse_broken()
        plugins._check_files()
        plugins.seconds = time.perf_counter() - began
        return plugins

    def _load(self, point: Point, plugin: Plugin) -> None:
        """Everything that can go wrong comes before the last line, so a broken plugin leaves no trace."""
        module = point.load()
        plugin.location = str(getattr(sys.modules.get(point.module), "__file__", None) or "")
        api = getattr(module, "api", API)
        if api != API or isinstance(api, bool):
            raise PluginError(f"it was written for kvframe interfaces {api!r}, and this kvframe has interfaces {API}")
        if "kvframe_config_path" in check_hooks(module):
            plugin.config = ConfigFolder(module.kvframe_config_path(), provider=plugin.name)
            plugin.config.check()
        self.manager.register(module, name=plugin.name)

    def refuse_broken(self) -> None:
        """Raises PluginError when a plugin is broken; names each with its reason."""
        if self.broken:
            told = "\n".join(f"plugin {plugin} is broken: {plugin.error}" for plugin in self.broken)
            fix = "repair or uninstall what is broken, or leave it out with KVFRAME_PLUGINS=none"
            raise PluginError(told, fix=fix) from self.broken[0].cause

    def _check_files(self) -> None:
        bringing = [plugin for plugin in self.loaded if plugin.config]
        owners: dict[str, Plugin] = {}
        for plugin in bringing if len(bringing) > 1 else ():
            for path in plugin.config.names():
                first = owners.setdefault(path, plugin)
                if first is not plugin:
                    raise PluginError(
                        f"the plugins {first} and {plugin} both bring the config file {path}",
                        fix=f"rename one of them, uninstall one, or leave {plugin.name} out with KVFRAME_PLUGINS=none",
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


def insist(overrides: Iterable[str]) -> None:
    """`strict=true` among the overrides of a command: PluginError when a plugin is broken, before its absence looks
    like a typo."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals and key.lstrip("+") == "strict":
            if value.strip().lower() not in SWITCH:
                raise PluginError(f"{override} cannot be used", options=["true", "false"], fix="strict=true")
            if SWITCH[value.strip().lower()]:
                plugins().refuse_broken()


def _plugin(point: Point) -> Plugin:
    return Plugin(point.name, point.value, point.distribution, point.version)


def _switch(variable: str) -> bool:
    value = os.environ.get(variable, "")
    if value.strip().lower() not in SWITCH:
        raise PluginError(f"{variable}={value!r} cannot be used", options=["1", "0"], fix=f"{variable}=1")
    return SWITCH[value.strip().lower()]


def _ordered(points: Iterable[Point]) -> list[Point]:
    """The built-in ones first, then by name. A distribution that is seen twice (once in the checkout) counts once."""
    unique = {(point.distribution, point.name, point.value): point for point in points}.values()
    return sorted(unique, key=lambda point: (not _own(point), point.name, point.distribution, point.version))


def _refuse_duplicates(points: list[Point]) -> None:
    names: dict[str, Point] = {}
    for point in points:
        first = names.setdefault(point.name, point)
        if first is not point:
            one, two = (f"{p.distribution} {p.version}" for p in (first, point))
            raise PluginError(
                f"two packages claim the plugin name {point.name!r}: {one} and {two}",
                fix=f"uninstall one of them: pip uninstall {point.distribution}",
            )


def _selected(points: list[Point], only: str | None) -> tuple[list[Point], list[Point]]:
    """What is to be loaded, and what is to be left out."""
    if only is None or only.strip() == "":
        return points, []
    wanted = {name.strip() for name in only.split(",")} - {"", "none"}
    others = [point.name for point in points if not _own(point)]
    for name in sorted(wanted - set(others)):
        raise PluginError(
            f"KVFRAME_PLUGINS names {name!r}, which is not installed",
            options=["none", *others],
            fix="correct the name, or unset KVFRAME_PLUGINS to load all",
        )
    chosen = [point for point in points if _own(point) or point.name in wanted]
    return chosen, [point for point in points if point not in chosen]


def _own(point: Point) -> bool:
    return point.distribution == OWN_DISTRIBUTION
