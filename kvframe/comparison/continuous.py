"""transformers' continuous batching over its own paged cache."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvframe.comparison.baselines import PAD, WARM, Advance, Baseline, check_counts
from kvframe.comparison.plain import plain
from kvframe.comparison.watch import Watch
from kvframe.errors import CapacityError, ConfigError, KVFrameError
from kvframe.outputs import RequestOutput
from kvframe.types import Request

POLL = 0.02  # seconds between two looks at the pages
STOP = 30.0  # seconds that its thread gets to end


class Continuous(Baseline):
    """A thread of transformers' own that batches continuously. Its pages are looked at every few milliseconds, so bytes
    are samples; times are its own timestamps. Blocks that several requests share count once.

    Args:
        page_size: tokens of a page. num_blocks: pages of each layer. max_batch_tokens: of a step.
        requests, pack_weights: see Baseline.
    """

    def __init__(
        self,
        page_size: int = 32,
        num_blocks: int = 1024,
        max_batch_tokens: int = 512,
        requests: int | None = None,
        pack_weights: bool = False,
    ):
        sizes = {"page_size": page_size, "num_blocks": num_blocks, "max_batch_tokens": max_batch_tokens}
        check_counts(**sizes, requests=requests)
        self.sizes, self.requests, self.pack_weights = sizes, requests, pack_weights

    @contextmanager
    def open(self, model: Any, advance: Advance, longest: int) -> Iterator[Player]:
        room = self.sizes["page_size"] * self.sizes["num_blocks"]
        if longest > room:
            raise CapacityError(
                f"baseline.num_blocks={self.sizes['num_blocks']}: {room} tokens; the longest request has {longest}",
                fix=f"baseline.num_blocks={-(-longest // self.sizes['page_size'])} or more",
            )
        generation = GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=-1, pad_token_id=PAD)
        with (
            plain(model, self.pack_weights) as module,
            module.continuous_batching_context_manager(
                generation_config=generation,
                continuous_batching_config=_config(self.sizes),
                block=True,
                timeout=STOP,
                warmup=False,
            ) as manager,
        ):
            yield Player(manager, self.requests, advance)


def _config(sizes: dict[str, Any]) -> ContinuousBatchingConfig:
    """ConfigError: this version of transformers keeps its pages in another way, and they could not be looked at."""
    if "page_size" not in inspect.signature(ContinuousBatchingConfig.__init__).parameters:
        raise ConfigError(
            f"hf_continuous cannot look at the pages of transformers {transformers.__version__}",
            fix="pip install --upgrade transformers (5.24 is known to do), or leave it out of caches",
        )
    return ContinuousBatchingConfig(**sizes)


class Player:
    """Plays rounds of requests through one manager, so that later rounds find what it has kept."""

    def __init__(self, manager: Any, requests: int | None, advance: Advance):
        self.manager, self.requests, self.advance = manager, requests, lambda n: None
        self._watch = Watch()
        self._run([("warm", list(range(WARM)), 2)])
        self._watch, self.advance = Watch(), advance

    def answer(self, requests: Sequence[Request]) -> list[RequestOutput]:
        requests = requests[: self.requests]
        asked = [(r.id, [int(i) for i in r.prompt_tokens], r.sampling.max_new_tokens) for r in requests]
        results = self._run(asked)
        return [
            self._watch.finished(
                request, results[request.id].generated_tokens, results[request.id].created_time, self._times(request.id)
            )
            for request in requests
        ]

    def figures(self) -> dict:
        found = self._watch.figures()
        known = {"steps": None, "computed_tokens": None, "bytes_per_token": self._watch.token_bytes or None}
        return {**found, **known}

    def _times(self, id: str) -> list[float]:
        return self._results[id].timestamps or []

    def _run(self, asked: Sequence[tuple[str, list[int], int]]) -> dict[str, Any]:
        """id -> result, after all of them are done."""
        self._results, last = {}, time.perf_counter()
        for id, prompt, new in asked:
            self.manager.add_request(prompt, id, max_new_tokens=new, eos_token_id=-1, record_timestamps=True)
        while len(self._results) < len(asked):
            result = self.manager.get_result(timeout=POLL)
            now = time.perf_counter()
            self._look(now - last)
            last = now
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise KVFrameError(f"transformers' continuous batching failed: {result.error}")
                self._results[result.request_id] = result
                self._count(result)
            elif result is None and not self.manager.is_running():
                raise KVFrameError("transformers' continuous batching stopped")
        return self._results

    def _count(self, result: Any) -> None:
        times = result.timestamps or []
        for before, after in zip([None, *times], times):
            self._watch.meter.token(None if before is None else after - before)
        self.advance(len(result.generated_tokens))

    def _look(self, seconds: float) -> None:
        """Bytes of the pages that requests hold, and of their tokens."""
        processor, watch = self.manager.batch_processor, self._watch
        if processor is None:
            return
        cache, reserved, used, token_bytes = processor.cache, 0, 0.0, 0.0
        try:  # its thread goes on meanwhile
            lengths = [state.position_offset for state in list(processor.scheduler.active_requests.values())]
            for allocator in cache.cache_allocators.values():
                blocks = {block for table in list(allocator.block_table.values()) for block in list(table)}
                reserved += len(blocks) * allocator.bytes_per_block
                token_bytes += allocator.bytes_per_block / allocator.tokens_per_page
                used += allocator.bytes_per_block / allocator.tokens_per_page * sum(lengths)
        except RuntimeError:  # a dictionary changed: the next look will do
            return
        watch.token_bytes = token_bytes
        watch.step(seconds, 0, reserved, used)
        watch.pool = cache.cache_tensor.nbytes
