"""Traces: who asked for how many tokens and when, and which prefixes they shared.

A file holds one JSON object a line, as published with Mooncake (Qin et al., FAST'25, arXiv:2407.00079):

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds; each hash id stands for the next `tokens_per_id` tokens of the input (the last one for
what is left of it), and equal ids mean equal tokens up to and including theirs. Other keys are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kvframe.errors import ConfigError

KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
MOST = 2**31 - 1  # token ids are int32
LONGEST = 10_000_000  # tokens of an input or an output
LATEST = 1e15  # milliseconds


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds after the start of the trace.
        input_length, output_length: in tokens.
        ids: int32; the hash ids of its input, counted 0, 1, 2, ... in order of their first appearance in the trace.
    """

    arrival: float
    input_length: int
    output_length: int
    ids: np.ndarray


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they arrive.

    Attributes:
        tokens_per_id: tokens that one hash id stands for; distinct: number of different ids.
    """

    requests: list[TraceRequest]
    tokens_per_id: int
    distinct: int

    @property
    def ids(self) -> int:
        """Number of hash ids of all inputs."""
        return sum(len(request.ids) for request in self.requests)

    @property
    def input_tokens(self) -> int:
        return sum(request.input_length for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_length for request in self.requests)

    @property
    def most_ids(self) -> int:
        """Ids of the longest input."""
        return max(len(request.ids) for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, input and output."""
        return max(request.input_length + max(request.output_length, 1) for request in self.requests)

    @property
    def ideal(self) -> tuple[float, float]:
        """Hit rates in ids and in tokens if every input were cached for ever when the next request arrives: no cache
        finds more, with requests one after another."""
        return self._tree[:2]

    @property
    def prefixes(self) -> int:
        """Distinct prefixes of ids: what an unbounded cache would hold, in ids."""
        return self._tree[2]

    @cached_property
    def _tree(self) -> tuple[float, float, int]:
        nodes: dict[tuple[int, int], int] = {}  # (node, id) -> the node behind it
        hits = tokens = 0
        for request in self.requests:
            node, found, new = -1, 0, False
            for id in request.ids.tolist():
                below = nodes.get((node, id))
                if below is None:
                    below, new = len(nodes), True
                    nodes[node, id] = below
                node = below
                found += not new
            hits += found
            tokens += hit_tokens(request, found, self.tokens_per_id)
        return hits / self.ids, tokens / self.input_tokens, len(nodes)


def hit_tokens(request: TraceRequest, hit_ids: int, tokens_per_id: int) -> int:
    """Tokens of the first `hit_ids` ids: the last id of an input stands for what is left of it."""
    return request.input_length if hit_ids == len(request.ids) else hit_ids * tokens_per_id


def read_trace(path: str | Path, tokens_per_id: int = 512, first: int | None = None) -> Trace:
    """Reads a trace; `first` takes the first so many requests of the file only.

    Raises:
        ConfigError: the file cannot be read or holds no request; a line that is no request, with its number.
    """
    path = Path(path).expanduser()
    dense: dict[int, int] = {}
    requests = []
    try:
        with open(path, encoding="utf-8-sig") as lines:
            for number, line in _filled(lines):
                if first is not None and len(requests) == first:
                    break
                where = f"{path}, line {number}"
                requests.append(_request(_value(line, where), dense, tokens_per_id, where))
    except OSError as error:
        raise ConfigError(f"trace={path} cannot be read: {error.strerror}", fix="name a file that exists") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace={path} is not UTF-8 text: {error}", fix="a .jsonl file, not compressed") from error
    if not requests:
        raise ConfigError(f"trace={path} holds no requests", fix="one JSON object a line")
    requests.sort(key=lambda request: request.arrival)  # stable: equal times stay in the order of the file
    return Trace(requests, tokens_per_id, len(dense))


def _filled(lines) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _value(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # bad JSON; an integer of thousands of digits; too deep
        why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ConfigError(f"{where} is not JSON: {why}: {line.strip()[:60]!r}", fix="one JSON object a line") from error


def _request(value: Any, dense: dict[int, int], tokens_per_id: int, where: str) -> TraceRequest:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a request is an object, not {json.dumps(value)[:60]}", options=KEYS)
    missing = [key for key in KEYS if key not in value]
    if missing:
        raise ConfigError(f"{where}: the request has no key {missing[0]!r}", options=KEYS)
    time, inputs, outputs, ids = (value[key] for key in KEYS)
    rules = {
        "timestamp": (_is(time, int | float) and 0 <= time <= LATEST, "milliseconds >= 0"),
        "input_length": (_is(inputs, int) and 1 <= inputs <= LONGEST, f"an integer from 1 to {LONGEST}"),
        "output_length": (_is(outputs, int) and 0 <= outputs <= LONGEST, f"an integer from 0 to {LONGEST}"),
        "hash_ids": (isinstance(ids, list) and all(_is(id, int) for id in ids), "a list of integers"),
    }
    for key, (fine, valid) in rules.items():
        if not fine:
            raise ConfigError(f"{where}: {key}={json.dumps(value[key])[:60]} cannot be used", options=[valid])
    if len(ids) != -(-inputs // tokens_per_id):
        raise ConfigError(
            f"{where}: {len(ids)} hash_ids of tokens_per_id={tokens_per_id} tokens are not the {inputs} tokens of "
            "input_length",
            fix="tokens_per_id=N, the tokens that one hash id of this trace stands for",
        )
    known = [dense.setdefault(id, len(dense)) for id in ids]
    return TraceRequest(time / 1000, inputs, outputs, np.array(known, dtype=np.int32))


def _is(value: Any, kind) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
