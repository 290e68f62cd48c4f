"""The Triton kernels compiled ahead of time for chips that need not be there, in a process without the interpreter."""

from __future__ import annotations

import pytest
from triton_grids.child import run


def test_kernels_compile():
    run("grid_of_chips.py", "not nightly", {})


@pytest.mark.nightly
def test_the_whole_grid():
    run("grid_of_chips.py", "nightly", {})
