"""Prompts of a command: from `prompt=`, a file (see kvframe.promptfile), or stdin."""

from __future__ import annotations

import functools
import sys

from kvframe.errors import ConfigError
from kvframe.promptfile import as_chat, read_file, sampling_params, with_ids
from kvframe.types import Request

__all__ = ["read_requests", "sampling_params"]


def read_requests(prompt: str | None, prompts: str | None, sampling: dict, chat: bool) -> list[Request]:
    """The requests of a run, each with an id.

    Args:
        prompt: a text; prompts: name of a file; neither: stdin, when it is not a terminal.
        sampling: what a request that says nothing else gets; chat: a text becomes one user message.

    Raises:
        ConfigError: both or none are given, or a file cannot be read; it names file and line.
    """
    params = sampling_params(sampling)
    if prompt is not None and prompts is not None:
        raise ConfigError("prompt= and prompts= are both given", fix="give one of them")
    if prompts is not None:
        requests = list(read_file(prompts, params))
    else:
        prompt = _stdin() if prompt is None else prompt
        if prompt is None:
            raise ConfigError(
                "there is nothing to decode", fix='prompt="Once upon a time", prompts=FILE, or text on stdin'
            )
        requests = [Request(prompt=prompt, sampling=params)]
    named = with_ids(requests)
    return [as_chat(request) for request in named] if chat else named


@functools.cache  # the jobs of a sweep all see it
def _stdin() -> str | None:
    """The text on stdin, less one line end; None when nobody writes there."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return None
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not UTF-8 text: {error}") from error
    return text.removesuffix("\n") or None
