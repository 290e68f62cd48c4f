"""The hooks that a plugin may implement. All are optional, and none is ever called per layer.

A plugin is whatever its entry point in the group `kvframe` names: a module, or an object with the hooks as methods.
The smallest one is a module with one hook, and a folder of YAML files beside it:

    # pyproject.toml
    [project.entry-points.kvframe]
    mycache = "kvframe_mycache"

    # kvframe_mycache/__init__.py
    from kvframe.hookspecs import hookimpl

    api = 1  # optional: the kvframe.interfaces.API that it was written for

    @hookimpl
    def kvframe_config_path():
        return "pkg://kvframe_mycache.conf"

    # kvframe_mycache/conf/cache/codec/mycodec.yaml
    _target_: kvframe_mycache.codec.MyCodec

    $ kvframe generate cache/codec=mycodec prompt="Once upon a time"

Keep the module light (no torch): it is loaded at every start. The parts that its YAML files name are imported when
they are built. A hook may leave out arguments that it does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvframe.outputs import RequestOutput
    from kvframe.types import CacheStats

hookspec = pluggy.HookspecMarker("kvframe")
hookimpl = pluggy.HookimplMarker("kvframe")


@hookspec
def kvframe_config_path() -> str:
    """Where the YAML files of this plugin are: `pkg://package.conf` (a package, with `__init__.py`) or a folder.

    The folder is laid out like `kvframe.conf`: `cache/*.yaml` are presets, `cache/<group>/*.yaml` parts,
    `kernel/*.yaml`, `model/*.yaml`. A file name that another plugin brings too is an error that names both.
    """


@hookspec
def kvframe_on_step(step: int, requests: int, tokens: int, seconds: float, stats: CacheStats) -> None:
    """A step of the engine is done.

    Args:
        step: number of the step in this run, from 0.
        requests, tokens: sequences that took part, and tokens that were computed.
        seconds: duration by the engine's clock.
        stats: the cache's bytes and counters after the step.
    """


@hookspec
def kvframe_on_finish(output: RequestOutput) -> None:
    """A sample of a request is done, or was refused (`output.error`)."""
