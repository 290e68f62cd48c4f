"""Help texts, made from the config files: groups with their options, keys with the comments beside them.

Reads YAML only, neither Hydra nor torch, so it is there at once.
"""

from __future__ import annotations

import shutil
import textwrap
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
        marked = ", ".join(f"{name}*" if chosen.get(group) == name else name for name in sorted(names))
        lines.append(f"  {group:<16} {marked}")
    lines += ["", "keys (set with KEY=VALUE):"]
    for package, file in sorted(sections, key=lambda section: section[0] != ""):  # the command's own keys first
        lines += _keys(package, file)
    lines += ["", "flags:", *(f"  {flag:<18} {text}" for flag, text in _FLAGS)]
    return "\n".join(lines)


def _files() -> dict[str, ConfigFile]:
    return {file.path: file for folder in plugins().configs() for file in folder.walk()}


def _collect(files, file: ConfigFile, package: str, choices, chosen, sections) -> None:
    """Follows the defaults lists: `base/x`, `group: option`, `/base/x@_here_`, `_self_`."""
    content = yaml.safe_load(file.text) or {}
    defaults = content.get("defaults", [])
    for entry in defaults if "_self_" in defaults else [*defaults, "_self_"]:
        if entry == "_self_":
            if not file.group.startswith("base") or package:
                sections.append((package, file))
        elif isinstance(entry, str):
            path = entry.split("@")[0]
            path = path[1:] if path.startswith("/") else "/".join(filter(None, (file.group, path)))
            if f"{path}.yaml" in files:
                _collect(files, files[f"{path}.yaml"], package if "@_here_" in entry else "", choices, chosen, sections)
        else:
            for name, option in entry.items():
                if str(name).startswith("override"):
                    continue
                group = "/".join(filter(None, (file.group, name)))
                option = choices.get(group, option)
                chosen[group] = option
                if f"{group}/{option}.yaml" in files:
                    _collect(files, files[f"{group}/{option}.yaml"], group.replace("/", "."), choices, chosen, sections)


def _keys(package: str, file: ConfigFile) -> list[str]:
    content: dict[str, Any] = yaml.safe_load(file.text) or {}
    width = max(80, min(shutil.get_terminal_size((120, 20)).columns, 140))
    lines = []
    for key, comment in file.comments().items():
        if key in ("defaults", "hydra", "auto", "priority") or key.startswith("_"):
            continue
        value = content.get(key)
        shown = f"{package}.{key}" if package else key
        shown += f"={_value(value)}"
        lines += textwrap.wrap(comment, width, initial_indent=f"  {shown:<36} ", subsequent_indent=" " * 39) or [
            f"  {shown}"
        ]
    return lines


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
