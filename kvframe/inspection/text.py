"""A recorded step as lines for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvframe.report import human_bytes

LEGEND = (
    "block table entries: 7 a block, 7x3 with three holders, 7' known to the index, 7> written in this step, "
    "- given up; positions are half-open ranges"
)
WIDE = 24  # entries of a block table on one line


def lines(step: dict[str, Any]) -> Iterator[str]:
    """What happened in a step of the Recorder."""
    work = ", ".join(f"{r['id']} {'prefill' if r['new'] > 1 else 'decode'} {r['new']}" for r in step["requests"])
    yield f"step {step['step']}: {step['tokens']} tokens ({work})"
    for one in step["admitted"]:
        yield f"  admitted   {one['id']}: {one['hit']} of {one['prompt']} tokens were cached"
    for one in step["evicted"]:
        yield f"  evicted    {_group(step, one['group'])}: {_ids(one['blocks'])}"
    for one in step["copies"]:
        moved = f"{one['slots']} slots of block {one['source']} to block {one['destination']}"
        yield f"  copied     {_group(step, one['group'])}: {moved}"
    for request in step["requests"]:
        for g, group in enumerate(request["groups"]):
            yield from _table(step, request, g, group)
    for one in step["dropped"]:
        yield f"  dropped    {one['id']}, {_group(step, one['group'])}: {_ids(one['blocks'])}"
    for key in ("finished", "preempted"):
        if step[key]:
            yield f"  {key:<10} {', '.join(step[key])}"
    for pool in step["pools"]:
        shared = f" ({pool['shared']} shared)" if pool["shared"] else ""
        yield (
            f"  pool       {pool['name']}: {pool['live']} live{shared}, {pool['cached']} cached, {pool['free']} free "
            f"of {pool['blocks']} blocks"
        )
    stats = step["stats"]
    tail = f", tails {human_bytes(stats['tail'])}" if stats["tail"] else ""
    yield f"  memory     reserved {human_bytes(stats['reserved'])}, used {human_bytes(stats['used'])}{tail}"


def _table(step, request, g: int, group) -> Iterator[str]:
    written = {block for block, _, _ in group["wrote"]}
    cells = [
        "-" if mark == "-" else f"{block}{mark}{'>' if block in written else ''}"
        for block, mark in zip(group["table"], group["marks"])
    ]
    head = f"  {request['id']}, {_group(step, g)}"
    for at in range(0, len(cells), WIDE):
        yield f"{head if at == 0 else ' ' * len(head)}  [{' '.join(cells[at : at + WIDE])}]"
    read = ", ".join(_span(a, b - 1) for a, b in group["read"])
    size = step["pools"][g]["block_size"] if g < len(step["pools"]) else 0
    yield f"{' ' * 4}read {read} ({human_bytes(group['read_bytes'])}); wrote {_wrote(group['wrote'], size)}"


def _wrote(runs: list[list[int]], size: int) -> str:
    """`block 7 slots 12-15, blocks 8-20 whole`: neighbouring blocks that were written from end to end are one."""
    told: list[list[int]] = []  # first block, last block, first slot, slots
    for block, at, n in runs:
        if told and n == told[-1][3] == size and block == told[-1][1] + 1:
            told[-1][1] = block
        else:
            told.append([block, block, at, n])
    return ", ".join(
        f"block{'s' if last > first else ''} {_span(first, last)} "
        + ("whole" if n == size else f"slot{'s' if n > 1 else ''} {_span(at, at + n - 1)}")
        for first, last, at, n in told
    )


def _span(first: int, last: int) -> str:
    """Both ends are in it."""
    return f"{first}-{last}" if last > first else f"{first}"


def tree_lines(tree: list[dict[str, Any]], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The index's nodes as an indented list: tokens, blocks per layer group (0 is a hole), who holds them."""
    depth: list[int] = []
    for node in tree:
        depth.append(0 if node["parent"] is None else depth[node["parent"]] + 1)
        blocks = " | ".join(
            " ".join(f"{i}x{n}" if n else str(i) for i, n in zip(ids, held)) or "-"
            for ids, held in zip(node["blocks"], node["held"])
        )
        text = decode(node["tokens"])
        text = text if len(text) <= 48 else f"{text[:30]} ... {text[-13:]}"
        salt = f" salt {node['salt']!r}" if node["parent"] is None and node["salt"] else ""
        span = _span(node["start"], node["start"] + len(node["tokens"]) - 1)
        yield f"{'  ' * depth[-1]}{span} {text!r}{salt}  blocks {blocks}"


def _group(step: dict[str, Any], g: int) -> str:
    return step["pools"][g]["name"] if g < len(step["pools"]) else f"group {g}"


def _ids(blocks: list[int]) -> str:
    shown = ", ".join(map(str, blocks[:WIDE]))
    return f"{'blocks' if len(blocks) > 1 else 'block'} {shown}{', ...' if len(blocks) > WIDE else ''}"
