"""Builds objects from config nodes with `_target_`, and says what is wrong in the words of the config.

Hydra's `instantiate` does the work. Before it, every key is held against the signature of its target, so that a wrong
name is answered with the valid ones; after it, errors of our own family surface as they are.
"""

from __future__ import annotations

import difflib
import inspect
import pkgutil
from collections.abc import Iterable
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvframe.errors import ConfigError, KVFrameError, MissingPackageError, OptionError

_SPECIAL = {"_target_", "_convert_", "_recursive_", "_partial_", "_args_"}


def create(node: DictConfig, key: str, **passed: Any) -> Any:
    """The object that a config node describes, its parts included.

    Args:
        node: a config with `_target_`; key: where it stands, for messages, e.g. "cache".
        passed: arguments of the target that do not come from the config.
    """
    check(node, key, passed)
    try:
        if passed:
            return instantiate(node, _partial_=True, _convert_="all")(**passed)
        return instantiate(node, _convert_="all")
    except Exception as error:
        cause = _root(error)
        if isinstance(cause, OptionError):
            raise cause.at(_failing(node, key)) from cause.__cause__
        if isinstance(cause, KVFrameError):
            raise cause from cause.__cause__
        where = f"{key} ({node.get('_target_')})"
        raise ConfigError(f"cannot build {where}: {type(cause).__name__}: {cause}") from cause


def check(node: Any, key: str, passed: Iterable[str] = ()) -> None:
    """Raises ConfigError when a target does not exist, or is given a parameter that it does not have."""
    if OmegaConf.is_list(node):
        for i, item in enumerate(node):
            check(item, f"{key}[{i}]")
    if not OmegaConf.is_dict(node):
        return
    target = _target(node, key)
    names = [name for name in node if name not in _SPECIAL]
    for name in names:
        if OmegaConf.is_missing(node, name):
            raise ConfigError(f"{key}.{name} must be given", fix=f"{key}.{name}=...")
        try:
            check(node[name], f"{key}.{name}")
        except OmegaConfBaseException as error:  # an interpolation that leads nowhere
            raise ConfigError(f"{key}.{name} cannot be resolved: {error}") from error
    if target is not None and not node.get("_partial_", False):
        _check_names(target, names, key, set(passed))


def _target(node: DictConfig, key: str) -> Any:
    path = node.get("_target_")
    if path is None:
        return None
    try:
        return pkgutil.resolve_name(path)
    except Exception as error:
        cause = _root(error)
        if isinstance(cause, KVFrameError):
            raise cause from cause.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and not path.startswith(cause.name):
            raise MissingPackageError(
                f"{key} ({path}) needs the package {cause.name!r}, which is not installed",
                fix=f"pip install {cause.name}",
            ) from cause
        raise ConfigError(f"{key}._target_={path} cannot be imported: {type(cause).__name__}: {cause}") from cause


def _check_names(target: Any, names: list[str], key: str, passed: set[str]) -> None:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        return
    takes = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    shown = [name for name in takes if name not in passed]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in names:
            if name not in takes:
                close, valid = resembling(name, shown), nearest(name, shown) or ["none"]
                fix = f"{key}.{close[0]}=..." if close else f"leave {key}.{name} out"
                raise ConfigError(f"{key} has no parameter {name!r} ({target.__qualname__})", options=valid, fix=fix)
    for p in parameters.values():
        if p.default is p.empty and p.name in takes and p.name not in passed and p.name not in names:
            raise ConfigError(f"{key}.{p.name} must be given ({target.__qualname__})", fix=f"+{key}.{p.name}=...")


def resembling(name: str, options: Iterable[str]) -> list[str]:
    """The options that look like `name`, the nearest first."""
    return difflib.get_close_matches(name, list(options), n=3, cutoff=0.5)


def nearest(name: str, options: Iterable[str]) -> list[str]:
    """All options, those that look like `name` first."""
    options = list(options)
    close = resembling(name, options)
    return [*close, *(option for option in options if option not in close)]


def _failing(node: Any, key: str) -> str:
    """The key of the innermost part that cannot be built. Parts within a part are built first, so each can be tried."""
    names = node if OmegaConf.is_dict(node) else range(len(node))
    for name in names:
        if name in _SPECIAL or not OmegaConf.is_config(node[name]):
            continue
        try:
            instantiate(node[name], _convert_="all")
        except Exception:
            return _failing(node[name], f"{key}[{name}]" if OmegaConf.is_list(node) else f"{key}.{name}")
    return key


def _root(error: BaseException) -> BaseException:
    """The error that a chain of Hydra's wrappers began with, or the first of our own family in it."""
    while not isinstance(error, KVFrameError) and error.__cause__ is not None:
        error = error.__cause__
    return error
