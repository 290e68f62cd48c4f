"""Event log: a line of JSON for each step, eviction and end of a request, in the order in which they happen.

    {"event": "start", "run": "3f2a91c0-0", "time": 1767225600.1, "kvframe": "0.1.0", "pid": 4711}
    {"event": "step", "run": "3f2a91c0-0", "time": ..., "step": 0, "requests": 2, "tokens": 31, "seconds": 0.021, ...}
    {"event": "evict", ..., "step": 1, "blocks": {"full": 3}, "bytes": 12288, "reason": "eviction"}
    {"event": "finish", ..., "id": "r0", "finish_reason": "length", "prompt_tokens": 15, "output_tokens": 16, ...}

A line is written whole and at once, without a buffer, so a process that is killed loses none that was written. A file
that is there is added to; `run` tells the runs apart, also of several engines that write to one file. No prompt and no
text is in it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from math import isfinite
from pathlib import Path
from typing import Any

from kvframe import __version__
from kvframe.errors import OptionError
from kvframe.hookspecs import hookimpl

_COUNT = itertools.count()
FINISH = ("id", "sample", "finish_reason", "cached_tokens", "preemptions", "ttft_s", "itl_s", "error")
BYTES = ("reserved", "used", "evictable", "tail")


class EventLog:
    """Writes the events of one engine.

    Args:
        path: the file. Folders on the way are made.
    Raises: OptionError when it cannot be written.
    """

    def __init__(self, path: str):
        self.run = f"{uuid.uuid4().hex[:8]}-{next(_COUNT)}"
        self._begun = False
        place = Path(path).expanduser().absolute()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(place, "ab", buffering=0)  # as long as the engine lives
            self._whole = _ends_with_newline(place)
        except OSError as error:
            why = f"cannot be written: {error.strerror}"
            raise OptionError("path", str(path), why, fix="{name}=events.jsonl") from error

    @hookimpl
    def kvframe_on_step(self, step, requests, tokens, seconds, stats):
        facts = {name: stats.total(name) for name in BYTES}
        counts = {"hit_tokens": stats.hit_tokens, "evictions": stats.evictions, "copies": stats.copies}
        self._write("step", step=step, requests=requests, tokens=tokens, seconds=seconds, **facts, **counts)

    @hookimpl
    def kvframe_on_evict(self, step, blocks, nbytes, reason):
        self._write("evict", step=step, blocks=blocks, bytes=nbytes, reason=reason)

    @hookimpl
    def kvframe_on_finish(self, output):
        facts = {name: getattr(output, name) for name in FINISH}
        counts = {"prompt_tokens": len(output.prompt_tokens), "output_tokens": len(output.output_tokens)}
        self._write("finish", **facts, **counts)

    def _write(self, event: str, **facts: Any) -> None:
        if not self._begun:
            self._begun = True
            self._line("start", kvframe=__version__, pid=os.getpid())
        self._line(event, **facts)

    def _line(self, event: str, **facts: Any) -> None:
        """One call of the system, so that whoever else adds to the file at this moment does not come in between."""
        row = {"event": event, "run": self.run, "time": time.time(), **facts}
        row = {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        line = line if self._whole else b"\n" + line  # behind a line that was not finished
        self._whole = False
        while line:  # a full disk may take a part of it, and raises the next time
            line = line[self._file.write(line) :]
        self._whole = True


def _ends_with_newline(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return True
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
