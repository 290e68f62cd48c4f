"""The command line of `python -m kvframe.testing.coverage`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvframe.report import check_out, console, progress, write_json, write_text
from kvframe.testing.coverage.report import COMMAND, TITLES, counts, markdown, result, versions
from kvframe.testing.coverage.worker import TIMEOUT, rows


def main(arguments: list[str] | None = None) -> int:
    """0: nothing is wrong; 1: something is; 2: the arguments are."""
    options = _parse(arguments)
    for path in (options.out, options.markdown):
        if path is not None:
            check_out(path, f"--{'out' if path is options.out else 'markdown'} ")
    from kvframe.testing.coverage.build import architectures

    known = list(architectures())
    names = options.only.split(",") if options.only else known
    if unknown := [name for name in names if name not in known]:
        print(f"no such architecture: {', '.join(unknown)}\n  valid: {', '.join(known)}", file=sys.stderr)
        return 2
    done = _finished(options.out) if options.resume else {}
    found = {name: done[name] for name in names if name in done}
    left = [name for name in names if name not in found]
    with progress("models", len(left)) as advance:
        for row in rows(left, options.timeout):
            found[row["architecture"]] = row
            advance(1)
            if options.out is not None:
                write_json(options.out, result([found[name] for name in names if name in found]))
            if row["status"] == "wrong":
                print(f"wrong: {row['architecture']}: {row['reason']}", file=sys.stderr, flush=True)
    ordered = [found[name] for name in names]
    if options.out is not None:
        write_json(options.out, result(ordered))
    if options.markdown is not None:
        write_text(options.markdown, markdown(ordered))
    n = counts(ordered)
    console().print(", ".join(f"{n[status]} {title.lower()}" for status, title in TITLES.items()))
    return 1 if n["wrong"] else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Runs a tiny model of every causal LM of transformers.")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the rows there, after each architecture")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write a page with tables there")
    parser.add_argument("--only", metavar="NAME,...", help="these model classes instead of all")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has from the same versions")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, metavar="SECONDS", help="for one architecture")
    return parser.parse_args(arguments)


def _finished(path: Path | None) -> dict[str, dict]:
    """Rows of an earlier run with the same versions that are not wrong."""
    if path is None or not path.is_file():
        return {}
    before = json.loads(path.read_text("utf-8"))
    if before.get("versions") != versions():
        return {}
    return {row["architecture"]: row for row in before["rows"] if row["status"] != "wrong"}


if __name__ == "__main__":
    raise SystemExit(main())
