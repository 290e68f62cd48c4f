"""What `kvframe new` writes: a package with one part that works, from templates that lie here as data.

    package/          files that every package has
    codec/, ...       one folder per kind: part.py.tmpl, config.yaml.tmpl, and kind.yaml with the words of that kind

A template is a `string.Template`. A new kind is a new folder.
"""

from __future__ import annotations

import keyword
import re
import shutil
import string
import tempfile
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import yaml

from kvframe import API, __version__
from kvframe.create import nearest, resembling
from kvframe.errors import ConfigError
from kvframe.plugins import Plugins

COMMON = "package"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_VALUES = {"true", "false", "null", "nan", "inf"}  # on the command line these are values, not names


def kinds() -> list[str]:
    """What can be made: codec, layout, ..."""
    folders = (entry for entry in resources.files(__package__).iterdir() if entry.is_dir())
    return sorted(folder.name for folder in folders if folder.joinpath("kind.yaml").is_file())


def words(name: str, kind: str) -> dict[str, str]:
    """What stands for `$word` in the templates."""
    said = yaml.safe_load(_read(kind, "kind.yaml"))
    found = {
        "name": name,
        "kind": kind,
        "Class": _class(name, kind),
        "module": f"kvframe_{name}",
        "distribution": f"kvframe-{name.replace('_', '-').strip('-')}",
        "version": __version__,
        "api": str(API),
        "key": said["group"].replace("/", "."),
        "arguments": "self",  # of the factory in the tests
        "passed": "",
        "suite": "",  # what its class says beside that
    }
    return found | {word: string.Template(str(text)).substitute(found) for word, text in said.items()}


def files(name: str, kind: str) -> dict[str, str]:
    """Path within the package's folder -> content."""
    said = words(name, kind)
    module = said["module"]
    places = {
        "pyproject.toml": (COMMON, "pyproject.toml.tmpl"),
        "README.md": (COMMON, "README.md.tmpl"),
        ".gitignore": (COMMON, "gitignore.tmpl"),
        f"{module}/__init__.py": (COMMON, "init.py.tmpl"),
        f"{module}/{kind}.py": (kind, "part.py.tmpl"),
        f"{module}/conf/{said['group']}/{name}.yaml": (kind, "config.yaml.tmpl"),
        f"tests/test_{name}.py": (COMMON, "test.py.tmpl"),
    }
    made = {path: string.Template(_read(*place)).substitute(said) for path, place in places.items()}
    return made | {f"{module}/conf/__init__.py": ""}


def write(name: str, kind: str, out: Path, plugins: Plugins) -> Path:
    """Writes the package to `out / name` whole or not at all, and answers that folder.

    Args:
        plugins: whose names are taken.
    Raises:
        ConfigError: a kind or a name that cannot be, a name that is taken, a folder that is there or cannot be made.
    """
    check_kind(kind)
    check_name(name, kind, plugins)
    folder = out / name
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} is there already", fix="another name, --out=DIR, or remove it")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=out) as draft:
            for path, text in files(name, kind).items():
                target = Path(draft, name, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
            shutil.move(Path(draft, name), folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}", fix="--out=DIR") from error
    return folder


def check_kind(kind: str) -> None:
    """ConfigError when there is no such kind."""
    if kind not in kinds():
        close = resembling(kind, kinds()) or kinds()[:1]
        raise ConfigError(f"--kind {kind} does not exist", options=nearest(kind, kinds()), fix=f"--kind {close[0]}")


def check_name(name: str, kind: str, plugins: Plugins) -> None:
    """ConfigError when a part, its package and its config file cannot have this name."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or name in _VALUES:
        valid = "lower-case letters, digits and _, beginning with a letter, and no word of Python or YAML"
        fix = f"my_{plain}" if not _NAME.fullmatch(plain) or keyword.iskeyword(plain) or plain in _VALUES else plain
        raise ConfigError(f"{name!r} cannot be the name of a part", options=[valid], fix=f"kvframe new {fix}")
    group = words(name, kind)["group"]
    fix = f"another name, e.g. my_{name}"
    for plugin in plugins.loaded:
        if plugin.config and f"{group}/{name}.yaml" in plugin.config.names():
            raise ConfigError(f"{group}={name} is there already: the plugin {plugin} brings it", fix=fix)
    for plugin in (*plugins.loaded, *plugins.broken, *plugins.left_out):
        if plugin.name == name:
            raise ConfigError(f"a plugin is called {name} already: {plugin}", fix=fix)
    if find_spec(words(name, kind)["module"]) is not None:
        raise ConfigError(f"a module {words(name, kind)['module']} is installed already", fix=fix)


def _class(name: str, kind: str) -> str:
    """my_codec -> MyCodec; a name that the template uses for something else gets the kind behind it."""
    found = "".join(part.capitalize() for part in name.split("_"))
    taken = re.search(rf"\b{found}\b", _read(kind, "part.py.tmpl"))
    return f"{found}{kind.capitalize()}" if taken else found


def _read(folder: str, file: str) -> str:
    return resources.files(__package__).joinpath(folder, file).read_text(encoding="utf-8")
