"""Architectures run in a child process, one after the other: one that crashes, hangs or eats the memory ends the child,
gets its row, and the next child goes on behind it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable
from typing import Any

TIMEOUT = 120.0  # seconds for one architecture
START = 300.0  # seconds for a child to import torch and transformers
MEMORY = 12 << 30  # bytes of address space of a child


class Worker:
    """A child that classifies. `with Worker() as worker: worker.classify(name)`.

    Args:
        serve: what the child runs: answers on a connection, None first (when it is ready), then a row for each name.
    """

    def __init__(self, serve: Callable | None = None, timeout: float = TIMEOUT):
        self.serve, self.timeout = serve or _serve, timeout
        self.process = self.line = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self._end()

    def classify(self, name: str) -> dict[str, Any]:
        """The row of an architecture. Never raises for what happens in the child."""
        try:
            self._start()
            self.line.send(name)
            if not self.line.poll(self.timeout):
                self._end()
                return lost(name, f"it took longer than {self.timeout:g} seconds", self.timeout)
            return self.line.recv()
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            self._end()
            return lost(name, f"its process ended with {f'signal {-code}' if (code or 0) < 0 else f'exit code {code}'}")

    def _start(self) -> None:
        if self.process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=self.serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        if not self.line.poll(START):
            raise OSError("the child did not start")
        self.line.recv()

    def _end(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(OSError):
            self.line.close()
        self.process.kill()
        self.process.join()
        self.process = self.line = None


def lost(name: str, why: str, seconds: float = 0.0) -> dict[str, Any]:
    """The row of an architecture that gave no answer."""
    return {"architecture": name, "status": "wrong", "reason": why, "seconds": seconds, "configs": []}


def rows(names: Iterable[str], timeout: float = TIMEOUT) -> Iterable[dict[str, Any]]:
    """The row of each architecture, as they come."""
    with Worker(timeout=timeout) as worker:
        for name in names:
            yield worker.classify(name)


def _serve(line) -> None:
    """The child's loop."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # no such limit on this system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import warnings

    import torch
    import transformers

    from kvframe.testing.coverage.classify import classify

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    line.send(None)
    while True:
        try:
            name = line.recv()
        except EOFError:
            return
        line.send(classify(name))
