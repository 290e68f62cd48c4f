"""The hooks that a plugin may implement. All are optional, and none is ever called per layer.

A plugin is whatever its entry point in the group `kvframe` names: a module, or an object with the hooks as methods.
The smallest one is a module with one hook, and a folder of YAML files beside it:

    # pyproject.toml
    [project.entry-points.kvframe]
    mycache = "kvframe_mycache"

    # kvframe_mycache/__init__.py
    from kvframe.hookspecs import hookimpl

    api = 1  # the version of kvframe.interfaces that it was written for; optional

    @hookimpl
    def kvframe_config_path():
        return "pkg://kvframe_mycache.conf"

    # kvframe_mycache/conf/cache/codec/mycodec.yaml
    _target_: kvframe_mycache.codec.MyCodec

    $ kvframe generate cache/codec=mycodec prompt="Once upon a time"

A preset may build on one that is there, whoever brings it:

    # kvframe_mycache/conf/cache/mine.yaml
    defaults:
      - radix
      - override codec: mycodec
      - _self_
    memory: 2GiB

Keep the module light (no torch): it is loaded at every start. The parts that its YAML files name are imported when
they are built. A hook may leave out arguments that it does not need.

Who only wants to watch some engines brings an object instead, with the hooks as methods, and a file in `conf/watch`:

    # kvframe_mycache/conf/watch/mywatch.yaml
    # @package watch.mywatch
    _target_: kvframe_mycache.watch.MyWatch

    $ kvframe generate watch=mywatch prompt="Once upon a time"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvframe.outputs import RequestOutput
    from kvframe.types import CacheStats

PROJECT = "kvframe"  # also the group of entry points

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


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
def kvframe_on_evict(step: int, blocks: dict[str, int], nbytes: int, reason: str) -> None:
    """Cached blocks were given up to make room for a step. Called at most once per step, before `kvframe_on_step`,
    and never for a step in which nothing went.

    Args:
        step: number of the step that needed the room.
        blocks: layer group -> how many of its blocks went; groups that lost none are not in it.
        nbytes: bytes of all these blocks.
        reason: "eviction"; other reasons may come.
    """


@hookspec
def kvframe_on_finish(output: RequestOutput) -> None:
    """A sample of a request is done, or was refused (`output.error`)."""
