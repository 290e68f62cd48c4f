"""Engine: plan -> forward -> commit -> sample, until every request is done."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

import numpy as np

from kvframe.clock import make_clock
from kvframe.errors import KVFrameError, RequestError
from kvframe.flight import Flight, foresee, picked
from kvframe.intake import Intake, check_settings
from kvframe.interfaces import KVCache
from kvframe.meter import Meter
from kvframe.outputs import Event, RequestOutput
from kvframe.policies import make_policy
from kvframe.sampling import BadLogitsError, SampleInput, sample
from kvframe.scheduler import Scheduler
from kvframe.sequence import Sequence
from kvframe.telling import Telling
from kvframe.text import TextCodec
from kvframe.threads import Threads
from kvframe.types import Request, SamplingParams, StepPlan

log = logging.getLogger(__name__)

WARM = 65  # tokens of the first prompt on a GPU, where kernels for chunks are compiled when they are called


class Engine:
    """Decodes requests with continuous batching over any KVCache.

    Args:
        model: an HFModel (see kvframe.hf).
        cache: any KVCache.
        max_len: longest sequence in tokens, prompt and output.
        max_requests: most sequences that run at once.
        max_step_tokens: token budget of one step (prefill chunks and decode tokens together).
        prefill_chunk: most tokens of one request in a step; None: only the budget bounds it.
        policy: who is admitted next: "fcfs", or "prefix" (see kvframe.policies).
        clock: "wall", or "virtual" (admission does not depend on wall time).
        seed: base of the seeds of requests that bring none.
        pack_weights: linear layers may take copies of their weights in the form that this machine multiplies fastest
            (see kvframe.hf.linear); False keeps the memory.
        replay: what short steps call is called without the model's modules, where that is proved to be the same (see
            HFModel.replay); False: the modules run.
        cuda_graphs: decode steps are CUDA graphs on a GPU, with caches and kernels that allow it (see kvframe.graphs);
            not beside `compile`.
        ahead: on a GPU the next decode step is started behind the one whose tokens are being chosen (see
            kvframe.flight).
        compile: torch.compile runs the model's forward (see HFModel.compile); the first steps take long.
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
        policy="fcfs",
        clock="wall",
        seed=0,
        pack_weights=True,
        replay=True,
        cuda_graphs=True,
        ahead=True,
        compile=False,
        hooks=None,
    ):
        sizes = {"max_len": max_len, "max_requests": max_requests, "max_step_tokens": max_step_tokens}
        check_settings(model, cache, seed, {**sizes, "prefill_chunk": 1 if prefill_chunk is None else prefill_chunk})
        self.model, self.cache, self.max_len = model, cache, max_len
        self.telling, self.clock = Telling(hooks), make_clock(clock)
        cache.now = self.clock.elapsed
        chunk = prefill_chunk or max_step_tokens
        self.scheduler = Scheduler(cache, max_requests, max_step_tokens, chunk, make_policy(policy))
        self.meter = Meter()
        self.threads = Threads(adapt=model.device == "cpu" and clock == "wall")
        self.warmup_seconds = 0.0
        self._live: dict[str, list[Sequence]] = {}
        text = TextCodec(model.tokenizer, vocab_size=model.vocab_size)
        self.intake = Intake(model, cache, text, max_len, seed, self._live)
        self._done: list[Event] = []  # events that are known before a step
        self.packed_bytes = model.pack_weights() if pack_weights else 0
        if compile:
            model.compile()
        elif replay:
            model.replay()
        self.graphs = None
        if cuda_graphs and not compile and model.device != "cpu":
            if cache.graphs:
                self.graphs = model.graphs(cache, max_len)
            else:
                log.info("no CUDA graphs: a layer's codec, retention or kernel needs the host in each step")
        self.ahead = ahead and model.device != "cpu"
        self._flight: Flight | None = None

    # -- requests --------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return self.intake.limit

    def add(self, request: Request) -> str:
        """Queues a request and answers its id. RequestError, PromptTooLongError: it can never run."""
        return self._take(request)

    def branch(self, id: str, prompt_tokens, sampling: SamplingParams | None = None, new_id=None, sample=0) -> str:
        """Adds a request whose prompt is all tokens of a running sample so far and `prompt_tokens`; answers its id.

        It shares what the sample has computed (copy on write) when there is room in the batch, else it waits as any
        request does. `sampling` None: as the sample's. Errors as in `add`; RequestError: the sample is not running.
        """
        parent = self.intake.living(id, sample)
        return self._take(self.intake.branch(parent, prompt_tokens, sampling, new_id, self.clock.now()), parent)

    def _take(self, request: Request, parent: Sequence | None = None) -> str:
        first, *siblings = samples = self.intake.sequences(request)
        self._live[first.request_id] = samples
        if first.limit <= first.prompt_len:
            for sequence in list(samples):
                self._finish(sequence, "length", None, "")
            return first.request_id
        first.siblings = siblings
        if parent is None:
            self.scheduler.add(first)
        else:
            self.scheduler.branch(parent, first)
        return first.request_id

    def rollback(self, id: str, tokens: int, sample: int = 0) -> int:
        """Takes back the last output tokens of a running sample, between steps, as if they had never been: text, stop
        strings, log-probabilities, times and count (what was computed stays counted). Events that were answered cannot
        be taken back: the last `tokens` of this sample are void, and its later texts continue those before them.

        A draw depends on the seed and the output position only, so what follows is chosen as it was before: the same
        tokens again, unless two logits are so close that another batch decides.

        Returns: how many of the remaining tokens keep their keys and values; at least the last is computed again.
        Raises: RequestError: the sample is not running, or has not put out that many tokens.
        """
        sequence = self.intake.living(id, sample, tokens)
        if tokens:
            self.meter.took_back(sequence.times, tokens)
            void = [e for e in self._done if (e.id, e.sample) == (id, sample)][-tokens:]  # of a step that failed
            self._done = [e for e in self._done if not any(e is v for v in void)]
        return self.scheduler.truncate(sequence, sequence.n - tokens)

    def abort(self, id: str) -> None:
        """Ends a request now, wherever it is; its samples answer what they have so far."""
        for sequence in list(self._live.get(id, ())):
            self._finish(sequence, "abort", None, sequence.text.finish())

    def invalidate(self) -> None:
        """The model's weights have changed: nothing that was stored or derived from the old ones is used again. What
        runs is computed again from its tokens."""
        self.model.weights_changed()
        self.scheduler.recompute(list(self.scheduler.running))
        self.cache.invalidate()

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._done)

    # -- the loop --------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """One forward over everything that is scheduled. Answers what became known."""
        flight, self._flight = self._flight, None
        batch = []
        if flight is None or not flight.keep(self.scheduler.running):
            flight, batch = None, self.scheduler.schedule(self.clock.now())
            for sequence in self.scheduler.stuck:
                self._refuse_stuck(sequence)
            self.scheduler.stuck.clear()
        if flight is not None or batch:
            try:
                with self.threads.step():
                    began = self.clock.now()
                    self._end(flight or self._start(batch), began)
            except BaseException:
                self._flight = None
                self.scheduler.recompute(list(self.scheduler.running))  # copies for any of them may be lost
                raise
        elif self.scheduler.next_arrival() is not None and not self._done:
            self.clock.wait_until(self.scheduler.next_arrival())
        events, self._done = self._done, []
        return events

    def _start(self, batch: list[tuple[Sequence, int]]) -> Flight:
        """Starts a step."""
        ready = [i for i, (s, n) in enumerate(batch) if s.computed + n == s.n]
        tokens = np.concatenate([s.tokens[s.computed : s.computed + n] for s, n in batch])
        return self._fly(batch, self.cache.plan(batch), tokens, ready)

    def _fly(self, batch, plan: StepPlan, tokens, ready: list[int]) -> Flight:
        self.model.bind(self.cache)  # engines may share a model
        wanted = (np.cumsum([n for _, n in batch]) - 1)[ready]
        runner = self.graphs if self.graphs is not None and self.graphs.take(plan, wanted) else self.model
        return Flight(batch, ready, runner.forward(tokens, plan, wanted))  # logits [len(ready), V]

    def _foresee(self, chosen: list[Sequence]) -> Callable:
        """What starts the decode step that is sure to follow this one, as soon as the tokens of `chosen` are on the
        device; nothing where that cannot be said."""
        going = foresee(self.scheduler, self.clock.now()) if self.ahead and self._flight is None else None
        if going is None:
            return lambda tokens: None
        batch = [(s, 1) for s in going]
        plan = self.cache.plan(batch)

        def start(tokens) -> None:
            ids = picked(tokens, chosen, going).clamp(min=0)  # bad logits have -1
            self._flight = self._fly(batch, plan, ids, [*range(len(batch))])
            self._flight.stands = [(s.n + 1, s.computed) for s in going]

        return start

    def _end(self, flight: Flight, began: float) -> None:
        """Takes in what a step computed. began: since when the engine has been at it; what the caller does between
        two steps does not count, and a step that was started ahead is waited for here."""
        batch, logits = flight.batch, flight.logits
        for sequence, n in batch:
            self.cache.commit(sequence, n)
            sequence.computed += n
        self.clock.stepped()
        stats, step, tokens = self.cache.stats(), self.meter.steps, sum(n for _, n in batch)
        self.telling.evictions(step, stats)
        try:
            if flight.ready:
                self._sample(logits, [batch[i][0] for i in flight.ready])
        finally:
            seconds = self.clock.now() - began
            self.meter.step(seconds, tokens, stats)
        facts = {"requests": len(batch), "tokens": tokens, "seconds": seconds, "stats": stats}
        self.telling.tell("kvframe_on_step", step=step, **facts)

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
        start_next = self._foresee(chosen)
        inputs = [SampleInput(s.params, s.tokens, s.seed, s.outputs, s.name) for s in chosen]
        try:
            drawn = sample(logits, inputs, start_next)
        except BadLogitsError as error:
            self._drop_bad(error, chosen, logits)
            return
        now = self.clock.now()
        for i, sequence in enumerate(chosen):
            self._accept(sequence, int(drawn.tokens[i]), drawn.logprobs and drawn.logprobs[i], now)

    def _drop_bad(self, error: BadLogitsError, sequences: list[Sequence], logits) -> None:
        """Ends the sequences whose logits are not numbers; the others go on."""
        self.cache.invalidate()  # what they have published may be no numbers either
        for row in error.rows:
            self._finish(sequences[row], "error", None, sequences[row].text.finish(), str(error))
        good = [i for i in range(len(sequences)) if i not in error.rows]
        if good:
            self._sample(logits[good], [sequences[i] for i in good])

    def _accept(self, sequence: Sequence, token: int, logprob: dict | None, now: float) -> None:
        params = sequence.params
        self.meter.token(now - sequence.times[-1] if sequence.times else None)
        sequence.append(token, now, logprob)
        eos = token in params.stop_token_ids or (token in self.model.eos_ids and not params.ignore_eos)
        delta = "" if eos else sequence.text.push(token)
        if not (eos or sequence.text.stopped or sequence.n >= sequence.limit):
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
        if not self._live:
            self._flight = None
        self._answer(sequence.output(reason, error), token, delta)

    def _answer(self, output: RequestOutput, token: int | None = None, delta: str = "") -> None:
        self.meter.finished(output)
        self._done.append(Event(output.id, output.sample, token, delta, output))
        self.telling.tell("kvframe_on_finish", output=output)

    # -- runs ------------------------------------------------------------------------------------------------

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Runs the requests and yields what becomes known. A request that is refused comes as an event whose output has
        `finish_reason="refused"`. Whoever stops listening aborts what is left."""
        with closing(self.steps(requests)) as steps:
            for events in steps:
                yield from events

    def steps(self, requests: Iterable[Request]) -> Iterator[list[Event]]:
        """As `stream`, a list of events for each step."""
        if self.has_work:
            raise RequestError("the engine is still at work", fix="end the other stream first, or use add() and step()")
        self.cache.start_run()
        self.telling.start()
        self._flight = None
        self.clock.start()
        self.meter.start()
        named = self.intake.named(requests)
        added = []
        try:
            for request in named:
                try:
                    added.append(self.add(request))
                except KVFrameError as error:
                    text = str(error)
                    text = text if repr(request.id) in text else f"request {request.id!r}: {text}"
                    self._answer(RequestOutput(request.id, 0, request.prompt, finish_reason="refused", error=text))
            while self.has_work:
                yield self.step()
        finally:
            for name in added:
                self.abort(name)
            self._done.clear()

    def warm(self) -> None:
        """Two steps that nobody sees, so that what is done once per process (loading compiled code, first touch of
        the weights) does not count as decoding."""
        hooks, self.telling.hooks = self.telling.hooks, None
        began = time.perf_counter()
        if self.limit > 2:
            prompt = [0] * (1 if self.model.device == "cpu" else min(self.limit - 2, WARM))
            self.generate([Request(prompt_tokens=prompt, sampling=SamplingParams(max_new_tokens=2, ignore_eos=True))])
        self.cache.reset()
        self.meter.start()
        self.intake.restart()
        self.telling.hooks, self.warmup_seconds = hooks, time.perf_counter() - began

    def generate(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Runs the requests to their end: one output per sample, in the order of the requests."""
        named = self.intake.named(requests)
        place = {request.id: i for i, request in reversed(list(enumerate(named)))}
        done = [event.output for event in self.stream(named) if event.output is not None]
        return sorted(done, key=lambda output: (place[output.id], output.sample))

    def kernels(self) -> dict[str, int]:
        """Kernel name -> number of layers that it serves; {} where the cache does not tell."""
        layers = getattr(getattr(self.cache, "storage", None), "layers", ())
        return dict(Counter(layer.kernel.name for layer in layers))

    def summary(self) -> dict:
        """Figures of the last run: the meter's, and the cache's bytes and history."""
        return {**self.meter.summary(self.cache.stats()), "warmup_s": self.warmup_seconds}
