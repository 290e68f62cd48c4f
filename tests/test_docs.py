"""Every code block of the documents runs: shell lines that begin with `kvframe`, and Python.

Models are swapped for a tiny one, so that this is about what is written and not about weights. Blocks of other kinds
(a drawing, YAML or TOML of a plugin, `pip`) are fenced without `sh` or `python` and are not run.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from kvframe.cli import main

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TRACE = '{{"timestamp": {0}, "input_length": 1024, "output_length": 16, "hash_ids": [1, {0}]}}\n'


def blocks(language: str) -> list:
    found = []
    for doc in DOCS:
        for i, (kind, text) in enumerate(FENCE.findall(doc.read_text(encoding="utf-8"))):
            if kind == language:
                found.append(pytest.param(text, id=f"{doc.stem}-{i}"))
    return found


def commands(text: str) -> list[list[str]]:
    """The `kvframe` lines of a block, as arguments, with a tiny model where one would be loaded."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("kvframe ")]


def tiny(arguments: list[str]) -> list[str]:
    command, rest = arguments[0], arguments[1:]
    if command in ("list", "simulate", "new", "plan") or any(a.startswith("-") and a != "-m" for a in rest):
        return arguments
    kept = [a for a in rest if not a.startswith(("model=", "model."))]
    small = ["model=random", "model.shape=tiny", "kernel=reference", "cache.memory=32MiB"]
    if not any(a.startswith("engine.max_len") for a in kept):
        small.append("engine.max_len=512")
    if command in ("generate", "inspect") and not any(a.startswith("sampling.max_new_tokens") for a in kept):
        small.append("sampling.max_new_tokens=3")
    return [command, *small, *kept]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with what the documents name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    Path("trace.jsonl").write_text("".join(TRACE.format(i) for i in range(3)))
    return tmp_path


@pytest.mark.parametrize("text", blocks("sh"))
def test_commands_run(text, here, capsys):
    found = commands(text)
    assert found, "a block of kind sh without a command of kvframe"
    for arguments in found:
        code = main(tiny(arguments))
        assert code == 0, f"kvframe {shlex.join(arguments)}: {capsys.readouterr().err}"


def test_documents_are_found():
    assert {"architecture", "strategies"} <= {doc.stem for doc in DOCS}
    assert blocks("sh")
