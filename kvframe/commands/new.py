"""`kvframe new`: writes a package with a part of one's own, which works as it is."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from kvframe.errors import ConfigError
from kvframe.jobs import Run
from kvframe.plugins import plugins
from kvframe.scaffold import kinds, words, write

EXAMPLE = "kvframe new mine --kind codec"


def run(cfg: DictConfig, job: Run) -> int:
    """Writes the package and says what to do with it."""
    if cfg.name is None:
        raise ConfigError("the part has no name", fix=EXAMPLE)
    if cfg.kind is None:
        fix = f"kvframe new {cfg.name} --kind codec"
        raise ConfigError(f"{cfg.name}: which kind of part?", options=kinds(), fix=fix)
    name, kind = str(cfg.name), str(cfg.kind)
    folder = write(name, kind, Path(cfg.out or ".").expanduser(), plugins())
    use = words(name, kind)["use"]
    print(f"written: {folder}\n")
    print(f"  pip install -e {folder}")
    print(f'  kvframe generate {use} prompt="Once upon a time"')
    print(f"  python -m pytest {folder}")
    return 0
