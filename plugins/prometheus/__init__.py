"""Prometheus metrics of engines, for `prometheus-client` (`pip install "kvframe[prometheus]"`).

    kvframe_steps_total, kvframe_step_seconds, kvframe_step_requests, kvframe_computed_tokens_total
    kvframe_cache_bytes{group, state="reserved|used|evictable|tail"}, kvframe_hit_tokens_total
    kvframe_evicted_blocks_total{group}
    kvframe_requests_total{reason="stop|length|abort|refused|error"}, kvframe_preemptions_total
    kvframe_prompt_tokens_total, kvframe_output_tokens_total, kvframe_ttft_seconds, kvframe_itl_seconds

Every one has the label `engine`, so the engines of a process share the metrics and do not clash. Counters go on over
the runs of an engine, as Prometheus expects. `kvframe_itl_seconds` observes the mean time between tokens of a sample.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from kvframe.errors import MissingPackageError, OptionError
from kvframe.hookspecs import hookimpl

STATES = ("reserved", "used", "evictable", "tail")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_NUMBER = itertools.count()
_METRICS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # registry -> its metrics, made once
_SERVERS: dict[tuple, Any] = {}  # (address, port, registry's id) -> server; one for all engines


class Prometheus:
    """Keeps the metrics of one engine.

    Args:
        port: serve them at this port; 0: a free one (see the attribute `port`); None: do not serve.
        address: where to listen.
        engine: value of the label `engine`; None: a number of its own.
        registry: a prometheus_client.CollectorRegistry; None: the one of the process.
    Raises: MissingPackageError; OptionError when the port cannot be had.
    """

    def __init__(self, port: int | None = None, address: str = "127.0.0.1", engine: str | None = None, registry=None):
        client = _client()
        registry = client.REGISTRY if registry is None else registry
        self.engine = str(next(_NUMBER)) if engine is None else str(engine)
        self.metrics = _METRICS.get(registry) or _METRICS.setdefault(registry, _make(client, registry))
        self.port = None if port is None else _serve(client, port, address, registry)
        self._hits = 0

    def _of(self, name: str, **labels: str) -> Any:
        return self.metrics[name].labels(engine=self.engine, **labels)

    @hookimpl
    def kvframe_on_step(self, requests, tokens, seconds, stats):
        self._of("steps").inc()
        self._of("step_seconds").observe(seconds)
        self._of("step_requests").set(requests)
        self._of("computed_tokens").inc(tokens)
        new = stats.hit_tokens - self._hits  # of a cache that counts from 0 in each run
        self._of("hit_tokens").inc(new if new >= 0 else stats.hit_tokens)
        self._hits = stats.hit_tokens
        for group in stats.groups:
            for state in STATES:
                self._of("cache_bytes", group=group.name, state=state).set(getattr(group, state))

    @hookimpl
    def kvframe_on_evict(self, blocks):
        for group, n in blocks.items():
            self._of("evicted_blocks", group=group).inc(n)

    @hookimpl
    def kvframe_on_finish(self, output):
        self._of("requests", reason=output.finish_reason).inc()
        self._of("preemptions").inc(output.preemptions)
        self._of("output_tokens").inc(len(output.output_tokens))
        if output.sample == 0:  # the samples of a request share its prompt
            self._of("prompt_tokens").inc(len(output.prompt_tokens))
        if output.ttft_s is not None:
            self._of("ttft_seconds").observe(output.ttft_s)
        if output.itl_s is not None:
            self._of("itl_seconds").observe(output.itl_s)


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise MissingPackageError(
            "watch=prometheus needs the package 'prometheus-client', which is not installed",
            fix='pip install "kvframe[prometheus]"',
        ) from error
    return prometheus_client


def _make(client: Any, registry: Any) -> dict[str, Any]:
    """The metrics by their names without `kvframe_` and `_total`."""
    counter, gauge, histogram = client.Counter, client.Gauge, client.Histogram
    table = (
        (counter, "steps", "Steps of the engine.", ()),
        (histogram, "step_seconds", "Duration of a step.", ()),
        (gauge, "step_requests", "Sequences in the last step.", ()),
        (counter, "computed_tokens", "Tokens that were computed.", ()),
        (gauge, "cache_bytes", "Bytes of keys and values after the last step.", ("group", "state")),
        (counter, "hit_tokens", "Tokens that were found in the cache.", ()),
        (counter, "evicted_blocks", "Cached blocks that were given up to make room.", ("group",)),
        (counter, "requests", "Samples that ended or were refused.", ("reason",)),
        (counter, "preemptions", "Times that a sample which has ended lost its cache.", ()),
        (counter, "prompt_tokens", "Tokens of prompts of requests that ended or were refused.", ()),
        (counter, "output_tokens", "Tokens of samples that ended.", ()),
        (histogram, "ttft_seconds", "Time from arrival to the first token of a sample.", ()),
        (histogram, "itl_seconds", "Mean time between the tokens of a sample.", ()),
    )
    made = {}
    for kind, name, text, labels in table:
        more = {"buckets": SECONDS} if kind is histogram else {}
        made[name] = kind(f"kvframe_{name}", text, ("engine", *labels), registry=registry, **more)
    return made


def _serve(client: Any, port: int, address: str, registry: Any) -> int:
    """Starts the server, or takes the one that is there. Answers its port."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise OptionError("port", port, options=["null", "0 .. 65535 (0: a free one)"])
    if (address, port, id(registry)) not in _SERVERS:
        try:
            server, _ = client.start_http_server(port, address, registry)
        except OSError as error:
            why = f"cannot be had at {address}: {error.strerror}"
            raise OptionError("port", port, why, fix="another port, or {name}=0 for a free one") from error
        port = server.server_port
        _SERVERS[address, port, id(registry)] = server
    return port
