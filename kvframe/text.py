"""Text in and out: tokenizers behind one interface, and text that streams token by token.

No transformers import: a Hugging Face tokenizer is used through its methods, and a model without one gets bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvframe.errors import ConfigError, RequestError

UNFINISHED = "\ufffd"  # what decoders put for bytes that are not (yet) a character
LONGEST_WINDOW = 16  # tokens that are decoded again at most, when no character boundary comes by itself
ROLES = ("system", "user", "assistant", "tool")


class ByteTokenizer:
    """Text as UTF-8 bytes, for models without a tokenizer (random weights). Ids >= 256 are shown as `⟨1234⟩`."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Bytes of the text. ConfigError when the vocabulary is too small to hold them."""
        if self.vocab_size < 256:
            raise ConfigError(
                f"a model without a tokenizer reads text as bytes: vocab_size={self.vocab_size} is too small",
                fix="give prompt_tokens instead of text, or a model with vocab_size >= 256",
            )
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int], **_: Any) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        parts = (bytes([i]) if i < 256 else f"⟨{i}⟩".encode() for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")


class TextCodec:
    """One interface over Hugging Face tokenizers and ByteTokenizer.

    Args:
        tokenizer: a transformers tokenizer, a ByteTokenizer, or None for bytes.
        vocab_size: of the model; needed when tokenizer is None.
    """

    def __init__(self, tokenizer: Any = None, *, vocab_size: int | None = None):
        self.tokenizer = ByteTokenizer(vocab_size or 0) if tokenizer is None else tokenizer
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        self.silent = {int(i) for i, token in added.items() if getattr(token, "special", False)}
        self.silent |= set(getattr(self.tokenizer, "all_special_ids", ()))  # ids that decode() leaves out
        self._backend = _backend(self.tokenizer)
        self._single: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer adds by itself."""
        if not isinstance(text, str):
            raise RequestError(f"prompt={text!r} is not text", fix="give a string, or prompt_tokens for token ids")
        return [int(i) for i in self.tokenizer.encode(text)]

    def chat(self, messages: Sequence[Mapping]) -> list[int]:
        """Token ids of a conversation, up to where the assistant begins to speak.

        The template writes the special tokens (BOS too), so the tokenizer adds none of its own.

        Raises:
            RequestError: no chat template, a malformed message, or the template refuses the conversation.
        """
        check_messages(messages)
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(
                "messages were given, and this model's tokenizer has no chat template",
                fix="give prompt= with plain text (chat=false), or use an instruction-tuned model",
            )
        try:
            out = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # jinja2 errors; raise_exception() of the template itself
            raise RequestError(
                f"the chat template of this model refuses the messages: {error}",
                fix="many templates want roles to alternate user/assistant and start with user; some allow no system",
            ) from error
        out = out["input_ids"] if isinstance(out, Mapping) or hasattr(out, "input_ids") else out
        out = out[0] if len(out) and isinstance(out[0], (list, tuple)) else out
        return [int(i) for i in out]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids without special tokens, and without the clean-up of spaces (it would undo what was
        streamed)."""
        ids = [int(i) for i in ids]
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=True)
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode_one(self, id: int) -> str:
        """The same for one token, remembered."""
        if id not in self._single:
            self._single[id] = self.decode([id])
        return self._single[id]

    def detokenizer(self, stop: Sequence[str] = (), context: Sequence[int] = ()) -> Detokenizer:
        return Detokenizer(self, stop, context)


def _backend(tokenizer: Any) -> Any:
    """The compiled tokenizer whose `decode` is all that a transformers tokenizer's does (no clean-up of spaces), or
    None where a class has a `decode` of its own: the way through transformers takes several times as long."""
    mine = [getattr(getattr(type(tokenizer), name, None), "__module__", "") for name in ("decode", "_decode")]
    if mine != ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]:
        return None
    return getattr(tokenizer, "backend_tokenizer", None)


def check_messages(messages: Any) -> None:
    """RequestError that names the first malformed message."""
    example = 'messages look like [{"role": "user", "content": "Hello"}]'
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError(f"messages={messages!r} is not a list of messages", fix=example)
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{i}]={message!r} is not a mapping with a role and a content", fix=example)
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise RequestError(f"messages[{i}] has role={role!r}", options=ROLES, fix=example)
        calls = content is None and message.get("tool_calls")
        parts = isinstance(content, Sequence) and all(isinstance(part, (str, Mapping)) for part in content)
        if not (isinstance(content, str) or parts or calls):
            raise RequestError(f"messages[{i}] (role {role!r}) has content={content!r}", options=["text"], fix=example)


