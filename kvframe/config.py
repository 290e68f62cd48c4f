"""Hydra: the config search path, `compose()` and `build()`.

    from kvframe.config import build, compose

    cfg = compose(["model=smollm2", "cache=paged", "cache.layout.block_size=32"])
    engine = build(cfg)

Importing this module puts the config folders of all plugins on Hydra's search path, for the command line, for
`compose` and for an application that uses Hydra itself. torch is imported by `build`, not before.
"""

from __future__ import annotations

import logging
import pkgutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from hydra.version import VersionBase, setbase
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from kvframe.configfiles import ConfigFile, ConfigFolder
from kvframe.create import check, create, nearest
from kvframe.errors import ConfigError, KVFrameError
from kvframe.explain import explain
from kvframe.overrides import quote
from kvframe.plugins import insist, plugins
from kvframe.watching import Watchers

if TYPE_CHECKING:
    from kvframe.engine import Engine
    from kvframe.interfaces import CacheContext, Codec, Kernel, KVCache

VERSION_BASE = "1.3"

log = logging.getLogger(__name__)


class KVFrameSearchPath(SearchPathPlugin):
    """Adds the config folder of every loaded plugin to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in plugins().configs():
            search_path.append(provider=folder.provider, path=folder.url)


def _register() -> None:
    """By hand: Hydra looks for plugins in the namespace `hydra_plugins`, which editable installs do not show it. Again
    where it has forgotten: a launcher puts the state of another process in the place of the job's."""
    if KVFrameSearchPath not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(KVFrameSearchPath)


_register()
OmegaConf.register_new_resolver("kvframe.missing", lambda: "???", replace=True)


# -- compose -------------------------------------------------------------------------------------------------


def compose(overrides: Iterable[str] = (), config_name: str = "generate") -> DictConfig:
    """The config of a command under these overrides, as the command line would see it.

    Text keys (`prompt=...`, see kvframe.overrides) take any text. Hydra's process-wide state is left alone, so this
    works any number of times, also inside an application that uses Hydra.

    Raises:
        ConfigError: a name that does not exist, with the valid ones.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"compose({overrides!r}) is one text", fix=f"compose([{overrides!r}])")
    overrides = quote(overrides)
    insist(overrides)
    try:
        cfg = hydra_config(overrides, config_name)
    except KVFrameError:
        raise
    except Exception as error:
        raise explained(error, overrides, config_name) from error
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def hydra_config(overrides: list[str], config_name: str, run_mode: RunMode = RunMode.RUN) -> DictConfig:
    """What Hydra composes, its own node `hydra` included."""
    _register()
    with _version_base():
        loader = ConfigLoaderImpl(create_config_search_path(None))
        return loader.load_configuration(config_name, list(overrides), run_mode=run_mode, from_shell=False)


def explained(error: Exception, overrides: list[str], config_name: str) -> Exception:
    """What a user should read about an error of Hydra's (see kvframe.explain)."""
    return explain(error, overrides, lambda kept: hydra_config(kept, config_name), groups())


@contextmanager
def _version_base() -> Iterator[None]:
    """Hydra 1.3 behaviour for us; what the application chose comes back afterwards."""
    mine = VersionBase.instance()
    before = mine.version_base
    setbase(VERSION_BASE)
    try:
        yield
    finally:
        mine.version_base = before


# -- what is there -------------------------------------------------------------------------------------------


def folders() -> list[ConfigFolder]:
    """The config folders on the search path: the plugins', and what the running Hydra app adds (--config-dir)."""
    found = plugins().configs()
    if HydraConfig.initialized():
        known = {folder.url for folder in found} | {"pkg://hydra.conf"}
        for source in HydraConfig.get().runtime.config_sources:
            url = f"{source.schema}://{source.path}"
            if source.schema in ("pkg", "file") and url not in known:
                found.append(ConfigFolder(url, provider=source.provider))
    return found


def files(group: str = "") -> Iterator[ConfigFile]:
    """Every config file below a group, whoever brings it."""
    for folder in folders():
        yield from folder.walk(group)


