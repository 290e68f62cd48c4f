"""The folder of results: written after every run, whole or not at all, and read again by `resume=true`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvframe.comparison.candidates import differences
from kvframe.comparison.summary import rows
from kvframe.errors import ConfigError
from kvframe.report import write_csv, write_json

SCHEMA = 2
JSON, CSV = "results.json", "results.csv"


class Store:
    """Where results go.

    Args:
        path: of results.json, or None: nothing is written.
        resume: begin with what is there.

    Raises:
        ConfigError: resume without a path, or a file there that is none of ours.
    """

    def __init__(self, path: Path | None, resume: bool):
        if resume and path is None:
            raise ConfigError("resume=true goes on with the results of out=, which is not given", fix="out=results/")
        self.path = path
        self.before: dict[str, Any] | None = _read(path) if resume and path.exists() else None

    def write(self, results: dict[str, Any]) -> None:
        """results.json and results.csv, as far as there is anything."""
        results["rows"] = rows(results)
        if self.path is not None:
            write_json(self.path, results)
            write_csv(self.path.with_name(CSV), results["rows"])


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", fix="resume=false, or another out=") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ConfigError(
            f"{path} is not a results.json of this kvframe compare (schema {SCHEMA})",
            fix="resume=false, or another out=",
        )
    return found


def take_over(before: dict[str, Any], results: dict[str, Any], where: Path) -> None:
    """Puts what an earlier comparison has measured into `results`. What is measured once is kept only when it was
    measured in the same way; candidates that are not asked for any more are kept as they are.

    Raises:
        ConfigError: something that runs depend on has changed; the message names what.
    """
    changed = [
        *differences(before["config"]["model"], results["config"]["model"], "model"),
        *differences(before["config"]["workload"], results["config"]["workload"], "workload"),
        *differences(before["settings"]["clock"], results["settings"]["clock"], "engine.clock"),
    ]
    if not changed and before["workload"]["digest"] != results["workload"]["digest"]:
        changed = ["the workload's prompts: others there"]
    old = {candidate["name"]: candidate for candidate in before["candidates"]}
    new = {candidate["name"]: candidate for candidate in results["candidates"]}
    for name in old.keys() & new.keys():
        changed += differences(old[name]["config"], new[name]["config"], name)
    if changed:
        raise ConfigError(
            f"{where} was measured under another config: {'; '.join(changed)}",
            fix="another out=, or resume=false, which begins anew",
        )
    if new.get(before["reference"], {}).get("exact"):
        results["reference"] = before["reference"]  # what was held against it stays comparable
    results["candidates"] += [candidate for name, candidate in old.items() if name not in new]
    for name in old.keys() & new.keys():
        new[name]["notes"] = list(dict.fromkeys([*new[name]["notes"], *old[name]["notes"]]))
    results["runs"], results["outputs"] = before["runs"], before["outputs"]
    for once in ("timeline", "memory"):
        results[once] = {**before[once], **results[once]}
    same = ("quality_tokens", "text")
    if before["reference"] == results["reference"] and all(
        before["settings"][key] == results["settings"][key] for key in same
    ):
        results["quality"] = before["quality"]
    for candidate in results["candidates"]:
        candidate["reference"] = candidate["name"] == results["reference"]
