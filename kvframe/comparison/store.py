"""The folder of results: written after every run, whole or not at all, and read again by `resume=true`."""

from __future__ import annotations

import itertools
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

    Attributes:
        kept: where results that were there and are not resumed are now; None: there were none.

    Raises:
        ConfigError: resume without a path, or a file there that is none of ours.
    """

    def __init__(self, path: Path | None, resume: bool):
        if resume and path is None:
            raise ConfigError("resume=true goes on with the results of out=, which is not given", fix="out=results/")
        self.path, self.kept = path, None
        there = path is not None and path.exists()
        self.before: dict[str, Any] | None = _read(path) if resume and there else None
        self._aside = there and not resume

    def write(self, results: dict[str, Any]) -> None:
        """results.json and results.csv, as far as there is anything."""
        results["rows"] = rows(results)
        if self.path is not None:
            if self._aside:
                self.kept, self._aside = _put_aside(self.path), False
            write_json(self.path, results)
            write_csv(self.path.with_name(CSV), results["rows"])


def _put_aside(path: Path) -> Path:
    """Results of an earlier comparison, which was not resumed, under another name."""
    free = next(other for n in itertools.count(1) if not (other := path.with_name(f"results-{n}.json")).exists())
    return path.rename(free)


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
    machine = [key for key in ("cores", "threads", "gpu") if before["machine"][key] != results["machine"][key]]
    changed += [f"machine.{key}: {before['machine'][key]} there, {results['machine'][key]} here" for key in machine]
    old = {candidate["name"]: candidate for candidate in before["candidates"]}
    new = {candidate["name"]: candidate for candidate in results["candidates"]}
    for name in old.keys() & new.keys():
        changed += differences(old[name]["config"], new[name]["config"], name)
    if changed:
        raise ConfigError(
            f"{where} was measured under another config: {'; '.join(changed)}",
            fix="another out=, or resume=false, which begins anew",
        )
    if {**old, **new}.get(before["reference"], {}).get("exact"):
        results["reference"] = before["reference"]  # what was held against it stays comparable
    results["candidates"] += [candidate for name, candidate in old.items() if name not in new]
    for name in old.keys() & new.keys():
        new[name]["notes"] = list(dict.fromkeys([*new[name]["notes"], *old[name]["notes"]]))
    results["runs"], results["outputs"] = before["runs"], before["outputs"]
    for once in ("timeline", "memory"):
        results[once] = {**before[once], **results[once]}
    other = [key for key in ("quality_tokens", "text") if before["settings"][key] != results["settings"][key]]
    if before["reference"] == results["reference"] and not other:
        results["quality"] = before["quality"]
    elif before["quality"]:
        why = " and ".join(f"{key}={before['settings'][key]}" for key in other) or f"reference {before['reference']}"
        lost = [name for name in before["quality"] if name not in new]
        left = f"; of {', '.join(lost)} it is not known any more" if lost else ""
        results["notes"].append(f"quality: measured anew, there it was of another text ({why}){left}")
    for candidate in results["candidates"]:
        candidate["reference"] = candidate["name"] == results["reference"]
