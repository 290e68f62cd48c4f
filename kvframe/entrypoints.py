"""Entry points of what is installed, from the metadata on disk; nothing is imported.

`importlib.metadata.entry_points` parses the metadata of every installed package, and importing it alone takes longer
than all the rest of a start. Here the same files are looked at, in the same order, and only those that name the group
are read to the end. What is no plain folder (zip files, finders of other tools) is left to `importlib.metadata`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

_STDLIB = os.path.dirname(os.__file__)
_NOTHING = {_STDLIB, os.path.join(_STDLIB, "lib-dynload")}  # on every sys.path, and nothing is installed there


@dataclass(frozen=True)
class Point:
    """One entry point: `name = value` of an installed distribution. `value` is "module" or "module:object"."""

    name: str
    value: str
    distribution: str = "?"
    version: str = "?"

    @property
    def module(self) -> str:
        """Name of the module."""
        return self.value.partition("[")[0].partition(":")[0].strip()

    def load(self) -> Any:
        """The module or object, imported now."""
        path = self.value.partition("[")[0].partition(":")[2].strip()
        found = importlib.import_module(self.module)
        for attribute in path.split(".") if path else ():
            found = getattr(found, attribute)
        return found


def installed(group: str) -> list[Point]:
    """The entry points of a group. Of distributions with one name the first on `sys.path` counts, as for imports."""
    found: list[Point] = []
    seen: set[str] = set()
    for entry in sys.path:
        if not isinstance(entry, str) or entry in _NOTHING:
            continue
        if entry.lower().endswith(".egg") or os.path.isfile(entry):
            found += _by_library(group, seen, path=[entry])
            continue
        for folder, stem in _metadata(entry or "."):
            name = _normal(stem.partition("-")[0])
            if name not in seen:
                seen.add(name)
                found += _read(group, folder, stem)
    for finder in sys.meta_path:
        if finder is not PathFinder and hasattr(finder, "find_distributions"):
            found += _by_library(group, seen, finder=finder)
    return found


def _metadata(entry: str) -> Iterator[tuple[str, str]]:
    """(path, name without ending) of the metadata folders in a folder of `sys.path`."""
    try:
        with os.scandir(entry) as items:
            for item in items:
                if item.name.endswith((".dist-info", ".egg-info")):
                    yield item.path, item.name.rpartition(".")[0]
    except OSError:  # is not there, or may not be read
        return


def _read(group: str, folder: str, stem: str) -> list[Point]:
    try:
        with open(os.path.join(folder, "entry_points.txt"), "rb", buffering=0) as file:
            content = file.read()
    except OSError:  # it has none
        return []
    if f"[{group}]".encode() not in content:
        return []
    name, _, version = stem.partition("-")
    for file in ("METADATA", "PKG-INFO"):
        headers = _headers(os.path.join(folder, file))
        name, version = headers.get("name", name), headers.get("version", version)
    return [Point(key, value, name, version or "?") for key, value in _pairs(content.decode(), group)]


def _headers(path: str) -> dict[str, str]:
    """The lines `Key: value` at the head of a file; {} where there is none."""
    found: dict[str, str] = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                key, colon, value = line.partition(":")
                if not colon:
                    break
                found.setdefault(key.strip().lower(), value.strip())
    except OSError:
        pass
    return found


def _pairs(text: str, group: str) -> Iterator[tuple[str, str]]:
    """The lines `name = value` of one section of an entry_points.txt."""
    section = None
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif section == group and "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield name.strip(), value.strip()


def _by_library(group: str, seen: set[str], finder: Any = None, **context: Any) -> list[Point]:
    """The same from `importlib.metadata`, for whatever it can read and we cannot."""
    from importlib import metadata

    if finder is None:
        distributions = metadata.distributions(**context)
    else:
        distributions = finder.find_distributions(metadata.DistributionFinder.Context())
    found: list[Point] = []
    for distribution in distributions:
        name, version = (distribution.metadata.get(key) or "?" for key in ("Name", "Version"))  # a broken one has none
        if _normal(name) not in seen:
            seen.add(_normal(name))
            points = distribution.entry_points.select(group=group)
            found += [Point(point.name, point.value, name, version) for point in points]
    return found


def _normal(name: str) -> str:
    """One spelling of a distribution's name, whatever its case and its separators."""
    return name.replace("-", "_").replace(".", "_").lower()
