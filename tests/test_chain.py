"""Chains by themselves: each operation, strided rows, outputs that are kept or not, any number of threads and rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kvframe.kernels import cpu_chain
from kvframe.kernels.cpu_chain import Chain, Instruction, Output, Rows, Scratch
from kvframe.kernels.cpu_linear import FewRows
from kvframe.kernels.cpu_norm import norm
from kvframe.kernels.cpu_rotary import rotate, rotate_plain

ROWS, WIDTH = 9, 48


def bf16(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def whole(buffer, width=WIDTH):
    return Rows(buffer, 0, width, width)


def flat(rows: Rows, kept=True):
    return Output(rows, (1, 0, rows.width), (0, rows.stride, 1), 1, kept)


def run(instructions, buffers, outputs, *inputs, rows=ROWS):
    return Chain(instructions, buffers, [x.shape[-1] for x in inputs], outputs, Scratch(rows))(*inputs)


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 9])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_a_gated_layer(threads, rows, monkeypatch):
    """norm, gate and up in one product, silu of one half times the other, down, and what came in added."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, weight, up, down = bf16(1, rows, WIDTH), bf16(WIDTH, seed=1), bf16(160, WIDTH, seed=2), bf16(WIDTH, 80, seed=3)
    bias = bf16(WIDTH, seed=4)
    into, out = FewRows([(up[:80], None), (up[80:], None)]), FewRows([(down, bias)])
    instructions = [
        Instruction(cpu_chain.NORM, whole(0), -1, more=(weight, 1e-5, 0.0)),
        Instruction(cpu_chain.LINEAR, whole(-1), -2, more=(into,)),
        Instruction(cpu_chain.SILU, Rows(-2, 0, 160, 80), -3),
        Instruction(cpu_chain.MULTIPLY, whole(-3, 80), -4, Rows(-2, 80, 160, 80)),
        Instruction(cpu_chain.LINEAR, whole(-4, 80), -5, more=(out,)),
        Instruction(cpu_chain.ADD, whole(0), -6, whole(-5)),
    ]
    (found,) = run(instructions, [WIDTH, 160, 80, 80, WIDTH, WIDTH], [flat(whole(-6))], x)
    assert found.shape == x.shape
    if rows:
        gate, lift = into(norm(x, weight, 1e-5, 0.0)).split(80, -1)
        wanted = x + out(F.silu(gate) * lift)
        assert (found - wanted).abs().max() <= 2**-7 * wanted.abs().max()


@pytest.mark.parametrize("rows", [1, 5])
def test_heads_are_turned_where_they_lie(rows):
    """Queries and keys are parts of one product's rows."""
    joined, cos, sin = bf16(1, rows, 3 * 32 + 8), bf16(1, rows, 32, seed=1), bf16(1, rows, 32, seed=2)
    instructions = [
        Instruction(cpu_chain.ADD, whole(0, 104), -1, whole(0, 104)),
        Instruction(cpu_chain.ROTATE, Rows(-1, 32, 104, 64), -2, more=(2, whole(1, 32), whole(2, 32))),
    ]
    shown = Output(whole(-2, 64), (1, 2, 0, 32), (0, 32, 64, 1), 2, True)
    (found,) = run(instructions, [104, 64], [shown], joined, cos, sin)
    heads = (joined + joined)[..., 32:96].view(1, rows, 2, 32).transpose(1, 2)
    for wanted in (rotate, rotate_plain):
        assert torch.equal(found, wanted(heads, cos.unsqueeze(1), sin.unsqueeze(1)))


def test_what_is_kept_stays_and_what_is_not_is_written_again():
    instructions = [
        Instruction(cpu_chain.ADD, whole(0), -1, whole(0)),
        Instruction(cpu_chain.MULTIPLY, whole(-1), -2, whole(-1)),
    ]
    kept, part = flat(whole(-1)), flat(Rows(-1, 8, WIDTH, 16))
    chain = Chain(instructions, [WIDTH, WIDTH], [WIDTH], [kept, part, flat(whole(-2), kept=False)], Scratch(ROWS))
    x, y = bf16(1, 4, WIDTH), bf16(1, 4, WIDTH, seed=1)
    first = chain(x)
    copies = [tensor.clone() for tensor in first]
    second = chain(y)
    assert torch.equal(first[0], copies[0]) and torch.equal(first[0], x + x)
    assert torch.equal(first[1], copies[1]) and torch.equal(first[1], (x + x)[..., 8:24])
    assert torch.equal(second[2], (y + y) * (y + y)) and torch.equal(first[2], second[2])


def test_rows_may_be_others_in_each_call():
    chain = Chain(
        [Instruction(cpu_chain.SILU, whole(0), -1), Instruction(cpu_chain.ADD, whole(-1), -2, whole(0))],
        [WIDTH, WIDTH], [WIDTH], [flat(whole(-2))], Scratch(ROWS),
    )  # fmt: skip
    for rows in (3, 1, 9, 0, 1, 2):
        x = bf16(1, rows, WIDTH, seed=rows)
        (found,) = chain(x)
        assert found.shape == x.shape and torch.allclose(found.float(), (F.silu(x) + x).float(), rtol=2**-7)
    with pytest.raises(ValueError, match="at most 9 rows got 10"):
        chain(bf16(1, 10, WIDTH))
    (found,) = chain(bf16(1, 2, WIDTH))  # and it goes on
    assert found.shape == (1, 2, WIDTH)


def test_edges_of_numbers():
    """Infinities and NaN come out where torch has them."""
    x = torch.tensor([0.0, -0.0, 1e30, -1e30, float("inf"), -float("inf"), float("nan"), -90.0]).bfloat16()[None, None]
    (found,) = run([Instruction(cpu_chain.SILU, whole(0, 8), -1)], [8], [flat(whole(-1, 8))], x)
    wanted = F.silu(x)
    same = (found == wanted) | (found.isnan() & wanted.isnan()) | ((found - wanted).abs() < 1e-30)
    assert same.all(), (found, wanted)
