"""Fixtures that several test files use."""

from __future__ import annotations

import os
import sys
import textwrap
import tomllib
from pathlib import Path

# Two test processes with two threads each on two cores wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from installed import metadata

os.environ.pop("COLUMNS", None)  # tables are as wide as in a pipe, whatever terminal the tests run in


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a plugin package for one test: `install(name, code, files, distribution=...)`.

    Makes the module `<name>_plugin`, its configs, and the metadata that a pip install would leave.
    """
    from kvframe import plugins

    def make(
        name: str, code: str = "", files: dict[str, str] | None = None, *, distribution=None, version="1.0", hook=True
    ):
        distribution = distribution or f"kv-{name}"
        root = tmp_path / distribution
        package = root / f"{distribution.replace('-', '_')}_module"
        conf = package / "conf"
        conf.mkdir(parents=True)
        (conf / "__init__.py").touch()
        for path, text in (files or {}).items():
            file = conf / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        head = "from kvframe.hookspecs import hookimpl\n"
        if hook:
            head += f"@hookimpl\ndef kvframe_config_path():\n    return 'pkg://{package.name}.conf'\n"
        (package / "__init__.py").write_text(head + textwrap.dedent(code))
        metadata(root, distribution, version, f"{name} = {package.name}")
        monkeypatch.syspath_prepend(str(root))
        plugins.plugins(reload=True)
        return package.name

    yield make
    _forget(tmp_path, monkeypatch)


@pytest.fixture
def editable(tmp_path, monkeypatch):
    """`editable(FOLDER)`: importable, and its plugin found, as after `pip install -e FOLDER`, for one test."""
    from kvframe import plugins

    def make(folder: Path) -> None:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        points = "\n".join(f"{key} = {value}" for key, value in project["entry-points"]["kvframe"].items())
        metadata(folder, project["name"], project["version"], points)
        monkeypatch.syspath_prepend(str(folder))
        plugins.plugins(reload=True)

    yield make
    _forget(tmp_path, monkeypatch)


def _forget(folder: Path, monkeypatch) -> None:
    """Takes what was installed in a folder away again."""
    from kvframe import plugins

    for module in [m for m in sys.modules if getattr(sys.modules[m], "__file__", None) and _inside(m, folder)]:
        del sys.modules[module]
    monkeypatch.undo()
    plugins.plugins(reload=True)


def _inside(module: str, folder: Path) -> bool:
    return str(sys.modules[module].__file__).startswith(str(folder))
