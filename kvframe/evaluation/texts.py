"""The tokens that are computed: from the manual that comes with Python, or from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvframe.errors import ConfigError
from kvframe.text import ByteTokenizer, TextCodec

BUILTIN = "builtin"
CHARACTERS = 12  # of text per token that are read at first; more than any tokenizer needs on English


def read(source: str) -> str:
    """The text that `text=` names. ConfigError: the file cannot be read, or is not UTF-8."""
    if source == BUILTIN:
        import pydoc_data.topics

        topics = pydoc_data.topics.topics
        return " ".join(topics[name] for name in sorted(topics))
    path = Path(source).expanduser()
    fix = f"text=FILE, or text={BUILTIN} for the manual that comes with Python"
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"text={source} is not UTF-8: {error.reason} at byte {error.start}", fix=fix) from error
    except OSError as error:
        raise ConfigError(
            f"text={source} cannot be read: {error.strerror}", options=[BUILTIN, "a file"], fix=fix
        ) from None
    except ValueError as error:  # a null character in the name
        raise ConfigError(f"text={source!r} cannot be read: {error}", fix=fix) from error


def tokens_of(source: str, codec: TextCodec, wanted: int) -> np.ndarray:
    """int32 [n], the first `wanted` tokens of a text, fewer where it ends.

    Raises:
        ConfigError: the file cannot be read, or has fewer than 2 tokens: nothing can be predicted.
    """
    text = read(source)
    ids = codec.encode(text[: CHARACTERS * wanted])
    if len(ids) < wanted and len(text) > CHARACTERS * wanted:
        ids = codec.encode(text)
    if len(ids) < 2:
        raise ConfigError(
            f"text={source} has {len(ids)} token(s); at least 2 are needed, one to predict the other",
            fix=f"a longer text, or text={BUILTIN}",
        )
    return np.array(ids[:wanted], dtype=np.int32)


def split(tokens: np.ndarray, longest: int, texts: int) -> list[np.ndarray]:
    """At most `texts` pieces of `longest` tokens, one after another; the only one may be shorter.

    tokens 0 .. 9, longest 4, texts 3  ->  0 1 2 3 | 4 5 6 7        (8 and 9 are not enough for a third)
    """
    pieces = [tokens[i * longest : (i + 1) * longest] for i in range(texts)]
    return [piece for i, piece in enumerate(pieces) if i == 0 or len(piece) == longest]


def bare(codec: TextCodec, text: str) -> list[int]:
    """Token ids of a piece of text that stands within another: no special tokens."""
    if isinstance(codec.tokenizer, ByteTokenizer):
        return codec.encode(text)
    return [int(i) for i in codec.tokenizer.encode(text, add_special_tokens=False)]
