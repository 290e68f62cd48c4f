"""What commands show and write: tables for people, JSON and CSV for machines, bytes in units."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvframe.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from rich.console import Console


PICTURES = (".png", ".svg", ".pdf")
PATIENCE = 2.0  # seconds before a progress bar is shown

# a list of numbers over several lines; line ends within texts are escaped, so it is never part of one
_NUMBERS = re.compile(r"\[\n\s+([-+.\deE]+(?:,\n\s+[-+.\deE]+)*)\n\s+\]")


def human_bytes(n: float) -> str:
    """`1536` -> "1.50 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"


def human_seconds(seconds: float | None) -> str:
    """`0.0123` -> "12.3 ms"; None -> "-"."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def console(*, stderr: bool = False) -> Console:
    """A rich console without surprises: no markup or highlighting of what models write. Wide when it is no terminal,
    so that a pipe sees whole lines."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else 200
    return Console(stderr=stderr, width=width, markup=False, highlight=False, soft_wrap=False)


def table(
    rows: Iterable[Sequence[Any]],
    columns: Sequence[str],
    *,
    title: str | None = None,
    right: Iterable[str] = (),
    whole: Iterable[str] = (),
):
    """A rich table of texts. `right` names the columns that are aligned to the right, `whole` those that are never
    broken into lines, however narrow the terminal is."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in columns:
        made.add_column(
            column, justify="right" if column in set(right) else "left", overflow="fold", no_wrap=column in set(whole)
        )
    for row in rows:
        made.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    return made


WORD = 18


def fitted(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    width: int,
    name: str,
    droppable: Sequence[str],
    gap: int = 2,
) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a table that is at most `width` wide: words of up to WORD letters in the column `name` must
    have room, or columns are left out, in the order of `droppable`.

    Args:
        gap: spaces between two columns.
    """
    from rich.cells import cell_len

    texts = {column: [column, *(str(row[i]) for row in rows)] for i, column in enumerate(columns)}
    texts[name] = [word for text in texts[name] for word in text.split()]
    need = {column: max(map(cell_len, texts[column])) + gap for column in columns}
    need[name] = min(need[name], WORD + gap)
    kept = list(columns)
    for column in droppable:
        if sum(need[c] for c in kept) <= width:
            break
        if column in kept:
            kept.remove(column)
    places = [columns.index(column) for column in kept]
    return kept, [[row[i] for i in places] for row in rows]


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr: yields what is to be told of every n units of work that are done. Nothing where stderr is no
    terminal, or where the bar would flash by."""
    if not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console(stderr=True), transient=True)
    task, done, began, shown = bar.add_task(title, total=total), 0, time.perf_counter(), False

    def advance(n: int) -> None:
        nonlocal done, shown
        done += n
        if not shown and time.perf_counter() - began > PATIENCE:
            bar.start()
            shown = True
        if shown:
            bar.update(task, completed=done)

    try:
        yield advance
    finally:
        if shown:
            bar.stop()


# -- files ---------------------------------------------------------------------------------------------------


def check_out(path: Path, key: str = "out", example: str = "run.json") -> Path:
    """Refuses a result path that cannot be written, before the work is done. `example`: what would do.

    Raises:
        ConfigError: it is a folder, or lies in something that is not a folder.
    """
    if path.is_dir():
        raise ConfigError(f"{key}={path} is a folder", fix=f"{key}={path / example}")
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    try:  # the only question that has one answer on every file system
        with tempfile.TemporaryFile(dir=parent):
            return path
    except OSError as error:
        reason = f"{key}={path} cannot be written: {parent} is not a folder that you may write to ({error.strerror})"
        raise ConfigError(reason, fix=f"{key}={example}") from error


def check_ending(key: str, value: str | None, endings: Sequence[str]) -> None:
    """Refuses the name of a result file whose kind is not known. ConfigError with those that are."""
    if value and Path(value).suffix.lower() not in endings:
        fix = f"{key}={Path(value).stem or key}{endings[0]}"
        raise ConfigError(f"{key}={value} has the ending {Path(value).suffix!r}", options=endings, fix=fix)


def write_text(path: Path | str, text: str) -> Path:
    """Writes a file whole or not at all: to a neighbour first, which then takes the name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except BaseException:  # Ctrl-C too
        draft.unlink(missing_ok=True)
        raise
    return path


def write_json(path: Path | str, value: Any) -> Path:
    """Strict JSON: NaN and infinities become null. Lists of numbers stand on one line."""
    text = json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    return write_text(path, text + "\n")


def write_csv(path: Path | str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """One line per row; the columns are the keys of all rows in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return write_text(path, text.getvalue())


def figure_class():
    """matplotlib's Figure. MissingPackageError where it is not installed: better said before the work than after."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "plot= needs the package 'matplotlib', which is not installed", fix='pip install "kvframe[plots]"'
        ) from error
    return Figure


def save_figure(figure, path: Path) -> None:
    """Writes the picture whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(draft, format=path.suffix[1:].lower(), dpi=150)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_result(path: Path, rows: Sequence[Mapping[str, Any]], value: Any) -> Path:
    """The rows as CSV where the path ends in .csv, else the value as JSON."""
    return write_csv(path, rows) if path.suffix.lower() == ".csv" else write_json(path, value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def versions() -> dict[str, str | None]:
    """Versions that a result depends on; read without importing anything."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for name in ("kvframe", "torch", "transformers", "numpy", "numba", "hydra-core"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {**found, "python": platform.python_version(), "platform": platform.platform()}
