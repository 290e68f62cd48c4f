"""What is built, read and checked before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvframe.errors import ConfigError, KVFrameError
from kvframe.evaluation import needle, runs, texts
from kvframe.evaluation.settings import Settings
from kvframe.lineup import Candidate, running
from kvframe.text import TextCodec


@dataclass(frozen=True)
class Sketch:
    """What is asked of a candidate before the work: is it exact, and its longest text."""

    candidate: Candidate
    exact: bool
    limit: int


def sketch(candidate: Candidate, model: Any) -> Sketch:
    """Builds the cache of a candidate and lets it go again. KVFrameError: it cannot be built."""
    with running(candidate, model, warm=False) as engine:
        return Sketch(candidate, bool(engine.cache.exact), engine.limit)


def sketches(candidates: list[Candidate], model: Any, all_presets: bool) -> tuple[list[Sketch], dict[str, str]]:
    """Builds each cache once, so that one that cannot be built is known before the others have computed for minutes.

    Returns: the sketches, and name -> reason of those that were left out (only where `all_presets`).
    Raises: KVFrameError: one that was asked for by its name, or none of all, can be built.
    """
    found, skipped = [], {}
    for candidate in candidates:
        try:
            found.append(sketch(candidate, model))
        except KVFrameError as error:
            if not all_presets:
                raise
            skipped[candidate.name] = str(error)
    if not found:
        raise ConfigError(f"none of the presets can be built: {'; '.join(skipped.values())}", fix="caches=[NAME]")
    return found, skipped


def free_name(candidate: Candidate, others: list[Candidate]) -> Candidate:
    """The candidate under a name that none of the others has."""
    taken = candidate.name in {other.name for other in others}
    return Candidate(f"{candidate.name} (reference)", candidate.cfg) if taken else candidate


def material(settings: Settings, model: Any, found: list[Sketch], notes: list[str]) -> runs.Material:
    """Texts, prompts and haystacks, none longer than the least of the caches takes. What there is less of than was
    asked for is told in `notes`.

    Raises: ConfigError: a text or a haystack is too long for a cache, or too short.
    """
    codec = TextCodec(model.tokenizer, vocab_size=model.vocab_size)
    tokens = texts.tokens_of(settings.text, codec, settings.max_tokens * settings.texts)
    pieces = texts.split(tokens, settings.max_tokens, settings.texts)
    if len(pieces) < settings.texts:
        notes.append(
            f"texts={settings.texts}: text={settings.text} has {len(tokens)} tokens, enough for {len(pieces)} of "
            f"max_tokens={settings.max_tokens}"
        )
    least = min(found, key=lambda sketch: sketch.limit)
    for key, n in [("max_tokens", len(pieces[0])), *(("needle.lengths", n) for n in settings.lengths)]:
        if n > least.limit:
            smaller = f"{key}={least.limit}" if key == "max_tokens" else f"{key}=[{least.limit}]"
            raise ConfigError(
                f"{key}: {n} tokens are more than the {least.limit} that the cache {least.candidate.name!r} of this "
                "model takes",
                options=[f"2 .. {least.limit}"],
                fix=f"{smaller}, or a larger engine.max_len or cache.memory where the model allows it",
            )
    cells = needle.cells(list(settings.lengths), list(settings.depths), tokens, codec)
    made = runs.Material(tuple(pieces), settings.decode_tokens, settings.greedy_tokens, tuple(cells))
    longest = max(len(prompt) for prompt in made.prompts)
    room = least.limit - longest
    if room >= made.greedy_tokens:
        return made
    notes.append(
        f"greedy_tokens={made.greedy_tokens}: {room} are generated, which is what the cache {least.candidate.name!r} "
        f"has room for behind a prompt of {longest} tokens"
    )
    return replace(made, greedy_tokens=room)
