"""Requests from a file, as `kvframe generate prompts=FILE` takes it."""

from __future__ import annotations

from dataclasses import fields, replace

from kvframe.errors import ConfigError, OptionError
from kvframe.promptfile import as_chat, read_file, with_ids
from kvframe.types import Request, SamplingParams
from kvframe.workloads.drawing import count
from kvframe.workloads.workload import Facts, Rounds, Workload


class File(Workload):
    """The prompts of a `.jsonl` or `.txt` file, all at once. Decoding is greedy and outputs have a fixed length, for
    all candidates alike: of a line's `sampling` only `max_new_tokens` can be used.

    Args:
        path: the file. output: tokens of each output that names no number. requests: only the first so many; None:
        all. chat: each text becomes one user message of the model's chat template.
    """

    def __init__(self, path: str, output: int = 64, requests: int | None = None, chat: bool = False):
        self.path, self.output, self.chat = str(path), count("output", output), chat
        if not isinstance(chat, bool):
            raise OptionError("chat", chat, options=["true", "false"])
        most = None if requests is None else count("requests", requests)
        params = SamplingParams(max_new_tokens=output, ignore_eos=True)
        self.requests = with_ids(list(read_file(self.path, params, "workload.path"))[:most])
        for request in self.requests:
            _check(request)
        self.what = f"{len(self.requests)} requests from {self.path}"

    def rounds(self, facts: Facts) -> Rounds:
        yield [self._as_tokens(as_chat(request) if self.chat else request, facts) for request in self.requests]

    def _as_tokens(self, request: Request, facts: Facts) -> Request:
        if request.messages is not None:
            ids = facts.text.chat(request.messages)
        elif request.prompt is not None:
            ids = facts.text.encode(request.prompt)
        else:
            ids = request.prompt_tokens
        if not len(ids):
            raise ConfigError(f"workload.path={self.path}: request {request.id!r} is empty", fix="give it a prompt")
        return replace(request, prompt=None, messages=None, prompt_tokens=ids)


def _check(request: Request) -> None:
    """Refuses what would make candidates do different work."""
    plain = SamplingParams(max_new_tokens=request.sampling.max_new_tokens, ignore_eos=True)
    for field in fields(SamplingParams):
        value = getattr(request.sampling, field.name)
        if value != getattr(plain, field.name):
            raise ConfigError(
                f"request {request.id!r} sets sampling.{field.name}={value!r}: a comparison decodes greedily, to a "
                "fixed length",
                options=["max_new_tokens"],
                fix=f"leave {field.name} out",
            )
    if request.arrival:
        raise ConfigError(f"request {request.id!r} has arrival={request.arrival}: all come at once", fix="leave it out")
    if request.sampling.max_new_tokens < 1:
        raise ConfigError(f"request {request.id!r} sets max_new_tokens=0: there is nothing to compare", fix="1 or more")
