"""A pytest process over one file of this folder."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def run(file: str, marker: str, environment: dict[str, str]) -> None:
    """Runs the tests of a file that have the marker; fails with what it said when one fails or none ran."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marker]
    done = subprocess.run(
        [*command, str(FOLDER / file)], env=mine | environment, capture_output=True, text=True, cwd=FOLDER.parent.parent
    )
    said = done.stdout[-8000:] + done.stderr[-2000:]
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), said
