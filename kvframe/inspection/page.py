"""A record of steps as one HTML page that needs no network: `page.html` with the record in it."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from importlib import resources
from typing import Any


def page(record: dict[str, Any], decode: Callable[[list[int]], str]) -> str:
    """The page.

    Args:
        record: cache, model, steps (of the Recorder), requests (as RequestOutput.to_dict).
        decode: token ids -> text, for the nodes of the index.
    """
    steps = [{**step, "tree": [_short(node, decode) for node in step["tree"]]} for step in record["steps"]]
    requests = [
        {"id": r["id"], "sample": r["sample"], "prompt": r["prompt"], "text": r["text"], "reason": r["finish_reason"]}
        for r in record["requests"]
    ]
    data = {"cache": record["cache"], "model": record["model"], "steps": steps, "requests": requests}
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # no text can end the script
    return template.replace("{{title}}", html.escape(f"{record['cache']} at work")).replace("{{data}}", text)


def _short(node: dict[str, Any], decode: Callable[[list[int]], str]) -> dict[str, Any]:
    return {**node, "text": decode(node["tokens"]), "tokens": len(node["tokens"])}
