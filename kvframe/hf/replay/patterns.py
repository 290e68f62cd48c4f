"""Steps of a program that one function of kvframe does at once."""

from __future__ import annotations

from collections import Counter

import torch

from kvframe.hf.replay.program import Name, Program, Step, names, storage
from kvframe.kernels.cpu_rotary import can_rotate, rotate

ADD = {torch.Tensor.add, torch.add, torch.Tensor.__add__}
MULTIPLY = {torch.Tensor.mul, torch.mul, torch.Tensor.__mul__}
NEGATE = {torch.Tensor.neg, torch.neg, torch.Tensor.__neg__}
JOIN = {torch.cat, torch.concat}


def rotations(program: Program) -> Program:
    """Every `x * cos + cat((-x2, x1), -1) * sin` of halves `x = [x1 | x2]` becomes one `rotate(x, cos, sin)`."""
    made = {step.name: step for step in program.steps}
    used = Counter(name for step in program.steps for name in names((step.args, step.kwargs)))
    used[program.out] += 1
    gone, steps, written = set(), [], program.written()
    for step in program.steps:
        found = _rotation(step, made, used, program.samples)
        if found is not None and not written & {storage(program.samples[name][0]) for name in found[:3]}:
            x, cos, sin, inner = found
            gone |= inner
            step = Step(step.name, rotate, (x, cos, sin), {})
        steps.append(step)
    return program.of([step for step in steps if step.name not in gone])


def _rotation(step: Step, made: dict, used: Counter, samples: dict):
    """(x, cos, sin, names of the steps in between), if this is the sum of a rotation."""
    if step.function not in ADD or step.kwargs or len(step.args) != 2:
        return None
    products = [made.get(name) for name in step.args]
    if any(p is None or p.function not in MULTIPLY or p.kwargs or len(p.args) != 2 for p in products):
        return None
    plain, turned = products
    x, cos = plain.args
    joined = made.get(turned.args[0]) if isinstance(turned.args[0], Name) else None
    if joined is None or joined.function not in JOIN:
        return None
    if joined.args[1:] + tuple(joined.kwargs.values()) != (-1,) or len(joined.args[0]) != 2:
        return None
    negated, left = (made.get(name) for name in joined.args[0])
    if negated is None or left is None or negated.function not in NEGATE:
        return None
    right, sin = made.get(negated.args[0]), turned.args[1]
    values = [samples.get(name) for name in (x, cos, sin)]
    if right is None or any(value is None for value in values) or not can_rotate(*(value[0] for value in values)):
        return None
    half = values[0][0].shape[-1] // 2
    wanted = [(left, slice(None, half, None)), (right, slice(half, None, None))]
    if any(p.function != torch.Tensor.__getitem__ or p.args != (x, (..., cut)) for p, cut in wanted):
        return None
    inner = {p.name for p in (plain, turned, joined, negated, left, right)}
    if any(used[name] != 1 for name in inner):
        return None
    return x, cos, sin, inner
