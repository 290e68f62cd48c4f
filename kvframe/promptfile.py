"""A file of prompts.

A `.txt` file holds one prompt a line. A `.jsonl` file holds one JSON value a line, a text or an object:

    "Once upon a time"
    {"prompt": "What is a cache?", "id": "q1", "sampling": {"max_new_tokens": 32}}
    {"prompt_tokens": [1, 17, 4], "salt": "user-7", "arrival": 0.5}
    {"messages": [{"role": "user", "content": "Hello!"}]}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvframe.create import nearest
from kvframe.errors import ConfigError, RequestError
from kvframe.types import Request, SamplingParams

KEYS = ("prompt", "prompt_tokens", "messages", "id", "salt", "keep", "arrival", "sampling")
SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))


def sampling_params(values: dict, base: SamplingParams | None = None) -> SamplingParams:
    """SamplingParams from config or JSON values.

    Raises:
        ConfigError: a key that does not exist; RequestError: a value that cannot be used.
    """
    for name in values:
        if name not in SAMPLING:
            raise ConfigError(f"sampling has no key {name!r}", options=nearest(name, SAMPLING))
    return dataclasses.replace(base or SamplingParams(), **values)


def read_file(name: str, params: SamplingParams, key: str = "prompts") -> Iterator[Request]:
    """The requests of a file; those without an id have None.

    Args:
        params: what a request that says nothing else gets; key: the override that named the file, for messages.

    Raises:
        ConfigError: the file cannot be read, or a line of it, which is named.
    """
    path = Path(name).expanduser()
    if path.suffix not in (".jsonl", ".txt"):
        raise ConfigError(f"{key}={path} has the ending {path.suffix!r}", options=[".jsonl", ".txt"])
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be read: {error.strerror}", fix="name a file that exists") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}={path} is not UTF-8 text: {error}") from error
    lines, seen = text.split("\n"), {}
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        if path.suffix == ".txt":
            yield Request(prompt=line, sampling=params)
            continue
        where = f"{key}={path}, line {number}"
        try:
            request = _request(json.loads(line), params)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where} is not JSON: {error.msg} at column {error.colno}: {line[:60]!r}") from error
        except (ConfigError, RequestError) as error:
            raise ConfigError(f"{where}: {error.message}", options=error.options, fix=error.fix) from error
        if request.id is not None and request.id in seen:
            raise ConfigError(
                f"{where}: the id {request.id!r} is also on line {seen[request.id]}", fix="give each an id of its own"
            )
        seen[request.id] = number
        yield request
    if not any(line.strip() for line in lines):
        raise ConfigError(f"{key}={path} holds no prompts", fix="one prompt a line")


def with_ids(requests: list[Request]) -> list[Request]:
    """The requests with an id each."""
    taken = {request.id for request in requests}
    free = (name for i in range(2 * len(requests)) if (name := f"r{i}") not in taken)
    return [request if request.id else dataclasses.replace(request, id=next(free)) for request in requests]


def as_chat(request: Request) -> Request:
    """Its text as one user message of the model's chat template; a request without text is left as it is."""
    if request.prompt is None:
        return request
    return dataclasses.replace(request, prompt=None, messages=[{"role": "user", "content": request.prompt}])


def _request(value: Any, params: SamplingParams) -> Request:
    if isinstance(value, str):
        return Request(prompt=value, sampling=params)
    if not isinstance(value, dict):
        raise ConfigError(f"a prompt is a text or an object, not {json.dumps(value)[:60]}", options=KEYS)
    for name in value:
        if name not in KEYS:
            raise ConfigError(f"a request has no key {name!r}", options=nearest(name, KEYS))
    rules = {
        "prompt": (isinstance(value.get("prompt", ""), str), "a text"),
        "prompt_tokens": (_are(value.get("prompt_tokens", []), int), "a list of token ids"),
        "messages": (_are(value.get("messages", []), dict), 'a list of {"role": ..., "content": ...}'),
        "id": (isinstance(value.get("id", ""), str), "a text"),
        "salt": (isinstance(value.get("salt", ""), str), "a text"),
        "keep": (isinstance(value.get("keep", {}), dict), '{"priority": 1, "pin": 60}'),
        "arrival": (isinstance(value.get("arrival", 0), int | float), "seconds"),
        "sampling": (isinstance(value.get("sampling", {}), dict), "an object of sampling keys"),
    }
    for name, (fine, valid) in rules.items():
        if not fine:
            raise ConfigError(f"{name}={json.dumps(value[name])[:60]} cannot be used", options=[valid])
    return Request(**{**value, "sampling": sampling_params(value.get("sampling", {}), params)})


def _are(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in values)