def groups() -> dict[str, list[str]]:
    """Config group -> names of its options, e.g. "cache/layout" -> ["contiguous", "paged"]."""
    found: dict[str, set[str]] = {}
    for file in files():
        if file.group and file.group.split("/")[0] not in ("base", "hydra"):
            found.setdefault(file.group, set()).add(file.name)
    return {group: sorted(names) for group, names in sorted(found.items())}


# -- build ---------------------------------------------------------------------------------------------------


def build(cfg: DictConfig) -> Engine:
    """Model, cache and engine of a config. The config is not changed, and can be built from again.

    Raises:
        ConfigError: a parameter that does not exist or a value that cannot work; IncompatibleCacheError,
        CapacityError, UnsupportedModelError, MissingPackageError: see kvframe.errors.
    """
    watchers = build_watchers(cfg)
    kernels = build_kernels(cfg)
    warming = _warm(kernels, cfg)
    made = build_engine(cfg, build_model(cfg), kernels, watchers)
    for thread in warming:
        thread.join()
    made.warm()
    return made


def build_engine(
    cfg: DictConfig, model: Any, kernels: tuple[Kernel, ...] | None = None, watchers: Watchers | None = None
) -> Engine:
    """Cache and engine of a config around a model that exists already, not warmed up; engines may share a model.
    kernels, watchers: built from the config when None. Errors as in `build`."""
    from kvframe.engine import Engine

    context = cache_context(cfg, model, kernels)
    engine = plain(cfg, "engine")
    engine["max_len"] = context.max_len
    watchers = build_watchers(cfg) if watchers is None else watchers
    return Engine(model, build_cache(cfg, context), **engine, hooks=watchers)


def _warm(kernels: Iterable[Kernel], cfg: DictConfig) -> list[threading.Thread]:
    """Kernels that compile do it in a thread of their own while the weights load. Not a daemon thread: a compiler
    that is cut off at exit may crash."""
    model = plain(cfg, "model")
    args = str(model.get("device", "cpu")), model.get("dtype"), _codec(cfg)
    threads = [threading.Thread(target=k.warm, args=args, name=f"warm-{k.name}") for k in kernels]
    for thread in threads:
        thread.start()
    return threads


def _codec(cfg: DictConfig) -> Codec | None:
    """The codec that `cfg.cache` names. None where it names none, or one that cannot be: `build_cache` says why."""
    node = OmegaConf.select(cfg, "cache.codec", throw_on_missing=False)
    try:
        return create(node, "cache.codec") if OmegaConf.is_dict(node) and "_target_" in node else None
    except (KVFrameError, OmegaConfBaseException):
        return None


def build_model(cfg: DictConfig) -> Any:
    """The model that `cfg.model` describes (a kvframe.hf.HFModel)."""
    return create(_chosen(cfg, "model"), "model")


def build_skeleton(cfg: DictConfig) -> Any:
    """The model that `cfg.model` describes without weights: for what is asked of its layers, lengths and bytes.

    A `_target_` names its counterpart without weights, which takes the same arguments, in an attribute `skeleton`
    (a path like a `_target_`). Of one that has none the model itself is built.
    """
    node = _chosen(cfg, "model").copy()  # a copy keeps its parent, so interpolations still resolve
    check(node, "model")
    made = getattr(pkgutil.resolve_name(node["_target_"]), "skeleton", None) if "_target_" in node else None
    if made is not None:
        with open_dict(node):
            node["_target_"] = made
    return create(node, "model")


def build_workload(cfg: DictConfig) -> Any:
    """The workload that `cfg.workload` describes (a kvframe.workloads.workload.Workload)."""
    return create(_chosen(cfg, "workload"), "workload")


def build_baseline(cfg: DictConfig) -> Any:
    """The baseline that `cfg.baseline` describes (a kvframe.comparison.baselines.Baseline)."""
    return create(_chosen(cfg, "baseline"), "baseline")


