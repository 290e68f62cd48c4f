"""Whether FlashInfer can get at compiled kernels: it brings sources, and compiles them with nvcc on first use.

The package flashinfer-jit-cache brings them compiled.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

COMPILED = "flashinfer_jit_cache"
DEFAULT = "/usr/local/cuda"


def no_compiler() -> list[str]:
    """Why it cannot; empty when it can."""
    if importlib.util.find_spec(COMPILED) is not None or "FLASHINFER_NVCC" in os.environ or shutil.which("nvcc"):
        return []
    home = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or DEFAULT)
    if (home / "bin" / "nvcc").exists():
        return []
    return [
        f"flashinfer compiles its kernels with nvcc, which is neither on the PATH nor in {home}/bin "
        "(CUDA_HOME=FOLDER, or pip install flashinfer-jit-cache)"
    ]
