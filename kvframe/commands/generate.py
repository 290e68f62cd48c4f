"""`kvframe generate`: decodes prompts. Texts go to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from omegaconf import DictConfig, OmegaConf

from kvframe.commands.prompts import read_requests
from kvframe.config import build, plain
from kvframe.errors import ConfigError, RequestError
from kvframe.jobs import Run
from kvframe.outputs import Event, RequestOutput
from kvframe.report import console, human_bytes, human_seconds, table, versions, write_json
from kvframe.types import Request


def run(cfg: DictConfig, job: Run) -> int:
    """Decodes what the config asks for. Answers 1 when some requests were refused."""
    requests = read_requests(cfg.prompt, cfg.prompts, plain(cfg, "sampling"), cfg.chat)
    out = job.out(cfg.out)
    engine = build(cfg)
    from kvframe.memprofile import activations, profile

    if not isinstance(cfg.profile, bool):
        raise ConfigError(f"profile={cfg.profile!r} cannot be used", options=["true", "false"])

    alone = len(requests) == 1 and requests[0].sampling.n == 1
    with activations(engine.model) if cfg.profile else nullcontext() as seen:
        outputs = _stream_one(engine.stream(requests)) if alone else _stream_many(engine.stream(requests), requests)
    refused = [output for output in outputs if output.finish_reason == "refused"]
    if alone and refused:
        raise RequestError(refused[0].error)
    summary = {**engine.summary(), "kernels": engine.kernels(), "memory": profile(engine, seen)}
    console(stderr=True).print(summary_table(summary))
    for output in refused:
        print(f"refused: {output.error}", file=sys.stderr)
    if out is not None:
        write_json(
            out,
            {
                "requests": [output.to_dict() for output in outputs],
                "summary": summary,
                "config": OmegaConf.to_container(cfg, resolve=True),
                "versions": versions(),
            },
        )
        print(f"written: {out}", file=sys.stderr)
    return 1 if refused else 0


def _stream_one(events: Iterable[Event]) -> list[RequestOutput]:
    """Shows the text of the only sample as it comes."""
    outputs = []
    for event in events:
        if event.text:
            print(event.text, end="", flush=True)
        if event.output is not None:
            outputs.append(event.output)
    print(flush=True)
    return outputs


def _stream_many(events: Iterable[Event], requests: list[Request]) -> list[RequestOutput]:
    """Shows progress while it runs, and the texts in the order of the requests afterwards."""
    outputs = []
    with _progress(sum(request.sampling.n for request in requests)) as advance:
        for event in events:
            if event.output is not None:
                outputs.append(event.output)
            advance(event)
    place = {request.id: i for i, request in enumerate(requests)}
    outputs.sort(key=lambda output: (place[output.id], output.sample))
    for output in outputs:
        name = output.id if output.sample == 0 else f"{output.id}, sample {output.sample}"
        print(f"--- {name} ({output.finish_reason}, {len(output.output_tokens)} tokens)\n{output.text}")
    return outputs


@contextmanager
def _progress(total: int) -> Iterator:
    """A bar on stderr: finished samples, and tokens so far. Nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda event: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=console(stderr=True), transient=True) as bar:
        task, tokens = bar.add_task("decoding", total=total, tokens=0), 0

        def advance(event: Event) -> None:
            nonlocal tokens
            tokens += event.token is not None
            bar.update(task, advance=int(event.output is not None), tokens=tokens)

        yield advance


def _requests(summary: dict) -> str:
    text = str(summary["requests"])
    if summary["samples"] > summary["requests"]:
        text += f", {summary['samples']} samples"
    return text + (f", {summary['refused']} refused" if summary["refused"] else "")


def summary_table(summary: dict):
    """The summary of a run as a rich table."""
    ms, size = human_seconds, human_bytes
    rows = [
        ("requests", _requests(summary)),
        ("prompt tokens", f"{summary['prompt_tokens']}, {summary['cached_tokens']} cached"),
        ("output tokens", f"{summary['output_tokens']} in {ms(summary['seconds'])}"),
        ("output tokens/s", f"{summary['output_tokens_per_s']:.1f}"),
        ("TTFT p50 / p99", f"{ms(summary['ttft_s_p50'])} / {ms(summary['ttft_s_p99'])}"),
        ("ITL p50 / p99", f"{ms(summary['itl_s_p50'])} / {ms(summary['itl_s_p99'])}"),
        ("KV reserved, mean over time", size(summary["kv_bytes_reserved"])),
        ("KV used, mean over time", size(summary["kv_bytes_used"])),
        ("KV peak, tails included", size(summary["kv_bytes_peak"])),
        *([("KV tails, mean over time", size(summary["kv_bytes_tail"]))] if summary["kv_bytes_tail"] else []),
        ("utilization, mean over time", f"{summary['utilization']:.1%}"),
        ("preemptions", summary["preemptions"]),
        *memory_rows(summary["memory"]),
        ("kernel", ", ".join(f"{name} ({n} layers)" for name, n in summary["kernels"].items()) or "-"),
    ]
    return table(rows, ("summary", ""), right=("",))


def memory_rows(memory: dict) -> list[tuple[str, str]]:
    """Lines of the summary for kvframe.memprofile's report."""

    def dtypes(found: dict[str, int]) -> str:
        return ", ".join(f"{human_bytes(size)} {dtype}" for dtype, size in found.items()) or "-"

    rows = [("weights", dtypes(memory["weights"])), ("KV allocated", dtypes(memory["kv_allocated"]))]
    if memory["weight_copies"]:
        rows.insert(1, ("copies of weights", human_bytes(memory["weight_copies"])))
    if memory["activations_peak"] is not None:
        peak = f"{human_bytes(memory['activations_peak'])} in a step of {memory['activations_tokens']} tokens"
        rows.append(("activations, peak", peak))
    if "allocator" in memory:
        rows.append(("CUDA allocator, peak", human_bytes(memory["allocator"]["peak_allocated"])))
    return rows
