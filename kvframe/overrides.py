r"""Free text in overrides: what people write is what arrives.

Hydra's override grammar gives a meaning to commas, brackets, quotes, `=` and bare numbers, and OmegaConf one to `${}`.
The values of text keys are quoted here before either sees them:

    prompt=Hello, what's new?      ->  prompt='Hello, what\'s new?'
    prompt=cost: ${price}          ->  prompt='cost: \${price}'      (OmegaConf reads \${ as the text ${)

So a text is never a list, a number, an interpolation or a sweep.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvframe.errors import ConfigError

TEXT = {"prompt", "text"}  # taken as they are, whatever they are
PATHS = {"prompts", "out", "plot", "trace", "model.name", "workload.path"}  # the same, but `null` means none
LISTS = {"sampling.stop"}  # a text, `null`, or a Hydra list of texts when it starts with [ and ends with ]
TEXT_KEYS = TEXT | PATHS | LISTS

_OVERRIDE = re.compile(r"(?P<prefix>\+{0,2})(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
_MISSING = "???"  # OmegaConf's word for a value that must be given


def quote(overrides: Iterable[str]) -> list[str]:
    """Overrides with the values of text keys quoted; all others are left as they are."""
    return [_quote_one(override) for override in overrides]


def _quote_one(override: str) -> str:
    match = _OVERRIDE.fullmatch(override)
    if match is None or match["key"] not in TEXT_KEYS:
        return override
    key, value = match["key"], match["value"]
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{key}={value!r} is not valid UTF-8 text", fix="give UTF-8, e.g. in a file: prompts=FILE"
        ) from error
    if key not in TEXT and value == "null" or key in LISTS and _is_list(value):
        return override
    return f"{match['prefix']}{key}={quoted(value)}"


def quoted(text: str) -> str:
    """`text` as a Hydra value that OmegaConf resolves to `text`."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if text == _MISSING:
        return "'${kvframe.missing:}'"
    # a run of n backslashes before ${ is read as n // 2 of them, an odd one protects the ${
    escaped = re.sub(r"(\\*)\$\{", lambda run: run[1] * 2 + "\\${", text)
    return QuotedString(escaped, Quote.single).with_quotes()


def _is_list(value: str) -> bool:
    """Does the value read as a list of Hydra's grammar?"""
    if not (value.startswith("[") and value.endswith("]")):
        return False
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return isinstance(OverridesParser.create().parse_override(f"x={value}").value(), list)
    except HydraException:  # of the parser, or of the lexer below it
        return False
