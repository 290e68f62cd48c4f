"""Needle in a haystack, teacher-forced: a made-up fact in filler text, and the question for it at the end.

    filler ... | fact | ... filler | question | answer
               ^ depth 0: at the beginning, 1: right before the question

The answer is not generated but forced: how likely is each of its tokens, and would each have come out as the best one?
So a cell costs one pass and has a score also where a small model would have said something else.
After G. Kamradt's "Needle In A Haystack" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvframe.errors import ConfigError
from kvframe.evaluation.teacher import Text
from kvframe.evaluation.texts import bare
from kvframe.text import TextCodec

PLACES = ("blue harbour", "old lighthouse", "stone mill", "red bridge", "north tower", "glass house")


@dataclass(frozen=True)
class Cell:
    """One haystack: `tokens` int32 [length], of which the last `answer` are the answer; `depth` within 0 .. 1."""

    length: int
    depth: float
    tokens: np.ndarray
    answer: int

    def text(self, salt: str, number: int) -> Text:
        """For `teach`: the last token of the answer is predicted, never computed."""
        first = self.length - self.answer - 1
        return Text(self.tokens[:-1], salt=salt, decode=self.answer, first=first, number=number)

    def score(self, logits: torch.Tensor) -> dict[str, Any]:
        """`logits [answer, V]` at the positions before each token of the answer -> the cell's row: whether each was
        the best token, the worst rank among them (0 is best), and mean log-probability per token in nats."""
        wanted = torch.as_tensor(self.tokens[-self.answer :].astype(np.int64), device=logits.device)[:, None]
        own = logits.gather(1, wanted)  # [answer, 1]
        lower = torch.arange(logits.shape[-1], device=logits.device) < wanted  # ties take the lowest id
        ahead = ((logits > own) | ((logits == own) & lower)).sum(-1)
        finite = bool(torch.isfinite(own).all())  # what is no number finds nothing
        rank = int(ahead.max()) if finite else logits.shape[-1]
        logprob = float(logits.double().log_softmax(-1).gather(1, wanted).mean())
        return {"length": self.length, "depth": self.depth, "found": rank == 0, "rank": rank, "logprob": logprob}


def cells(lengths: list[int], depths: list[float], filler: np.ndarray, codec: TextCodec) -> list[Cell]:
    """One cell per length and depth, each with a fact of its own.

    Raises:
        ConfigError: a length into which fact, question and answer do not fit.
    """
    found = []
    for i, (length, depth) in enumerate((length, depth) for length in lengths for depth in depths):
        place, number = PLACES[i % len(PLACES)], 10_007 + 7_919 * i % 89_989
        fact = bare(codec, f" The secret number of the {place} is {number}. ")
        question, answer = bare(codec, f"\nThe secret number of the {place} is"), bare(codec, f" {number}")
        room = length - len(fact) - len(question) - len(answer)
        if room < 1:
            raise ConfigError(
                f"needle.lengths has {length}: fact, question and answer alone take {length - room} tokens of this "
                "tokenizer",
                options=[f"lengths of at least {length - room + 1}"],
                fix=f"needle.lengths=[{2 * (length - room)}], or needle=null",
            )
        hay, at = np.resize(filler, room).tolist(), 1 + round(depth * (room - 1))
        tokens = np.array([*hay[:at], *fact, *hay[at:], *question, *answer], dtype=np.int32)
        found.append(Cell(length, depth, tokens, len(answer)))
    return found


def summary(rows: list[dict]) -> dict[str, Any]:
    """Share of the cells whose answer was found, and the mean log-probability of an answer's token."""
    if not rows:
        return {"needle_found": None, "needle_logprob": None, "needle": []}
    return {
        "needle_found": float(np.mean([row["found"] for row in rows])),
        "needle_logprob": float(np.mean([row["logprob"] for row in rows])),
        "needle": rows,
    }
