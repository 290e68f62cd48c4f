"""The passes of one cache: the texts by teacher forcing, greedy text, needles, and a second pass through a warm cache.

Shape legend: N predicted positions of all texts together (a text of L tokens has L - 1), V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvframe.engine import Engine
from kvframe.errors import CapacityError
from kvframe.evaluation import needle
from kvframe.evaluation.measures import Divergence
from kvframe.evaluation.teacher import Limits, Text, teach, teach_unseen
from kvframe.interfaces import KVCache
from kvframe.meter import Peak
from kvframe.types import Request, SamplingParams

PROMPT = 256  # most tokens of a text that are the prompt of its greedy continuation

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Material:
    """What every cache of a lineup gets to see.

    Attributes:
        pieces: the texts, int32 each. decode: their last tokens that are computed one at a time.
        greedy_tokens: to be generated from each prompt; 0: none. cells: haystacks.
    """

    pieces: tuple[np.ndarray, ...]
    decode: int
    greedy_tokens: int
    cells: tuple[needle.Cell, ...]

    @property
    def positions(self) -> int:
        """N"""
        return sum(len(piece) - 1 for piece in self.pieces)

    @property
    def offsets(self) -> list[int]:
        """Where each text begins among the N positions."""
        return [0, *itertools.accumulate(len(piece) - 1 for piece in self.pieces)]

    @property
    def prompts(self) -> list[np.ndarray]:
        return [piece[: min(PROMPT, -(-len(piece) // 2))] for piece in self.pieces]

    def work(self, warm: bool) -> int:
        """Tokens of all passes, those that are found instead of computed too."""
        haystacks = sum(cell.length - 1 for cell in self.cells)
        again = sum(len(piece) // 2 + len(piece) - 1 for piece in self.pieces) if warm else 0
        return self.positions + self.greedy_tokens * len(self.pieces) + haystacks + again


def forced(
    engine: Engine,
    material: Material,
    limits: Limits,
    held: torch.Tensor,
    advance: Advance,
    *,
    keep: bool = False,
    against: bool = False,
) -> tuple[Divergence, dict[str, int]]:
    """Every text once through an empty cache.

    Args:
        held: the reference's logits [N, V]. keep: these are the reference's, write them there first.
        against: measure the KL of what is held to what is computed now, instead of the other way round.
    Returns: the measures, and bytes: the most of blocks and tails at one moment, and what of it were full-precision
        tails (see kvframe.meter.Peak).
    Raises: PluginError: the cache answers tokens of a text that it has never seen.
    """
    found, peak, cache = Divergence.empty(material.positions), Peak(), engine.cache
    cache.start_run()
    # a salt of its own for each text: nothing that another one has left is used instead of computing it
    texts = [
        Text(piece[:-1], salt=f"text {i}", decode=min(material.decode, len(piece) - 2), number=i)
        for i, piece in enumerate(material.pieces)
    ]
    for text, start, n, logits in teach_unseen(engine.model, cache, texts, limits):
        at = material.offsets[text.number] + start
        if keep:
            held[at : at + n] = logits.cpu()
        other = held[at : at + n].to(logits.device)
        p, q = (logits, other) if against else (other, logits)
        found.add(at, p, q, material.pieces[text.number][start + 1 : start + 1 + n])
        peak.look(cache.stats())
        advance(n)
    return found, {"kv_bytes_peak": peak.total, "tail_bytes_peak": peak.tail}


def warm(engine: Engine, material: Material, limits: Limits, held: torch.Tensor, advance: Advance) -> dict[str, Any]:
    """The second half of each text, when the first half is found in the index. None where nothing is found."""
    found = Divergence.empty(material.positions)
    halves = [piece[: len(piece) // 2] for piece in material.pieces]
    first = [Text(half, salt=f"warm {i}", first=len(half)) for i, half in enumerate(halves) if len(half)]
    for _, _, n, _ in teach(engine.model, engine.cache, first, limits):
        advance(n)
    second = [
        Text(piece[:-1], salt=f"warm {i}", decode=min(material.decode, len(half)), first=len(half), number=i)
        for i, (piece, half) in enumerate(zip(material.pieces, halves))
    ]
    for text, start, n, logits in teach(engine.model, engine.cache, second, limits):
        advance(n + text.found if start == text.found else n)
        start += n - len(logits)
        if text.found and len(logits):
            at, piece = material.offsets[text.number] + start, material.pieces[text.number]
            found.add(at, held[at : at + len(logits)], logits, piece[start + 1 : start + 1 + len(logits)])
    hits = sum(text.found for text in second)
    measured = found.summary()
    return {
        "warm_hit_tokens": hits,
        "warm_kl_mean": measured["kl_mean"],
        "warm_kl_p99": measured["kl_p99"],
        "warm_top1": measured["top1"],
    }


def greedy(engine: Engine, material: Material, advance: Advance) -> list[list[int]]:
    """The best continuation of each prompt, `greedy_tokens` long, by the engine's own loop.

    Raises:
        CapacityError: a prompt does not fit.
    """
    if not material.greedy_tokens:
        return []
    sampling = SamplingParams(max_new_tokens=material.greedy_tokens, ignore_eos=True)
    requests = [
        Request(prompt_tokens=prompt, sampling=sampling, salt=f"greedy {i}")
        for i, prompt in enumerate(material.prompts)
    ]
    outputs = engine.generate(requests)
    for output in outputs:
        if output.finish_reason == "refused":
            raise CapacityError(output.error or "a prompt was refused", fix="greedy_tokens=null")
    advance(material.greedy_tokens * len(requests))
    return [output.output_tokens for output in outputs]


def first_difference(one: Sequence[Sequence[int]], two: Sequence[Sequence[int]]) -> int | None:
    """The first position at which two runs' tokens differ, the earliest over all texts; None: nowhere."""
    places = [
        i for a, b in zip(one, two) for i, (x, y) in enumerate(itertools.zip_longest(a, b, fillvalue=-1)) if x != y
    ]
    return min(places, default=None)


def needles(engine: Engine, material: Material, limits: Limits, advance: Advance) -> list[dict[str, Any]]:
    """One row per haystack (see kvframe.evaluation.needle). PluginError as in `forced`."""
    answers: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(material.cells))}
    texts = [cell.text(f"needle {i}", i) for i, cell in enumerate(material.cells)]
    for text, _, n, logits in teach_unseen(engine.model, engine.cache, texts, limits):
        answers[text.number].append(logits)
        advance(n)
    return [cell.score(torch.cat(answers[i])) for i, cell in enumerate(material.cells)]


def token_bytes(cache: KVCache) -> float:
    """Bytes of one token over all layers, from the planes that are allocated."""
    own = getattr(cache, "token_bytes", None)
    if own is not None:
        return float(sum(own))
    return sum(group.block_bytes / group.block_size for group in cache.stats().groups)