class Detokenizer:
    """Text of one request, token by token: `push` answers what may be shown now, `finish` the rest.

    The window holds the tokens since the character boundary before the last one; only it is decoded again:

        tokens   ... | "Hel" "lo" |  " wor"  0xF0 0x9F       | boundaries: the text so far has no unfinished character
                       ^ context     ^ new                   "Hello" is known, decode(window) gives "Hello wor\ufffd"
                                                             " wor" may go out, the unfinished character waits

    The context makes tokenizers that drop or insert a space at the start of a text do so where it is not seen. Text
    that may be the beginning of a stop string waits as well. The text ends before the stop string that is complete
    first (of those that end at the same character, before the longest), which does not depend on how it was cut into
    tokens. All deltas together are `text`; without a stop string it is `codec.decode(ids)`.

    Args:
        codec: a TextCodec.
        stop: strings that end the text.
        context: last tokens before the first one (their text is not shown), for tokenizers that drop a leading space
            when a text starts with it. Without it, `text` is what decode gives for the output alone.

    Attributes:
        stopped: a stop string was found; later tokens are ignored.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str] = (), context: Sequence[int] = ()):
        self.codec, self.stop, self.context, self.stopped = codec, tuple(stop), tuple(context), False
        self._window = [int(i) for i in context if int(i) not in codec.silent]
        self._read = len(self._window)  # tokens of the window before the last boundary
        self._known = codec.decode(self._window)  # the beginning of decode(window) that is behind us
        self._held = ""  # decoded text that may be the beginning of a stop string
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """Everything that was answered so far."""
        return "".join(self._parts)

    def again(self, tokens: Iterable[int]) -> Detokenizer:
        """A new one, as this one was when it had taken only these tokens."""
        other = Detokenizer(self.codec, self.stop, self.context)
        for token in tokens:
            other.push(token)
        return other

    def push(self, token: int) -> str:
        """Take one more token; answer the text that is certain now (often empty)."""
        if self.stopped or int(token) in self.codec.silent:
            return ""
        self._window.append(int(token))
        text = self.codec.decode(self._window)
        waiting = min(3, len(text) - len(text.rstrip(UNFINISHED)))  # a character is up to 3 unfinished bytes
        if text.startswith(self._known):
            end = max(len(self._known), len(text) - waiting)
            delta, self._known = text[len(self._known) : end], text[:end]
        else:  # byte fallback: an unfinished character makes U+FFFD of the characters before it as well, for a while
            waiting, delta = 1, ""
        if not waiting and delta:
            self._window, self._read = self._window[self._read :], len(self._window) - self._read
            one = len(self._window) == 1
            self._known = self.codec.decode_one(self._window[0]) if one else self.codec.decode(self._window)
        elif len(self._window) - self._read > LONGEST_WINDOW:
            delta += self._shorten(text)
        return self._release(delta)

    def finish(self) -> str:
        """The rest of the text: unfinished characters, and what waited for a stop string that did not come."""
        if self.stopped:
            return ""
        text = self.codec.decode(self._window)
        same = text.startswith(self._known)
        delta = text[len(self._known) :] if same else self.codec.decode(self._window[self._read :])
        self._window, self._read, self._known = [], 0, ""
        return self._release(delta, last=True)

    def _shorten(self, text: str) -> str:
        """Cut a window without boundaries (garbage bytes) where both halves decode to the same text as the whole. The
        last four tokens stay: a character that begins before them is complete by now, so a cut through it shows."""
        window = self._window
        for cut in range(len(window) - 4, 0, -1):
            head = self.codec.decode(window[:cut])
            if head + self.codec.decode(window[cut:]) == text:
                delta = head[len(self._known) :]
                self._window, self._read, self._known = window[cut:], 0, text[len(head) : len(self._known)]
                return delta
        return ""

    def _release(self, delta: str, last: bool = False) -> str:
        """Add delta to what is held; answer what surely comes before any stop string."""
        self._held += delta
        found = [(at + len(s), at) for s in self.stop if (at := self._held.find(s)) >= 0]
        if found:
            self.stopped, keep = True, min(found)[1]
        else:
            keep = len(self._held) if last or not self.stop else len(self._held) - self._overlap()
        out, self._held = self._held[:keep], "" if self.stopped else self._held[keep:]
        if out:
            self._parts.append(out)
        return out

    def _overlap(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self.stop)) - 1)
        for n in range(longest, 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self.stop):
                return n
        return 0
