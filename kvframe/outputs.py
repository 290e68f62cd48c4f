"""What a run answers: one RequestOutput per sample, and events while it streams."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass
class RequestOutput:
    """One finished sample of one request.

    Attributes:
        id: id of the request; sample: 0 .. n - 1.
        prompt: the text that was asked for, or None when tokens were given.
        prompt_tokens, output_tokens: token ids; an EOS or stop token is the last output token, but not text.
        text: decoded output, ended before a stop string.
        finish_reason: "stop" (EOS, stop token or stop string), "length" (max_new_tokens or the longest
            length that the engine holds), "abort", "refused" (it can never fit) or "error" (the model
            answered no numbers); the last two with `error`.
        ttft_s: seconds from arrival to the first token; itl_s: mean seconds between tokens; None when
            there are none.
        cached_tokens: prompt tokens that needed no compute.
        preemptions: times that the request lost its cache and was recomputed.
        logprobs: per output token `{"token", "logprob", "top": {id: logprob}}` when asked for.
        error: why the request was refused or failed.
    """

    id: str
    sample: int = 0
    prompt: str | None = None
    prompt_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    ttft_s: float | None = None
    itl_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    logprobs: list[dict] | None = None
    error: str | None = None

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Event:
    """Something a stream tells: new text of one sample, and its output when it is done."""

    id: str
    sample: int
    token: int | None
    text: str
    output: RequestOutput | None = None
