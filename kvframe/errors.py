"""One family of errors. Every message names the value, the valid options and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class KVFrameError(Exception):
    """Base of all errors that a user can cause.

    Args:
        message: what is wrong, naming the value.
        options: the valid values, when there is a list of them.
        fix: what to type or install instead.
    """

    def __init__(self, message: str, *, options: Iterable[str] = (), fix: str | None = None):
        self.message, self.options, self.fix = message, tuple(options), fix
        text = message
        if self.options:
            text += f"\n  valid: {', '.join(self.options)}"
        if fix:
            text += f"\n  fix: {fix}"
        super().__init__(text)


class ConfigError(KVFrameError):
    """A config names something that does not exist or has a value that cannot work."""


class OptionError(ConfigError):
    """A value that an option of a part cannot have.

    A part does not know where in a config it stands; `create` does, and puts that key in front.

    Args:
        option, value: the name of the parameter, and what it was given.
        why: the rest of the sentence.
        options: the valid values.
        fix: what to type instead; `{name}` in it stands for the option's name, key and all.
        key: where the part stands; empty: not known.
    """

    def __init__(
        self,
        option: str,
        value: Any,
        why: str = "cannot be used",
        *,
        options: Iterable[str] = (),
        fix: str | None = None,
        key: str = "",
    ):
        name = f"{key}.{option}" if key else option
        options = tuple(options)
        self._given = {"option": option, "value": value, "why": why, "options": options, "fix": fix}
        super().__init__(f"{name}={value!r} {why}", options=options, fix=fix and fix.replace("{name}", name))

    def at(self, key: str) -> OptionError:
        """The same error of a part that stands at this key, e.g. "cache.codec"."""
        return OptionError(**self._given, key=key)


class IncompatibleCacheError(KVFrameError):
    """Parts that cannot work together. Lists *every* reason; each names the override that fixes it."""

    def __init__(self, reasons: Iterable[str]):
        self.reasons = tuple(reasons)
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"these parts do not compose ({len(self.reasons)} reason(s)):{lines}")


class UnsupportedModelError(KVFrameError):
    """The probe saw something that this engine would compute silently wrong."""


class MissingPackageError(KVFrameError):
    """An optional package is needed and is not installed."""


class PluginError(KVFrameError):
    """A plugin is broken, or two plugins claim one name."""


class RequestError(KVFrameError):
    """A request that can never run: empty, malformed or with impossible parameters."""


class PromptTooLongError(RequestError):
    """A request that is longer than the engine or the cache can ever hold."""


class CapacityError(KVFrameError):
    """The cache memory is too small for even one block."""
