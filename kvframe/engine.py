"""Engine: plan -> forward -> commit -> sample, until every request is done."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from kvframe.clock import make_clock
from kvframe.errors import ConfigError, KVFrameError, PromptTooLongError, RequestError
from kvframe.interfaces import KVCache
from kvframe.meter import Meter
from kvframe.outputs import Event, RequestOutput
from kvframe.sampling import BadLogitsError, SampleInput, resolve_seed, sample
from kvframe.scheduler import Scheduler
from kvframe.sequence import Sequence
from kvframe.text import TextCodec
from kvframe.threads import Threads
from kvframe.types import Request, SamplingParams

log = logging.getLogger(__name__)


class Engine:
    """Decodes requests with continuous batching over any KVCache.

    Args:
        model: an HFModel (see kvframe.hf).
        cache: any KVCache.
        max_len: longest sequence in tokens, prompt and output.
        max_requests: most sequences that run at once.
        max_step_tokens: token budget of one step (prefill chunks and decode tokens together).
        prefill_chunk: most tokens of one request in a step; None: only the budget bounds it.
        clock: "wall", or "virtual" (admission does not depend on wall time).
        seed: base of the seeds of requests that bring none.
        pack_weights: linear layers may take copies of their weights in the form that this machine multiplies fastest
            (see kvframe.hf.linear); False keeps the memory.
        hooks: caller of the plugins' watching hooks (see kvframe.hookspecs); None: nobody watches.
    """

    def __init__(
        self,
        model,
        cache: KVCache,
        *,
        max_len: int,
        max_requests: int,
        max_step_tokens: int,
        prefill_chunk=None,
        clock="wall",
        seed=0,
        pack_weights=True,
        hooks=None,
    ):
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"engine.seed={seed!r} cannot be used", options=["an integer"])
        for name, value in (
            ("max_len", max_len),
            ("max_requests", max_requests),
            ("max_step_tokens", max_step_tokens),
            ("prefill_chunk", 1 if prefill_chunk is None else prefill_chunk),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"engine.{name}={value!r} cannot be used", options=["an integer >= 1"])
        if model.max_len is not None and max_len > model.max_len:
            raise ConfigError(
                " ".join(
                    [
                        f"engine.max_len={max_len} is more than the {model.max_len} tokens this model takes.",
                        *model.notes,
                    ]
                ),
                options=[f"1 .. {model.max_len}"],
                fix=f"engine.max_len={model.max_len}, or null",
            )
        self.model, self.cache, self.max_len = model, cache, max_len
        self.seed, self.hooks = seed, hooks
        self.clock = make_clock(clock)
        self.scheduler = Scheduler(cache, max_requests, max_step_tokens, prefill_chunk or max_step_tokens)
        self.text = TextCodec(model.tokenizer, vocab_size=model.vocab_size)
        self.meter = Meter()
        self.threads = Threads(adapt=model.device == "cpu" and clock == "wall")
        self.warmup_seconds = 0.0
        self._names, self._unseeded = itertools.count(), itertools.count()
        self._live: dict[str, list[Sequence]] = {}
        self._done: list[Event] = []  # events that are known before a step
        self.packed_bytes = model.pack_weights() if pack_weights else 0

    # -- requests --------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Tokens of the longest sequence, prompt and output. The last token is answered but never stored, so there
        may be one more than the cache holds."""
        return min(self.max_len, self.cache.capacity() + 1)

    def add(self, request: Request) -> str:
        """Queues a request and answers its id.

        Raises:
            RequestError: an empty prompt for which the model has no BOS token, token ids outside the vocabulary,
                an id that is running already; PromptTooLongError: it can never fit.
        """
        id = self._name() if request.id is None else request.id
        if id in self._live:
            raise RequestError(f"request id {id!r} is already running", fix="give each request an id of its own")
        prompt = self._prompt_tokens(request)
        if len(prompt) + min(request.sampling.max_new_tokens, 1) > self.limit:
            raise PromptTooLongError(
                f"request {id!r} has a prompt of {len(prompt)} tokens; prompt and output together are at most "
                f"{self.limit} (engine.max_len={self.max_len}, cache capacity {self.cache.capacity()})",
                fix="a shorter prompt, a larger engine.max_len, or a larger cache.memory or cache.num_blocks",
            )
        params = request.sampling
        limit = min(len(prompt) + params.max_new_tokens, self.limit)
        if limit < len(prompt) + params.max_new_tokens:
            cut, wanted = limit - len(prompt), params.max_new_tokens
            log.warning(
                "request %r ends after %d of %d new tokens: prompt and output are at most %d", id, cut, wanted, limit
            )
        base = params.seed if params.seed is not None else (self.seed << 32) + next(self._unseeded)
        context = () if request.prompt_tokens is not None else prompt[-5:].tolist()
        samples = [
            Sequence(request, id, i, prompt, limit, resolve_seed(base, i), self.text.detokenizer(params.stop, context))
            for i in range(params.n)
        ]
        self._live[id] = samples
        if limit <= len(prompt):
            for sequence in list(samples):
                self._finish(sequence, "length", None, "")
            return id
        samples[0].siblings = samples[1:]
        self.scheduler.add(samples[0])
        return id

    def _name(self, taken: Iterable[str] = ()) -> str:
        return next(name for i in self._names if (name := f"r{i}") not in self._live and name not in taken)

    def _named(self, requests: Iterable[Request]) -> list[Request]:
        """The requests with an id each; ids that are given are left to those who gave them."""
        requests = list(requests)
        for request in requests:
            if not isinstance(request, Request):
                raise RequestError(f"{str(request)[:60]!r} is not a Request", fix="Request(prompt=...)")
        taken = Counter(request.id for request in requests if request.id is not None)
        twice = [id for id, n in taken.items() if n > 1]
        if twice:
            raise RequestError(f"several requests have the id {twice[0]!r}", fix="give each request an id of its own")
        return [replace(r, id=self._name(taken)) if r.id is None else r for r in requests]

    def _prompt_tokens(self, request: Request) -> np.ndarray:
        if request.messages is not None:
            ids = self.text.chat(request.messages)
        elif request.prompt is not None:
            ids = self.text.encode(request.prompt)
        else:
            ids = request.prompt_tokens
        try:
            tokens = np.asarray(ids)
        except (ValueError, TypeError, OverflowError):
            tokens = np.empty((0, 0))
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise RequestError(
                f"prompt_tokens={str(ids)[:80]} is not one row of token ids", options=["a list of integers"]
            )
        tokens = tokens.astype(np.int64)
        if len(tokens) == 0:
            if self.model.bos_id is None:
                raise RequestError(
                    "the prompt is empty and the model has no BOS token to start from", fix="give a prompt"
                )
            tokens = np.array([self.model.bos_id])
        wrong = tokens[(tokens < 0) | (tokens >= self.model.vocab_size)]
        if len(wrong):
            raise RequestError(
                f"token id {int(wrong[0])} is not in the vocabulary", options=[f"0 .. {self.model.vocab_size - 1}"]
            )
        return tokens.astype(np.int32)

    def abort(self, id: str) -> None:
        """Ends a request now, wherever it is; its samples answer what they have so far."""
        for sequence in list(self._live.get(id, ())):
            self._finish(sequence, "abort", None, sequence.text.finish())

    def invalidate(self) -> None:
        """The model's weights have changed: nothing that was stored or derived from the old ones is used again."""
        self.model.weights_changed()
        self.cache.invalidate()

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._done)

    # -- the loop --------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """One forward over everything that is scheduled. Answers what became known."""
        batch = self.scheduler.schedule(self.clock.now())
        for sequence in self.scheduler.stuck:
            self._refuse_stuck(sequence)
        self.scheduler.stuck.clear()
        if batch:
            try:
                with self.threads.step():
                    self._forward(batch)
            except BaseException:
                self.scheduler.recompute(sequence for sequence, _ in batch)
                raise
        elif self.scheduler.next_arrival() is not None and not self._done:
            self.clock.wait_until(self.scheduler.next_arrival())
        events, self._done = self._done, []
        return events

    def _forward(self, batch: list[tuple[Sequence, int]]) -> None:
        began = self.clock.now()
        self.model.bind(self.cache)  # engines may share a model
        plan = self.cache.plan(batch)
        tokens = np.concatenate([s.tokens[s.computed : s.computed + n] for s, n in batch])
        ends = np.cumsum([n for _, n in batch]) - 1
        ready = [i for i, (s, n) in enumerate(batch) if s.computed + n == s.n]
        logits = self.model.forward(tokens, plan, ends[ready])  # [len(ready), V]
        for sequence, n in batch:
            self.cache.commit(sequence, n)
            sequence.computed += n
        self.clock.stepped()
        seconds, stats = self.clock.now() - began, self.cache.stats()
        self.meter.step(seconds, len(tokens), stats)
        if ready:
            self._sample(logits, [batch[i][0] for i in ready])
        self._watch(
            "kvframe_on_step",
            step=self.meter.steps - 1,
            requests=len(batch),
            tokens=len(tokens),
            seconds=seconds,
            stats=stats,
        )

    def _watch(self, hook: str, **facts) -> None:
        """Tells the plugins. Who only watches cannot stop the engine."""
        if self.hooks is None:
            return
        try:
            getattr(self.hooks, hook)(**facts)
        except Exception:
            log.exception("a plugin failed in %s; the engine goes on", hook)

    def _sample(self, logits, sequences: list[Sequence]) -> None:
        """Chooses a token per sequence. The samples of a request fork here, from one row of logits."""
        rows, chosen = [], []
        for row, sequence in enumerate(sequences):
            family = [sequence, *self.scheduler.fork(sequence, sequence.siblings)]
            sequence.siblings = []
            chosen += family
            rows += [row] * len(family)
        if len(rows) > len(sequences):
            logits = logits[rows]
        inputs = [SampleInput(s.params, s.tokens, s.seed, s.outputs, s.name) for s in chosen]
        try:
            drawn = sample(logits, inputs)
        except BadLogitsError as error:
            self._drop_bad(error, chosen, logits)
            return
        now = self.clock.now()
        for i, sequence in enumerate(chosen):
            self._accept(sequence, int(drawn.tokens[i]), drawn.logprobs and drawn.logprobs[i], now)

    def _drop_bad(self, error: BadLogitsError, sequences: list[Sequence], logits) -> None:
        """Ends the sequences whose logits are not numbers; the others go on."""
        for row in error.rows:
            self._finish(sequences[row], "error", None, sequences[row].text.finish(), str(error))
        good = [i for i in range(len(sequences)) if i not in error.rows]
        if good:
            self._sample(logits[good], [sequences[i] for i in good])

    def _accept(self, sequence: Sequence, token: int, logprob: dict | None, now: float) -> None:
        params = sequence.params
        self.meter.token(None if sequence.last_token_at is None else now - sequence.last_token_at)
        sequence.append(token, now)
        if sequence.logprobs is not None:
            sequence.logprobs.append(logprob)
        eos = token in params.stop_token_ids or (token in self.model.eos_ids and not params.ignore_eos)
        delta = "" if eos else sequence.text.push(token)
        done = eos or sequence.text.stopped or sequence.n >= sequence.limit
        if not done:
            self._done.append(Event(sequence.request_id, sequence.sample, token, delta))
            return
        delta += sequence.text.finish()
        self._finish(sequence, "stop" if eos or sequence.text.stopped else "length", token, delta)

    def _refuse_stuck(self, sequence: Sequence) -> None:
        error = (
            f"request {sequence.name!r} with {sequence.n} tokens does not fit into an empty cache\n"
            "  fix: a larger cache.memory or cache.num_blocks, or a shorter prompt"
        )
        for sibling in (sequence, *sequence.siblings):
            self._finish(sibling, "refused", None, sibling.text.finish(), error)

    def _finish(self, sequence: Sequence, reason: str, token: int | None, delta: str, error: str | None = None) -> None:
        self.scheduler.finish(sequence)
        samples = self._live[sequence.request_id]
        samples.remove(sequence)
        if not samples:
            del self._live[sequence.request_id]
        self._answer(sequence.output(reason, error), token, delta)

    def _answer(self, output: RequestOutput, token: int | None = None, delta: str = "") -> None:
        self.meter.finished(output)
        self._done.append(Event(output.id, output.sample, token, delta, output))
        self._watch("kvframe_on_finish", output=output)

    # -- runs ------------------------------------------------------------------------------------------------

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Runs the requests and yields what becomes known, step by step. A request that is refused comes as an
        event whose output has `finish_reason="refused"`. Whoever stops listening aborts what is left."""
        if self.has_work:
            raise RequestError("the engine is still at work", fix="end the other stream first, or use add() and step()")
        self.cache.start_run()
        self.clock.start()
        self.meter.start()
        named = self._named(requests)
        added = []
        try:
            for request in named:
                try:
                    added.append(self.add(request))
                except KVFrameError as error:
                    text = str(error)
                    self._refuse(request, text if repr(request.id) in text else f"request {request.id!r}: {text}")
            while self.has_work:
                yield from self.step()
        finally:
            for name in added:
                self.abort(name)
            self._done.clear()

    def _refuse(self, request: Request, error: str) -> None:
        self._answer(RequestOutput(id=request.id, prompt=request.prompt, finish_reason="refused", error=error))

    def warm(self) -> None:
        """Two steps that nobody sees, so that what is done once per process (loading compiled code, first touch of
        the weights) does not count as decoding."""
        hooks, self.hooks = self.hooks, None
        began = time.perf_counter()
        sampling = SamplingParams(max_new_tokens=2, ignore_eos=True)
        if self.limit > 2:
            self.generate([Request(prompt_tokens=[0], sampling=sampling)])
        self.cache.reset()
        self.meter.start()
        self._names, self._unseeded = itertools.count(), itertools.count()
        self.hooks, self.warmup_seconds = hooks, time.perf_counter() - began

    def generate(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Runs the requests to their end: one output per sample, in the order of the requests."""
        named = self._named(requests)
        place = {request.id: i for i, request in reversed(list(enumerate(named)))}
        done = [event.output for event in self.stream(named) if event.output is not None]
        return sorted(done, key=lambda output: (place[output.id], output.sample))

    def summary(self) -> dict:
        """Figures of the last run: the meter's, and the cache's bytes and history."""
        stats = self.cache.stats()
        return {
            **self.meter.summary(),
            "kv_bytes_peak": stats.total("peak"),
            "kv_bytes_pool": sum(g.num_blocks * g.block_bytes for g in stats.groups),
            "evictions": stats.evictions,
            "copies": stats.copies,
            "warmup_s": self.warmup_seconds,
        }
