"""The Triton kernels in Triton's interpreter, or on the GPU where there is one.

They run in a process of their own (tests/triton_grids): the interpreter is chosen by the environment before triton is
imported, and in such a process nothing can be compiled ahead of time.
"""

from __future__ import annotations

import pytest
import torch
from triton_grids.child import run

ENVIRONMENT = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}


def test_attention_codes_and_numbers():
    run("grid_of_kernels.py", "not nightly", ENVIRONMENT)


def test_steps_of_engines():
    run("steps.py", "", ENVIRONMENT)


@pytest.mark.nightly
def test_the_whole_grid():
    run("grid_of_kernels.py", "nightly", ENVIRONMENT)


@pytest.mark.nightly
def test_contract():
    run("contract.py", "", ENVIRONMENT)
