"""One run of a command, or a sweep of them (`-m`), and where their results lie.

A single run writes where `out` says. Under `-m` a relative `out` lies in the folder of its job, and `sweep.json` beside
the folders tells what each job was:

    multirun/2026-01-31/12-00-00/
        sweep.json
        0/run.json
        1/run.json

Hydra wants to write files of its own; it does so in a temporary folder that is removed. Without `out` nothing stays.

A launcher (`hydra/launcher=ray`, `submitit_slurm`, ...) runs jobs in other processes, maybe on other machines. They get
copies of the Sweep, and leave what they did and printed as `job.json` in their temporary folder, where the first
process finds it. So that all of them see it, that folder then lies in `hydra.sweep.dir`, which must be a place that all
machines share.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from kvframe.errors import ConfigError, KVFrameError
from kvframe.report import check_out, write_json

Function = Callable[..., int]


class OutputClosed(BaseException):
    """Whoever read our output has had enough: ends a sweep, whatever jobs are left."""


class Run:
    """A single job. Hydra is kept from printing its errors: they are raised when it has returned."""

    def __init__(self):
        self._code, self._error = 0, None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def overrides(self, overrides: list[str]) -> list[str]:
        """What Hydra gets to see of the user's overrides."""
        return overrides

    def job(self, function: Function, cfg: Any) -> None:
        """Called by Hydra with the composed config."""
        try:
            self._code = function(cfg, self)
        except Exception as error:
            self._error = error

    def code(self) -> int:
        """The exit code; raises what the job raised."""
        if self._error is not None:
            raise self._error
        return self._code

    def out(self, value: str | None, key: str = "out", example: str = "run.json") -> Path | None:
        """Where a result goes that the user called `value` with the override `key`. `example`: what would do.

        Raises:
            ConfigError: it cannot be written; better said before the work than after.
        """
        return None if not value else check_out(Path(value).expanduser(), key, example)


class Sweep(Run):
    """The jobs of `-m`. A job that fails is recorded, and the others go on.

    Attributes:
        folder: hydra.sweep.dir as the user sees it; jobs: one record each.
        spread: a launcher runs the jobs in other processes.
    """

    def __init__(self, command, overrides: list[str]):
        super().__init__()
        from hydra.core.utils import setup_globals
        from hydra.types import RunMode

        from kvframe import config

        setup_globals()  # ${now:...}
        try:
            cfg = config.hydra_config(overrides, command.name, RunMode.MULTIRUN)
            self.folder = Path(cfg.hydra.sweep.dir).expanduser()
        except Exception as error:
            raise config.explained(error, overrides, command.name) from error
        _check_relative(cfg.get("out"))
        self.jobs: list[dict] = []
        self.spread = not cfg.hydra.launcher._target_.endswith(".BasicLauncher")
        self._wrote, self._process, self._temporary = False, os.getpid(), ""
        if self.spread:
            self.folder = self.folder.absolute()  # wherever the other processes stand

    def __enter__(self):
        made = [] if not self.spread else [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        if self.spread:
            check_out(self.folder / "sweep.json", "hydra.sweep.dir").parent.mkdir(parents=True, exist_ok=True)
        self._made = made  # the folders that were not there, the innermost first
        self._temporary = tempfile.mkdtemp(prefix="kvframe-", dir=self.folder if self.spread else None)
        return self

    def __exit__(self, *exc):
        self._gather()
        shutil.rmtree(self._temporary, ignore_errors=True)
        for folder in self._made:
            if any(folder.iterdir()):
                break
            folder.rmdir()

    def _gather(self) -> None:
        """Takes over what the jobs in other processes have left."""
        left = [json.loads(path.read_text()) for path in Path(self._temporary).glob("**/job.json")]
        for job in sorted(left, key=lambda job: job["record"]["num"]):
            record = job["record"]
            self._wrote = self._wrote or record["out"] is not None
            self.jobs.append(record)
            print(_title(record), file=sys.stderr, flush=True)
            print(job["printed"], end="", flush=True)
            if record["error"]:
                print(f"[job {record['num']}] failed: {record['error']}", file=sys.stderr, flush=True)
        if left:
            self._index()

    def overrides(self, overrides):
        kept = [o for o in overrides if o.lstrip("+").partition("=")[0] != "hydra.sweep.dir"]
        return [*kept, f"hydra.sweep.dir='{self._temporary}'"]

    def job(self, function, cfg):
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        self._subdir = os.path.relpath(hydra.runtime.output_dir, self._temporary)
        self._record = {"num": hydra.job.num, "overrides": list(hydra.overrides.task), "out": None}
        self._record |= {"status": "interrupted", "error": None}
        self.jobs.append(self._record)
        print(_title(self._record), file=sys.stderr)
        elsewhere, printed = os.getpid() != self._process, io.StringIO()
        try:
            with redirect_stdout(printed) if elsewhere else nullcontext():
                code = function(cfg, self)
            self._record["status"] = "completed" if code == 0 else "partial"
        except BrokenPipeError:
            raise OutputClosed from None
        except Exception as error:
            self._record |= {"status": "failed", "error": str(error)}
            if not isinstance(error, KVFrameError):
                self._record["error"] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            print(f"[job {hydra.job.num}] failed: {error}", file=sys.stderr)
        finally:
            if self._record["status"] in ("failed", "interrupted"):
                self._record["out"] = None
            if elsewhere:
                left = {"record": self._record, "printed": printed.getvalue()}
                write_json(Path(hydra.runtime.output_dir) / "job.json", left)
            else:
                self._index()

    def code(self):
        status = [job["status"] for job in self.jobs]
        if self._wrote:
            print(f"{len(status)} jobs in {self.folder / 'sweep.json'}", file=sys.stderr)
        if status and all(one == "failed" for one in status):
            return 2
        return 0 if all(one == "completed" for one in status) else 1

    def out(self, value, key="out", example="run.json"):
        if not value:
            return None
        path = _check_relative(value, key)
        self._record["out"] = os.path.join(self._subdir, path)
        self._wrote = True
        return check_out(self.folder / self._subdir / path, key, example)

    def _index(self) -> None:
        if self._wrote:
            write_json(self.folder / "sweep.json", {"jobs": self.jobs})


def _title(record: dict) -> str:
    return f"[job {record['num']}] {' '.join(record['overrides'])}"


def _check_relative(value: str | None, key: str = "out") -> Path | None:
    path = Path(value).expanduser() if value else None
    if path is not None and path.is_absolute():
        raise ConfigError(
            f"under -m every job would write the same file {key}={value}",
            fix=f"{key}={path.name} hydra.sweep.dir={path.parent}",
        )
    return path