def cache_context(cfg: DictConfig, model: Any, kernels: tuple[Kernel, ...] | None = None) -> CacheContext:
    """What a cache for this model and these engine limits is built for. kernels: built from the config when None."""
    from kvframe.interfaces import CacheContext

    engine = plain(cfg, "engine")
    max_len = engine["max_len"] if engine["max_len"] is not None else model.max_len
    if max_len is None:
        raise ConfigError("the model names no longest length", fix="engine.max_len=4096")
    for name, value in {**engine, "max_len": max_len}.items():
        if name.startswith("max_") and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"engine.{name}={value!r} cannot be used", options=["an integer >= 1"])
    return CacheContext(
        layers=tuple(model.layers),
        dtype=model.dtype,
        device=str(model.device),
        max_len=max_len,
        max_requests=engine["max_requests"],
        max_step_tokens=engine["max_step_tokens"],
        kernels=kernels or build_kernels(cfg),
        learned_sinks=model.learned_sinks,
        trained_len=model.max_len,
    )


def build_cache(cfg: DictConfig, context: CacheContext) -> KVCache:
    """The cache that `cfg.cache` describes. `kernels=None` in the context builds the control plane only."""
    return create(_chosen(cfg, "cache"), "cache", context=context)


def build_kernels(cfg: DictConfig) -> tuple[Kernel, ...]:
    """Kernels in order of preference: the one that `kernel=NAME` names, or under `kernel=auto` every one on the
    search path that states a `priority`. A candidate that cannot be imported is left out and its reason logged."""
    chosen = _chosen(cfg, "kernel")
    if "_target_" in chosen:
        return (create(_without_priority(chosen), "kernel"),)
    found, reasons = [], []
    for file in files("kernel"):
        node = OmegaConf.create(file.text)
        priority = node.get("priority") if OmegaConf.is_dict(node) else None
        if isinstance(priority, int | float) and not isinstance(priority, bool):
            found.append((-priority, file.name, node))
    kernels = []
    for _, name, node in sorted(found, key=lambda row: row[:2]):
        try:
            kernels.append(create(_without_priority(node), f"kernel ({name})"))
        except KVFrameError as error:
            log.info("kernel %s is left out: %s", name, error)
            reasons.append(f"{name}: {error.message}")
    if not kernels:
        raise ConfigError(
            f"no kernel can be used ({'; '.join(reasons) or 'none states a priority'})", fix="kernel=NAME"
        )
    return tuple(kernels)


def build_watchers(cfg: DictConfig) -> Watchers:
    """Who watches an engine of this config: every plugin, and what `cfg.watch` describes, a watcher under each name."""
    nodes = cfg.get("watch") or {}
    if "_target_" in nodes:  # a file that does not say `# @package watch.NAME`
        nodes = {"watch": nodes}
    own = {}
    for name, node in nodes.items():
        if not OmegaConf.is_dict(node) or "_target_" not in node:
            valid = groups().get("watch", [])
            raise ConfigError(f"watch.{name}={node} is not a watcher", options=valid, fix="watch=NAME")
        own[name] = create(node, f"watch.{name}")
    return Watchers(plugins().manager, own)


def _chosen(cfg: DictConfig, group: str) -> DictConfig:
    """The config of a group, after a look at its parts: `cache.layout=paged` sets a value where a part belongs."""
    for name, options in groups().items():
        if name != group and not name.startswith(f"{group}/"):
            continue
        key = name.replace("/", ".")
        value = OmegaConf.select(cfg, key)
        if value is None and name == group:
            raise ConfigError(f"no {group} is chosen", options=options, fix=f"{group}=NAME")
        if value is not None and not OmegaConf.is_dict(value):
            valid = nearest(str(value), options)
            raise ConfigError(
                f"{key}={value} puts a value where a part belongs", options=valid, fix=f"{name}={valid[0]}"
            )
    return cfg[group]


def _without_priority(node: DictConfig) -> DictConfig:
    node = node.copy()  # a copy keeps its parent, so interpolations still resolve
    with read_write(node), open_dict(node):
        node.pop("priority", None)
    return node


def plain(cfg: DictConfig, key: str) -> dict:
    """A node of the config as a dict, interpolations resolved."""
    try:
        return OmegaConf.to_container(cfg[key], resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key} cannot be resolved: {' '.join(str(error).split())}") from error
