"""Conversations: every turn's prompt is all that was said before."""

from __future__ import annotations

import numpy as np

from kvframe.workloads.drawing import Draws, bounds, count
from kvframe.workloads.workload import Facts, Rounds, Workload, ask


class MultiTurn(Workload):
    """Chats with one system prompt. A turn is a user's message and the model's real answer:

        turn 0    system | user 0 -> answer 0
        turn 1    system | user 0 | answer 0 | user 1 -> answer 1

    The next turns of all chats are one round. A chat whose answer did not come ends.

    Args:
        chats: how many. turns: of each. system: tokens of the system prompt, 0: none.
        user, output: tokens of a message and of an answer, a number or [least, most]. seed: of sizes and tokens.
    """

    def __init__(self, chats: int = 3, turns: int = 3, system: int = 64, user=(16, 48), output=(16, 32), seed: int = 0):
        self.chats, self.turns = count("chats", chats), count("turns", turns)
        self.system, self.seed = count("system", system, 0), count("seed", seed, 0)
        self.user, self.output = bounds("user", user), bounds("output", output)
        self.what = f"{chats} chats of {turns} turns; each turn's prompt is all that was said before"

    def rounds(self, facts: Facts) -> Rounds:
        draws = Draws(self.seed, facts)
        system = draws.tokens(self.system)
        texts = {f"chat{c}": system for c in range(self.chats)}
        for turn in range(self.turns):
            requests = []
            for chat in list(texts):
                texts[chat] = np.concatenate([texts[chat], draws.tokens(draws.size(self.user))])
                requests.append(ask(f"{chat}.{turn}", texts[chat], draws.size(self.output)))
            answers = {output.id: output.output_tokens for output in (yield requests)}
            texts = {
                chat: np.concatenate([text, np.asarray(answers[f"{chat}.{turn}"], dtype=np.int32)])
                for chat, text in texts.items()
                if f"{chat}.{turn}" in answers
            }
