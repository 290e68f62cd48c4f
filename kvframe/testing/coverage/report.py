"""What the rows say: JSON for machines, a page of tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvframe import report

COMMAND = "python -m kvframe.testing.coverage"
TITLES = {"exact": "Exact", "refused": "Refused", "out_of_scope": "Out of scope", "wrong": "Wrong"}
USED = ("kvframe", "torch", "transformers", "python")

PAGE = """# Models

Which of the {architectures} causal language model classes of transformers run under kvframe. This page is written by
`{command}` with {versions}.

| status | classes |
|---|---|
{counts}

Of the exact ones, {exact_decoders} are decoders that stand alone. The others are encoders that run as decoders, or
decoders that can look at another sequence and here do not.

## How it is found

Each class gets a tiny model with random weights from its config class: every size small, the kinds of layers mixed,
fewer KV heads than query heads where the config has a number for them. It runs in fp32 through the engine with the
`reference` kernel: prompts of 1 to 37 tokens at once, prefill in chunks of 7 beside decoding, blocks of 4 tokens, and a
second run whose prompts are found in the prefix index. Windows and chunks are 8 tokens, so all are left behind; what
scales with the position does so from 32 on. Log-probabilities may differ by 1e-3 of the logits' standard deviation.

No list of names decides anything: whether a model of yours runs is found in the same way when it is loaded.

To make this page again:

```
{command} --out cov.json --markdown docs/models.md
```

## Exact

Greedy tokens and all logits are those of the same model under transformers' eager attention without a cache. Layers are
those that the probe saw; heads are query/KV, sizes key/value, of the tiny model.

{exact}

## Refused

Loading it raises `UnsupportedModelError` with the fact that is named here, seen in a forward of the model. Beside it:
what happens when it is not refused.

{refused}

## Out of scope

Refused too, and no decoder that stands alone: it looks at another sequence, or at what follows.

{out_of_scope}

## Wrong

Neither exact nor refused for a reason. There must be none.

{wrong}
"""


def result(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`versions, counts, rows`."""
    return {"versions": versions(), "counts": counts(rows), "rows": list(rows)}


def versions() -> dict[str, str | None]:
    found = report.versions()
    return {name: found[name] for name in USED}


def counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Rows of each status; `exact_decoders` are the exact ones that are decoders which stand alone."""
    found = Counter(row["status"] for row in rows)
    alone = sum(row["status"] == "exact" and not _of(row, "note") for row in rows)
    return {"architectures": len(rows), **{status: found[status] for status in TITLES}, "exact_decoders": alone}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page docs/models.md."""
    n = counts(rows)
    columns = {
        "exact": ("class", "layers", "heads", "sizes", "also"),
        "refused": ("class", "what was seen", "without the refusal"),
        "out_of_scope": ("class", "why", "refused because"),
        "wrong": ("class", "what is wrong"),
    }
    tables = {
        status: _table(names, [_cells(row) for row in rows if row["status"] == status])
        for status, names in columns.items()
    }
    return PAGE.format(
        command=COMMAND,
        versions=", ".join(f"{name} {value}" for name, value in versions().items()),
        architectures=n["architectures"],
        exact_decoders=n["exact_decoders"],
        counts="\n".join(_line((title.lower(), str(n[status]))) for status, title in TITLES.items()),
        **tables,
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What stands in the row of a class, under the columns of its status."""
    name, reason = row["architecture"], row["reason"]
    if row["status"] == "exact":
        note = _of(row, "note").partition(":")[0].partition(" (")[0]  # the fact without its numbers
        also = "; ".join(filter(None, (_of(row, "also"), note)))
        return name, _of(row, "layers"), _of(row, "heads"), _of(row, "sizes"), also
    if row["status"] == "refused":
        return name, reason, _of(row, "evidence").removeprefix("without the refusal: ")
    if row["status"] == "out_of_scope":
        return name, reason, _of(row, "refusal")
    return name, reason


def _of(row: Mapping[str, Any], key: str) -> str:
    """What the configs of a class have there, each text once."""
    return "; ".join(dict.fromkeys(config[key] for config in row["configs"] if config.get(key)))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_line(row) for row in sorted(rows, key=lambda row: row[0].lower())]
    return "\n".join([_line(columns), "|" + "---|" * len(columns), *lines]) if lines else "None."


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
