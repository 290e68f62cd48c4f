"""Fixtures that several test files use."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

# Two test processes with two threads each on two cores wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

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
        info = root / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[kvframe]\n{name} = {package.name}\n")
        monkeypatch.syspath_prepend(str(root))
        plugins.plugins(reload=True)
        return package.name

    yield make
    for module in [m for m in sys.modules if getattr(sys.modules[m], "__file__", None) and _inside(m, tmp_path)]:
        del sys.modules[module]
    monkeypatch.undo()
    plugins.plugins(reload=True)


def _inside(module: str, folder: Path) -> bool:
    return str(sys.modules[module].__file__).startswith(str(folder))
