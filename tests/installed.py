"""What an install leaves behind, without pip."""

from __future__ import annotations

from pathlib import Path


def metadata(folder: Path, name: str, version: str, points: str) -> None:
    """What pip leaves beside a package. points: the lines of its entry points in the group `kvframe`."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[kvframe]\n{points}\n")
