"""A folder per converted model in the user's cache, written once, atomically, and checked on every load.

    $KVFRAME_CACHE, else $XDG_CACHE_HOME/kvframe, else ~/.cache/kvframe
        smollm2-135m-instruct-b179c952-1/    model.safetensors, config.json, tokenizer files,
                                             manifest.json (sha256 of every file, versions)
        smollm2-135m-instruct-b179c952-1.lock, .verified

A conversion writes a temporary folder beside it and renames it, so a folder with the final name is complete. A lock
keeps two processes from doing the same work; where locks do not work, both convert and one of them wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvframe.errors import ConfigError

MANIFEST = "manifest.json"


def cache_folder(given: str | os.PathLike | None = None) -> Path:
    """Where converted models live."""
    if given:
        return Path(given).expanduser()
    if os.environ.get("KVFRAME_CACHE"):
        return Path(os.environ["KVFRAME_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvframe"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def problem(folder: Path) -> str | None:
    """Why the folder cannot be used; None when every file is what the manifest says."""
    if not folder.is_dir():
        return "not converted yet"
    try:
        files = json.loads((folder / MANIFEST).read_text("utf-8"))["sha256"]
        with ThreadPoolExecutor(2) as pool:
            found = dict(zip(files, pool.map(lambda name: sha256(folder / name), files), strict=True))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable ({type(error).__name__}: {error})"
    wrong = [name for name, digest in files.items() if found[name] != digest]
    return f"changed since it was written: {', '.join(wrong)}" if wrong or not files else None


def converted(folder: Path, convert: Callable[[Path], dict], what: str) -> Path:
    """The folder, converted first when it is missing or damaged.

    Args:
        convert: writes all files into the given empty folder; answers what to note in the manifest.
        what: name of the model for the messages on stderr.
    Raises: ConfigError when the folder cannot be written.
    """
    if problem(folder) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(folder.name + ".lock")):
            why = problem(folder)  # another process may have done it meanwhile
            if why is not None:
                _convert(folder, convert, what, why)
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be converted into {str(folder)!r}: {error}",
            fix="free some space there, or set KVFRAME_CACHE to a folder that can be written",
        ) from error
    return folder


def _convert(folder: Path, convert, what: str, why: str) -> None:
    again = folder.exists()
    say(f"{what}: {f'the copy in {folder} is {why}; converting again' if again else f'converting once into {folder}'}")
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        notes = convert(temporary)
        files = sorted(p.name for p in temporary.iterdir() if p.is_file())
        manifest = {"sha256": {name: sha256(temporary / name) for name in files}, **notes}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2), "utf-8")
        temporary.chmod(0o755)
        if again:
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
            folder.rename(old / "folder")
            shutil.rmtree(old, ignore_errors=True)
        try:
            temporary.rename(folder)
        except OSError:
            if problem(folder) is not None:  # else another process was faster, and its result is as good
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    say(f"{what}: converted")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _lock(path: Path):
    from filelock import FileLock

    return FileLock(str(path))
