"""`kvframe inspect`: watch a cache work. Steps and the index go to stdout; `out=` writes a page or the record."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from kvframe.commands.prompts import read_requests, sampling_params
from kvframe.config import build, plain
from kvframe.errors import ConfigError
from kvframe.jobs import Run
from kvframe.report import check_ending, versions, write_json, write_text
from kvframe.types import Request

ENDINGS = (".html", ".json")
SHOWN = (
    "A cache keeps what a reader will want again. The first reader asks for a story about the sea.",
    "A cache keeps what a reader will want again. The first reader asks for a story about the stars.",
    "A cache keeps what a reader will want again. The second reader asks for nothing at all.",
)


def run(cfg: DictConfig, job: Run) -> int:
    """Runs the prompts step by step. Answers 1 when some requests were refused."""
    check_ending("out", cfg.out, ENDINGS)
    if isinstance(cfg.steps, bool) or cfg.steps is not None and (not isinstance(cfg.steps, int) or cfg.steps < 0):
        raise ConfigError(f"steps={cfg.steps!r} cannot be used", options=["null", "an integer >= 0"], fix="steps=20")
    out = job.out(cfg.out)
    requests = _requests(cfg)
    engine = build(cfg)
    from kvframe.inspection import Recorder
    from kvframe.inspection.page import page
    from kvframe.inspection.text import LEGEND, lines, tree_lines

    recorder, steps, outputs = Recorder(engine), [], []
    print(LEGEND)
    for events in engine.steps(requests):
        outputs += [event.output for event in events if event.output is not None]
        step = recorder.step(events)
        if step is None:
            continue
        steps.append(step)
        if cfg.steps is None or len(steps) <= cfg.steps:
            print("\n".join(lines(step)), flush=True)
    if cfg.steps is not None and len(steps) > cfg.steps:
        print(f"... {len(steps) - cfg.steps} more steps (steps=null shows all)", file=sys.stderr)
    tokenizer = engine.model.tokenizer
    decode = (lambda ids: tokenizer.decode(ids)) if tokenizer is not None else (lambda ids: " ".join(map(str, ids)))
    if steps and steps[-1]["tree"]:
        print("what the index holds at the end: positions, text, block ids (x: held by so many requests, 0: a hole)")
        print("\n".join(tree_lines(steps[-1]["tree"], decode)))
    refused = [output for output in outputs if output.finish_reason == "refused"]
    for output in refused:
        print(f"refused: {output.error}", file=sys.stderr)
    if out is not None:
        record = {
            "cache": _title(cfg),
            "model": engine.model.name,
            "steps": steps,
            "requests": [output.to_dict() for output in outputs],
            "config": OmegaConf.to_container(cfg, resolve=True),
            "versions": versions(),
        }
        _write(out, record, lambda: page(record, decode))
    return 1 if refused else 0


def _write(out: Path, record: dict, html) -> None:
    write_json(out, record) if out.suffix.lower() == ".json" else write_text(out, html())
    print(f"written: {out}", file=sys.stderr)


def _requests(cfg: DictConfig) -> list[Request]:
    """The user's prompts; a few that begin alike when there are none."""
    sampling = plain(cfg, "sampling")
    if cfg.prompt is not None or cfg.prompts is not None:
        return read_requests(cfg.prompt, cfg.prompts, sampling, cfg.chat)
    params = sampling_params(sampling)
    return [Request(prompt=text, sampling=params, id=f"r{i}") for i, text in enumerate(SHOWN)]


def _title(cfg: DictConfig) -> str:
    """What the user chose, in the words of the command line."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return "cache"
    chosen = [o for o in HydraConfig.get().overrides.task if o.startswith(("cache", "+cache"))]
    return " ".join(chosen) or f"cache={HydraConfig.get().runtime.choices['cache']}"
