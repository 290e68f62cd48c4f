"""Tasks of the package lm-eval (github.com/EleutherAI/lm-evaluation-harness) on top of an engine and its cache.

What the harness asks of a model is in `Scorer`, which knows nothing of the package: texts in, log-probabilities or
texts out. `scores` wraps it into the harness's class and runs tasks.

Shape legend: c tokens of a continuation, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from kvframe.engine import Engine
from kvframe.errors import CapacityError, ConfigError, MissingPackageError
from kvframe.evaluation.teacher import Limits, Text, teach_unseen
from kvframe.text import TextCodec
from kvframe.types import Request, SamplingParams

NEW_TOKENS = 256  # tokens of an answer where a task names no number


class Scorer:
    """Log-probabilities and continuations from an engine's model and cache.

    Every text is computed whole, each under a salt of its own: nothing comes out of a prefix index.
    """

    def __init__(self, engine: Engine, limits: Limits):
        self.engine, self.limits = engine, limits
        self.codec = TextCodec(engine.model.tokenizer, vocab_size=engine.model.vocab_size)
        self._salts = (f"task {i}" for i in itertools.count())  # never the same one again, whoever asks how often

    def loglikelihood(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(context, continuation) -> log-probability of the continuation in nats, and whether it is the greedy one."""
        return self._score([self._pair(context, continuation) for context, continuation in pairs])

    def rolling(self, texts: Iterable[str]) -> list[float]:
        """Log-probability of whole texts in nats, in pieces of at most the engine's length. Every token is predicted
        once, from as much as fits before it; the last piece reaches back as far as it can:

            limit 4     start 0 1 2 | 3 4 5 | 6         pieces  start 0 1 2,  2 3 4 5,  3 4 5 6 (6 alone counts)
        """
        texts, limit = list(texts), self.engine.limit
        pieces, owner = [], []
        for i, text in enumerate(texts):
            ids = np.array([*self._start(), *self._bare(text)], dtype=np.int32)
            for at in range(0, len(ids) - 1, limit - 1):
                stop = min(at + limit, len(ids))
                pieces.append((ids[max(stop - limit, 0) : stop], stop - at - 1))
                owner.append(i)
        total = [0.0] * len(texts)
        for i, (value, _) in zip(owner, self._score(pieces)):
            total[i] += value
        return total

    def generate(self, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """(context, options) -> the text that follows. Options: until (texts), max_gen_toks, do_sample, temperature,
        top_p, top_k. A context that is too long loses its beginning."""
        requests = []
        for context, options in asked:
            most = min(int(options.get("max_gen_toks", NEW_TOKENS)), self.engine.limit - 1)
            until = options.get("until") or ()
            drawn = {
                key: options[key]
                for key in ("temperature", "top_p", "top_k")
                if options.get("do_sample") and key in options
            }
            sampling = SamplingParams(max_new_tokens=most, stop=until, **drawn)
            ids = (self.codec.encode(context) or self._start())[-(self.engine.limit - most) :]
            requests.append(Request(prompt_tokens=ids, sampling=sampling, salt=next(self._salts)))
        outputs = self.engine.generate(requests)
        for output in outputs:
            if output.finish_reason in ("refused", "error"):
                raise CapacityError(output.error or "a task's prompt was refused", fix="a larger cache.memory")
        return [output.text for output in outputs]

    def _score(self, pieces: list[tuple[np.ndarray, int]]) -> list[tuple[float, bool]]:
        """(tokens, c) -> log-probability of the last c tokens, and whether each is the best one."""
        found = [[0.0, True] for _ in pieces]
        texts = [
            Text(tokens[:-1], salt=next(self._salts), first=len(tokens) - c - 1, number=i)
            for i, (tokens, c) in enumerate(pieces)
            if c
        ]
        for text, start, n, logits in teach_unseen(self.engine.model, self.engine.cache, texts, self.limits):
            if not len(logits):
                continue
            at = start + n - len(logits) + 1
            ids = pieces[text.number][0][at : at + len(logits)].astype(np.int64)
            wanted = torch.from_numpy(ids).to(logits.device)
            found[text.number][0] += float(logits.double().log_softmax(-1).gather(1, wanted[:, None]).sum())
            found[text.number][1] &= bool((logits.argmax(-1) == wanted).all()) and not bool(logits.isnan().any())
        return [(value, greedy) for value, greedy in found]

    def _pair(self, context: str, continuation: str) -> tuple[np.ndarray, int]:
        """Tokens of both together, and how many are the continuation's. Spaces at the end of the context belong to
        the word that follows, as tokenizers see it; what is too long loses its beginning.

        The continuation begins where the context alone ends. Where the tokenizer joins what stands on both sides into
        so few tokens that nothing would be left of it, it begins at the first token that differs:

            context a b    both  a b c    ->  c                 context a b    both  a bc    ->  bc
        """
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if context:
            whole, head = self.codec.encode(context + continuation), self.codec.encode(context)
        else:
            whole, head = self._bare(continuation), []
        seam = len(head)
        if seam >= len(whole):
            seam = next((i for i, (one, two) in enumerate(zip(head, whole)) if one != two), len(whole))
        if continuation and seam == len(whole):
            raise ConfigError(
                f"this tokenizer leaves the continuation {continuation!r} no token of its own behind {context[-40:]!r}",
                fix="a task whose answers the tokenizer can tell from their questions",
            )
        if seam == 0:  # nothing to predict the first token from
            whole, seam = [*self._start(), *whole], 1
        c = min(len(whole) - seam, self.engine.limit - 1)
        return np.array(whole[-self.engine.limit :], dtype=np.int32), c

    def _start(self) -> list[int]:
        """What stands before the first token of a text: BOS, or else the token that ends texts."""
        model = self.engine.model
        return [model.bos_id if model.bos_id is not None else min(model.eos_ids, default=0)]

    def _bare(self, text: str) -> list[int]:
        from kvframe.evaluation.texts import bare

        return bare(self.codec, text)


def require() -> Any:
    """The package. MissingPackageError where it is not installed."""
    try:
        import lm_eval
        import lm_eval.api.model
    except ImportError as error:
        raise MissingPackageError(
            "lm_eval= needs the package 'lm-eval', which is not installed", fix="pip install lm-eval"
        ) from error
    return lm_eval


def wrap(scorer: Scorer, base: type) -> Any:
    """An instance of the harness's class for models (`lm_eval.api.model.LM`) that asks the scorer."""
    args: Callable = lambda requests: [request.args for request in requests]
    methods = {
        "__init__": lambda self: base.__init__(self),
        "loglikelihood": lambda self, requests, **_: scorer.loglikelihood(args(requests)),
        "loglikelihood_rolling": lambda self, requests, **_: scorer.rolling([text for (text,) in args(requests)]),
        "generate_until": lambda self, requests, **_: scorer.generate(args(requests)),
    }
    return type("EngineLM", (base,), methods)()


def scores(engine: Engine, limits: Limits, tasks: Sequence[str], limit: int | None) -> dict[str, Any]:
    """`{"lm_eval": {task: {metric: value}}}`.

    Raises:
        ConfigError: the harness cannot run a task: it does not exist, or its data cannot be loaded.
    """
    lm_eval = require()
    model = wrap(Scorer(engine, limits), lm_eval.api.model.LM)
    try:
        found = lm_eval.simple_evaluate(
            model=model, tasks=list(tasks), limit=limit, bootstrap_iters=0, log_samples=False
        )
    except Exception as error:
        raise ConfigError(
            f"lm_eval=[{','.join(tasks)}] cannot be run: {type(error).__name__}: {error}",
            fix="lm_eval=[NAME] with a task of `lm_eval --tasks list` whose data set can be loaded here",
        ) from error
    plain = lambda value: isinstance(value, int | float | str) and not isinstance(value, bool)
    results = found["results"].items()
    return {"lm_eval": {task: {k: v for k, v in values.items() if plain(v)} for task, values in results}}
