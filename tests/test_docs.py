"""Every code block of the documents runs: shell lines that begin with `kvframe`, and Python.

Models are swapped for a tiny one, so that this is about what is written and not about weights. Blocks of other kinds
(a drawing, YAML or TOML of a plugin, `pip`) are fenced without `sh` or `python` and are not run.
"""

from __future__ import annotations

import contextlib
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


def lines(text: str) -> list[list[str]]:
    """The lines of a block as words; a comment behind them is none."""
    joined = text.replace("\\\n", " ").splitlines()
    return [words for line in joined if (words := shlex.split(line, comments=True))]


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


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.stem)
def test_commands_run(doc, here, editable, capsys):
    """In the order in which a reader runs them."""
    for kind, text in FENCE.findall(doc.read_text(encoding="utf-8")):
        if kind != "sh":
            continue
        found = lines(text)
        assert any(words[0] == "kvframe" for words in found), "a block of kind sh without a command of kvframe"
        for words in found:
            if words[:3] == ["pip", "install", "-e"]:
                editable(here / words[3])
            else:
                assert words[0] == "kvframe", f"this test cannot run {shlex.join(words)}"
                code = main(tiny(words[1:]))
                assert code == 0, f"{shlex.join(words)}: {capsys.readouterr().err}"


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.stem)
def test_python_runs(doc):
    names: dict = {"__name__": "docs"}
    for kind, text in FENCE.findall(doc.read_text(encoding="utf-8")):
        if kind == "python":
            exec(compile(text, f"{doc.name}", "exec"), names)
    suite = names.get("TestThirds")
    assert doc.stem != "plugins" or suite is not None
    if suite is not None:  # what the page calls proved is
        for name in [name for name in dir(suite) if name.startswith("test_")]:
            with contextlib.suppress(pytest.skip.Exception):  # what this codec does not claim
                getattr(suite(), name)()


def test_documents_are_found():
    assert {"architecture", "plugins", "strategies"} <= {doc.stem for doc in DOCS}
