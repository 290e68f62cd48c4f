"""What a child process of the coverage tool may be, in tests: light, so that it starts at once."""

from __future__ import annotations

import os
import time


def serve(line) -> None:
    """Answers names, unless they say what to do instead."""
    line.send(None)
    while True:
        name = line.recv()
        if name == "Crash":
            os._exit(3)
        if name == "Kill":
            os.kill(os.getpid(), 9)
        if name == "Hang":
            time.sleep(600)
        line.send({"architecture": name, "status": "exact", "reason": str(os.getpid()), "seconds": 0.1, "configs": []})


def serve_never(line) -> None:
    """Ends before it is ready."""
