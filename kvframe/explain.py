"""Hydra's errors in the words of the config: the wrong name, the valid ones with the nearest first, and the fix."""

from __future__ import annotations

import re
from collections.abc import Callable

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvframe.create import nearest, resembling
from kvframe.errors import ConfigError

_KEY = re.compile(r"[+~]{0,2}(?P<key>[^=@]+)(?:@[^=]*)?(?:=(?P<value>.*))?", re.DOTALL)
_COULD_NOT = re.compile(r"Could not (?:override|delete from config\.) '(?P<key>[^']+)'")


def explain(
    error: Exception,
    overrides: list[str],
    recompose: Callable[[list[str]], DictConfig],
    groups: dict[str, list[str]],
) -> Exception:
    """A ConfigError for what Hydra or OmegaConf raised; any other error is answered as it is.

    Args:
        overrides: what was asked for; recompose: composes under fewer overrides, to see which keys exist.
        groups: config group -> names of its options.
    """
    if isinstance(error, yaml.YAMLError):
        return ConfigError(f"a config file is not YAML: {' '.join(str(error).split())}")
    if isinstance(error, ValueError) and "Config group override must be" in str(error):
        for group, _, value in (override.lstrip("+").partition("=") for override in overrides):
            if group in groups and value == "null":
                return ConfigError(f"{group}=null names no option", options=groups[group], fix=f"leave {group} out")
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return error
    if isinstance(error, OverrideParseException) or "token recognition error" in str(error):
        return _unreadable(error, overrides)
    if isinstance(error, MissingConfigException):
        return _missing(error, groups)
    text = str(error)
    sweep = re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(?P<override>.*?)'", text, re.DOTALL)
    if sweep:
        override = sweep["override"]
        return ConfigError(
            f"{override} names several values", fix="add -m to run one job per value, or use [a,b] for a list"
        )
    could_not = _COULD_NOT.match(text)
    if could_not:
        return _unknown(could_not["key"], overrides, recompose, groups)
    cause = error.__cause__
    reason = text if cause is None else f"{text}: {cause}" if text else str(cause)
    return ConfigError(f"the config cannot be composed: {' '.join(reason.split())}")


def _unreadable(error: Exception, overrides: list[str]) -> ConfigError:
    """An override that is not in Hydra's grammar; errors of its lexer do not say which."""
    for override in overrides:
        try:
            OverridesParser.create().parse_override(override)
        except HydraException as found:
            error = found
            break
    else:
        override = getattr(error, "override", "?")
    lines = [line for line in str(error).splitlines() if not line.startswith(("Error parsing", "See "))]
    fix = f"quote the value: '{override.partition('=')[0]}=\"...\"'" if "=" in override else "KEY=VALUE"
    return ConfigError(f"the override {override!r} cannot be read: {' '.join(lines)}", fix=fix)


def _missing(error: MissingConfigException, groups: dict[str, list[str]]) -> ConfigError:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    if not group:
        return ConfigError(f"there is no config {name!r}", fix="see kvframe --help for the commands")
    options = nearest(name, error.options or groups.get(group, ()))  # of one in a list Hydra does not say
    close = resembling(name, options)
    fix = f"{group}={close[0]}" if close else "one of the names above, or install the plugin that brings it"
    return ConfigError(f"{group}={name} does not exist", options=options, fix=fix)


def _unknown(key: str, overrides, recompose, groups) -> ConfigError:
    """A key or a group that does not exist, or one that is not part of what was chosen."""
    override = next((o for o in overrides if _KEY.fullmatch(o) and _KEY.fullmatch(o)["key"] == key), f"{key}=")
    value = _KEY.fullmatch(override)["value"] or "..."
    if key in groups and "/" not in key:
        return ConfigError(f"{key}={value} chooses nothing: this command has no {key}", fix=f"leave {key}={value} out")
    if key in groups:
        return ConfigError(
            f"{key}={value} replaces nothing: what was chosen has no {key}", fix="choose a preset that has it"
        )
    if "/" in key:
        close = resembling(key, groups)
        fix = f"{close[0]}={value}" if close else None
        return ConfigError(f"the config group {key!r} does not exist", options=nearest(key, groups), fix=fix)
    chosen = [o for o in overrides if _KEY.fullmatch(o) and _KEY.fullmatch(o)["key"] in groups]
    chosen = [o for o in chosen if not o.startswith("hydra/")]  # what runs the jobs is no part of them
    try:
        node, path, name = recompose(chosen), "", key
    except HydraException:
        return ConfigError(
            f"{override} replaces nothing", options=nearest(key, groups), fix="use one of the names above"
        )
    for name in key.split("."):
        child = (
            node[name] if OmegaConf.is_dict(node) and name in node and not OmegaConf.is_missing(node, name) else None
        )
        if not OmegaConf.is_dict(child):
            break
        node, path = child, f"{path}{name}."
    names = [n for n in node if not (n.startswith("_") or not path and n == "hydra")] if OmegaConf.is_dict(node) else []
    deeper = [f"{top}.{name}" for top in names if not path and OmegaConf.is_dict(node[top]) and name in node[top]]
    close, names = deeper or resembling(name, names), nearest(name, names)
    where = path.rstrip(".") or "the config"
    if name in groups.get(where.replace(".", "/"), ()):  # of an option that was not chosen
        group = where.replace(".", "/")
        absent = f"{where} has no key {name!r}, since {group}={name} is not chosen"
        return ConfigError(absent, fix=f"{group}={name} {override}")
    if not names:
        return ConfigError(
            f"{where} has no key {name!r}; what is chosen there takes no parameters", fix=f"leave {key} out"
        )
    fix = f"{path}{close[0]}={value}" if close else f"leave {key} out"
    return ConfigError(f"{where} has no key {name!r}", options=names, fix=fix)
