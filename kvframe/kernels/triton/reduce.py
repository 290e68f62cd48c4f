"""The reduce kernel: adds up what the parts of a context gave, and divides.

    most = max of the parts' most (and of the learned sink)
    out  = sum of acc_i * 2 ** (most_i - most)  /  sum of total_i * 2 ** (most_i - most) (+ 2 ** (sink - most))

One program has one request and one query head, and takes PARTS parts at a time, from the first to the last that the
request has: with 20 parts and PARTS 16 those are 0..15, then 16..19 and twelve that count nothing. A learned sink is
one more score without a value (gpt-oss).

Shape legend: n requests that decode, P parts, Hq query heads, Dv size, DV padded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvframe.kernels.triton.launch import Launch
from kvframe.kernels.triton.layer import Layer, padded
from kvframe.kernels.triton.tile import LOG2E

PARTS = 16


@triton.jit(do_not_specialize=["parts"])
def reduce_kernel(
    acc_in, most_in, total_in, parts, learned, lengths, starts, rows, out, out_token, out_head,
    Q_HEADS: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, V_DIM: tl.constexpr,
    DV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid: rows, query heads."""
    row, head = tl.program_id(0), tl.program_id(1)
    r = row
    if rows is not None:
        r = tl.load(rows + row)
    length = tl.load(lengths + r)
    count = (length + SPLIT - 1) // SPLIT
    if WINDOW:  # as many as decode has programs for
        before: tl.constexpr = (SINKS + SPLIT - 1) // SPLIT
        first = tl.maximum(tl.maximum(length - WINDOW, 0) // SPLIT, before)
        count = tl.minimum(count, before) + tl.maximum(count - first, 0)
    e = tl.arange(0, DV)
    acc = tl.zeros([DV], tl.float32)
    most, total = float("-inf"), 0.0
    if learned is not None:
        most = tl.load(learned + head).to(tl.float32) * LOG2E
        total = 1.0
    for i in range(0, count, PARTS):
        part = i + tl.arange(0, PARTS)
        there = part < count
        at = (row.to(tl.int64) * parts + part) * Q_HEADS + head
        mosts = tl.load(most_in + at, mask=there, other=float("-inf"))
        totals = tl.load(total_in + at, mask=there, other=0.0)
        mask = there[:, None] & (e < V_DIM)[None, :]
        accs = tl.load(acc_in + at[:, None] * V_DIM + e[None, :], mask=mask, other=0.0)  # [PARTS, DV]
        higher = tl.maximum(most, tl.max(mosts, axis=0))
        top = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(mosts - top)
        shrink = tl.exp2(most - top)
        total = total * shrink + tl.sum(totals * weight, axis=0)
        acc = acc * shrink + tl.sum(accs * weight[:, None], axis=0)
        most = higher
    result = tl.where(length > 0, acc / total, 0.0)  # a row of padding has no context
    where = out + tl.load(starts + r).to(tl.int64) * out_token + head * out_head
    tl.store(where + e, result.to(out.dtype.element_ty), mask=e < V_DIM)


def start(acc, most, total, layer: Layer, lengths, starts, rows, out: torch.Tensor) -> Launch:
    args = {
        "acc_in": acc, "most_in": most, "total_in": total, "parts": acc.shape[1], "learned": layer.learned,
        "lengths": lengths, "starts": starts, "rows": rows, "out": out, "out_token": out.stride(0),
        "out_head": out.stride(1),
    }  # fmt: skip
    meta = {"Q_HEADS": layer.q_heads, "SPLIT": layer.split, "WINDOW": layer.window, "SINKS": layer.sinks,
            "V_DIM": layer.v.dim, "DV": padded(layer.v.dim), "PARTS": PARTS}  # fmt: skip
    return Launch(reduce_kernel, (acc.shape[0], layer.q_heads), args, meta)


def reduce(
    acc: torch.Tensor, most: torch.Tensor, total: torch.Tensor, layer: Layer, lengths: torch.Tensor,
    starts: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor,
) -> None:  # fmt: skip
    """What `decode` gave, added up into `out [T, Hq, Dv]` at the tokens of its requests."""
    start(acc, most, total, layer, lengths, starts, rows, out).run()


def reduce_plain(acc, most, total, layer: Layer, lengths, starts, rows, out: torch.Tensor) -> None:
    """The same in plain torch."""
    for row, r in enumerate(range(len(acc)) if rows is None else rows.tolist()):
        n = layer.parts(int(lengths[r]))
        if not n:
            out[int(starts[r])] = 0.0
            continue
        scores = most[row, :n]  # [n, Hq]
        if layer.learned is not None:
            scores = torch.cat([scores, layer.learned.float()[None] * LOG2E.value])
        top = scores.amax(0)
        top = top.where(top != float("-inf"), 0.0)
        weight = torch.exp2(scores - top)
        whole = (total[row, :n] * weight[:n]).sum(0) + weight[n:].sum(0)
        out[int(starts[r])] = ((acc[row, :n] * weight[:n, :, None]).sum(0) / whole[:, None]).to(out.dtype)
