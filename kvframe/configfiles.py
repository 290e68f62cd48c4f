"""The YAML files of a config folder, as files: who brings them, what they say, and the comments beside the keys.

Hydra composes; this is for what Hydra does not answer: `list`, the help texts and the candidates of `kernel=auto`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvframe.errors import PluginError

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z_][\w-]*):(?P<value>.*)$")
_PACKAGE = re.compile(r"\A(?:#.*\n)*?# *@package +(?P<package>\S+)")
_COMMENT = re.compile(r"(?:^|\s)#\s*(?P<text>.*)$")


@dataclass(frozen=True)
class ConfigFile:
    """One YAML file. `group` is e.g. "cache/layout" ("" for primary configs), `name` e.g. "paged"."""

    group: str
    name: str
    provider: str
    text: str

    @property
    def path(self) -> str:
        return f"{self.group}/{self.name}.yaml" if self.group else f"{self.name}.yaml"

    @property
    def head(self) -> list[str]:
        """The comment lines at the head of the file, less Hydra's directives."""
        lines = itertools.takewhile(lambda line: line.startswith("#"), self.text.splitlines())
        return [line.removeprefix("#").removeprefix(" ").rstrip() for line in lines if not line.startswith("# @")]

    @property
    def package(self) -> str | None:
        """Where its keys stand, if the file says so itself (`# @package a.b`): "" is the root."""
        match = _PACKAGE.search(self.text)
        return None if match is None else match["package"].replace("_global_", "")

    @property
    def headline(self) -> str:
        """What the file is, in one line, or ""."""
        return self.head[0] if self.head else ""

    @property
    def examples(self) -> list[str]:
        """Indented lines of the head."""
        return [line.strip() for line in self.head if line.startswith("  ")]

    def comments(self) -> dict[str, str]:
        """Top-level key -> the comment on its line."""
        found = {}
        for line in self.text.splitlines():
            match = _KEY.match(line)
            if match and not match["indent"]:
                comment = _COMMENT.search(match["value"])
                found[match["key"]] = comment["text"] if comment else ""
        return found


@dataclass(frozen=True)
class ConfigFolder:
    """A place with YAML files: `pkg://package.conf`, `file:///path` or a path."""

    path: str
    provider: str

    @property
    def root(self):
        """The folder as a pathlib-like object."""
        if not self.path.startswith("pkg://"):
            return Path(self.path.removeprefix("file://"))
        package = self.path.removeprefix("pkg://").replace("/", ".").rstrip(".")
        spec = find_spec(package)  # imports the packages above it, and not itself
        place = next(iter(spec.submodule_search_locations or ()), None) if spec is not None else None
        if place is not None and Path(place).is_dir():
            return Path(place)
        from importlib import resources  # a zip file, or whatever else a loader knows

        return resources.files(package)

    @property
    def url(self) -> str:
        """The folder as Hydra's search path writes it."""
        return self.path if "://" in self.path else f"file://{Path(self.path).absolute()}"

    def check(self) -> None:
        """Raises PluginError when Hydra would not find the folder."""
        if not isinstance(self.path, str):
            raise PluginError(f"kvframe_config_path() answers {self.path!r}; valid: 'pkg://package.conf' or a folder")
        try:
            there = self.root.is_dir()
        except (ImportError, TypeError, ValueError):
            there = False
        if not there:
            raise PluginError(f"kvframe_config_path() answers {self.path!r}, which does not exist")
        if self.path.startswith("pkg://") and not self.root.joinpath("__init__.py").is_file():
            raise PluginError(f"kvframe_config_path() answers {self.path!r}, which has no __init__.py")

    def walk(self, group: str = "") -> Iterator[ConfigFile]:
        """Every YAML file below `group`."""
        for where, entry in self._files(group):
            text = entry.read_text(encoding="utf-8")
            yield ConfigFile(where, entry.name.removesuffix(".yaml"), self.provider, text)

    def names(self) -> list[str]:
        """The paths of all YAML files, e.g. "cache/layout/mine.yaml"; nothing is read."""
        return [f"{group}/{entry.name}" if group else entry.name for group, entry in self._files("")]

    def _files(self, group: str) -> Iterator[tuple[str, Any]]:
        folder = self.root.joinpath(*group.split("/")) if group else self.root
        if not folder.is_dir():
            return
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if entry.is_dir() and not entry.name.startswith(("_", ".")):
                yield from self._files(f"{group}/{entry.name}" if group else entry.name)
            elif entry.name.endswith(".yaml"):
                yield group, entry
