"""The process of a command: `kvframe`, `python -m kvframe`."""

import atexit
import gc
import sys

THRESHOLDS = 200_000, 30, 30  # young objects before a collection, and collections before one of older objects


def main() -> int:
    """Runs the command of `sys.argv` and answers its exit code.

    torch and transformers make two million objects that stay. Looking through them again and again for cycles takes a
    second while they are imported, and another one when the process ends.
    """
    gc.set_threshold(*THRESHOLDS)
    atexit.register(gc.freeze)
    from kvframe.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
