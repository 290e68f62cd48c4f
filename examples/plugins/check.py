"""Builds a wheel of kvframe and of each package in this folder, installs all of them into a fresh environment, and
there runs each package's tests and one `kvframe generate` with it.

    python examples/plugins/check.py

torch and the other dependencies are those of the environment that runs this; kvframe itself is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
USES = {
    "hadamard": ["cache/codec=hadamard", "cache.num_blocks=32"],
    "strided": [
        "cache/retention=strided",
        "cache.num_blocks=32",
        "cache.retention.window=8",
        "cache.retention.block=4",
    ],
    "sieve": ["cache=radix", "cache/eviction=sieve", "cache.num_blocks=32"],
    "dictionary": ["cache=dictionary"],
}
TINY = ["model=random", "model.shape=tiny", "kernel=reference", "engine.max_len=128", "sampling.max_new_tokens=8"]


def call(*command, cwd: Path) -> str:
    """Runs a command, shows it, and answers its output; ends everything when it fails."""
    print(f"$ {' '.join(map(str, command[:6]))} ...", flush=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


def main() -> None:
    packages = sorted(path.parent for path in HERE.glob("*/pyproject.toml"))
    assert {path.name for path in packages} == set(USES), "a package without an example of its use here, or the reverse"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        call(*pip, "wheel", "--quiet", "--no-deps", "-w", "wheels", ROOT, *packages, cwd=work)
        call(sys.executable, "-m", "venv", "--without-pip", "env", cwd=work)
        python = work / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
        (site,) = (work / "env").glob("[Ll]ib/**/site-packages")
        wheels = sorted((work / "wheels").glob("*.whl"))
        call(*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", *wheels, cwd=work)
        (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])
        where = call(python, "-c", "import kvframe; print(kvframe.__file__)", cwd=work)
        assert where.startswith(str(site.resolve())), f"this is not the wheel: {where}"
        shown = call(python, "-m", "kvframe", "list", "--plugins", cwd=work)
        for package in packages:
            name = package.name
            assert f"kvframe-{name}" in shown, shown
            call(python, "-m", "kvframe", "generate", *TINY, *USES[name], "prompt=Hello", cwd=work)
            print(call(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", package / "tests", cwd=work), end="")
    print(f"{len(packages)} packages work as wheels beside the wheel of kvframe")


if __name__ == "__main__":
    main()
