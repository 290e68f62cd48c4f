"""Runs every example of this folder, one after another, and writes one page of what they found.

python examples/claims/all.py --out claims --page docs/claims.md
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ORDER = (
    "no_cache", "kv_bytes", "gpt3_bytes", "kv_overtakes", "int8_half", "window_quarter", "q_cache", "interleaved_kv",
    "granularity", "paging_waste", "prefix_reuse", "batch_reads", "four_bytes",
)  # fmt: skip
HEAD = """# Claims of the field, put to the test

What is often said about KV caches, and what kvframe measured of it. Each section was written by the command that
stands in it; `python examples/claims/all.py` runs them all. Times are medians on one machine and differ on yours;
counts of bytes and tokens do not.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="claims", help="folder for pictures and records")
    parser.add_argument("--page", help="Markdown file for all of it; default: FOLDER/claims.md")
    parser.add_argument("--only", nargs="*", choices=ORDER, default=ORDER)
    args = parser.parse_args()
    failed = []
    for name in args.only:
        began = time.perf_counter()
        print(f"-- {name}", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, str(HERE / f"{name}.py"), "--out", args.out]).returncode:
            failed.append(name)
        print(f"-- {name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    records = [(n, Path(args.out) / f"{n}.json") for n in ORDER]
    found = [(name, json.loads(path.read_text())) for name, path in records if path.exists()]
    page = Path(args.page or Path(args.out) / "claims.md")
    page.write_text(markdown(found), encoding="utf-8")
    print(f"written: {page}", file=sys.stderr)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def markdown(records: list[tuple[str, dict]]) -> str:
    parts = [HEAD]
    for name, record in records:
        options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in record["options"].items())
        lines = [f"## {record['claim']}", "", "| what | claimed | measured | verdict |", "|---|---|---|---|"]
        for row in record["rows"]:
            lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row.values()) + " |")
        lines += ["", *record["notes"], "", f"`python examples/claims/{name}.py {options}`".replace(" `", "`")]
        parts.append("\n".join(lines) + "\n")
    if records:
        versions = ", ".join(f"{key} {value}" for key, value in records[-1][1]["versions"].items() if value)
        parts.append(f"Made with {versions}.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    main()
