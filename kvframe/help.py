"""Help texts, made from the config files: groups with their options, keys with the comments beside them.

Reads YAML only, neither Hydra nor torch, so it is there at once.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from kvframe.commands import COMMANDS, Command
from kvframe.configfiles import ConfigFile
from kvframe.plugins import plugins

_FLAGS = (
    ("--cfg job", "show the composed config instead of running (--resolve: with interpolations resolved)"),
    ("-m", "one job per combination of the comma-separated values"),
    ("--info", "show the search path, the defaults and the config"),
    ("--config-dir DIR", "one more folder with config files"),
    ("--hydra-help", "more flags"),
)


def overview() -> str:
    """`kvframe --help`."""
    files = _files()
    primary = {name: files[f"{name}.yaml"] for name in COMMANDS}
    lines = ["kvframe: KV cache strategies for LLM decoding", "", "usage: kvframe COMMAND [KEY=VALUE ...]", ""]
    lines += [f"  {name:<10} {file.headline}" for name, file in primary.items()]
    lines += ["", "examples:", *(f"  {example}" for file in primary.values() for example in file.examples[:2])]
    return "\n".join([*lines, "", "kvframe COMMAND --help lists every option; kvframe --version the version."])


def command_help(command: Command, overrides: list[str] = ()) -> str:
    """`kvframe COMMAND --help`: groups, options and keys, as the overrides choose them."""
    files = _files()
    primary = files[f"{command.name}.yaml"]
    choices = dict(o.split("=", 1) for o in overrides if "=" in o)
    sections: list[tuple[str, ConfigFile]] = []  # (package, file) of everything that is chosen
    chosen: dict[str, str | None] = {}
    _collect(files, primary, "", choices, chosen, sections)
    groups: dict[str, list[str]] = {}
    for file in files.values():
        if any(file.group == g or file.group.startswith(f"{g}/") for g in chosen):
            groups.setdefault(file.group, []).append(file.name)
    lines = [f"kvframe {command.name}: {primary.headline}", "", f"usage: kvframe {command.name} [KEY=VALUE ...]", ""]
    lines += ["examples:", *(f"  {example}" for example in primary.examples)]
    if groups:
        lines += ["", "groups (choose with GROUP=OPTION; * is chosen):"]
    for group, names in sorted(groups.items()):
        marked = ", ".join(f"{name}*" if name in _options(chosen.get(group)) else name for name in sorted(names))
        lines.append(f"  {group:<16} {marked}")
    lines += ["", "keys (set with KEY=VALUE):"]
    lines += _keys(sections, primary)
    lines += ["", "flags:", *(f"  {flag:<18} {text}" for flag, text in _FLAGS)]
    return "\n".join(lines)


def _files() -> dict[str, ConfigFile]:
    return {file.path: file for folder in plugins().configs() for file in folder.walk()}


def _collect(files, file: ConfigFile, package: str, choices, chosen, sections) -> None:
    """Follows the defaults lists: `name`, `base/x`, `/base/x@_here_`, `group: option`, `group: [option, option]`,
    `/group@package: option`, `override group: option`, `_self_`."""
    content = yaml.safe_load(file.text) or {}
    defaults = content.get("defaults", [])
    own = {_group(file, name)[0]: option for name, option, override in _entries(defaults) if override}
    choices = {**own, **choices}  # whoever is further out has the last word
    for name, option, override in _entries(defaults if "_self_" in defaults else [*defaults, "_self_"]):
        if name == "_self_":
            sections.append((package, file))
        elif option is None and not override:
            path, place = _group(file, name)
            near = place == "_here_" or path.rpartition("/")[0] == file.group
            _follow(files, path, package if near else "", choices, chosen, sections)
        elif not override:
            group, place = _group(file, name)
            inner = f"{package}.{place}" if place else group.replace("/", ".")
            option = choices.get(f"{group}@{inner}" if place else group, option)
            if not place:
                chosen[group] = option
            for one in _options(option):
                _follow(files, f"{group}/{one}", inner, choices, chosen, sections)


def _follow(files, path: str, package: str, choices, chosen, sections) -> None:
    file = files.get(f"{path}.yaml")
    if file is not None:
        said = file.package
        _collect(files, file, package if said is None else said, choices, chosen, sections)


def _entries(defaults: list) -> Iterator[tuple[str, Any, bool]]:
    """(group or name, option, is it an override) of each entry of a defaults list; option None where it is a name."""
    for entry in defaults:
        if isinstance(entry, str):
            yield entry, None, False
        else:
            for name, option in entry.items():
                words = str(name).split()
                yield words[-1], "null" if option is None else option, "override" in words


def _group(file: ConfigFile, name: str) -> tuple[str, str]:
    """The group (or the file) that a name in a defaults list means, from the root, and what stands behind its @."""
    path, _, place = name.partition("@")
    return (path[1:] if path.startswith("/") else "/".join(filter(None, (file.group, path)))), place


def _options(option: Any) -> list[str]:
    """What `group=option` and `group=[option,option]` name."""
    if isinstance(option, list):
        return [str(one) for one in option]
    return [one.strip() for one in str(option).strip("[]").split(",")]


def _keys(sections: list[tuple[str, ConfigFile]], primary: ConfigFile) -> list[str]:
    """A line per key, the command's own first. What a later file sets anew is shown with its value."""
    shown: dict[str, tuple[tuple, Any, str]] = {}  # key -> (place, value, comment)
    for package, file in sections:
        content, comments = yaml.safe_load(file.text) or {}, file.comments()
        place = package != "", file is not primary
        for key, value in content.items():
            if key in ("defaults", "hydra", "auto", "priority") or key.startswith("_"):
                continue
            full = f"{package}.{key}" if package else key
            for name, one in _leaves(full, value, shown).items():
                before = shown.get(name, (place, None, ""))
                shown[name] = before[0], one, comments.get(key) or before[2]
    width = max(80, min(shutil.get_terminal_size((120, 20)).columns, 140))
    lines = []
    for key, (_, value, comment) in sorted(shown.items(), key=lambda item: item[1][0]):
        text = f"  {key}={_value(value)}"
        lines += textwrap.wrap(comment, width, initial_indent=f"{text:<38} ", subsequent_indent=" " * 39) or [text]
    return lines


def _leaves(key: str, value: Any, known: dict) -> dict[str, Any]:
    """A mapping that sets keys which are there already (`layout: {block_size: 32}`) key by key; else the key itself."""
    if not isinstance(value, dict) or key in known or not any(name.startswith(f"{key}.") for name in known):
        return {key: value}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found |= _leaves(f"{key}.{name}", inner, known)
    return found


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
