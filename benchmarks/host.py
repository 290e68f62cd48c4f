"""What the host does in a decode step, with a model that answers at once: how long a device would wait for it.

    python benchmarks/host.py                         # SmolLM2's tokenizer, 8 and 64 requests of 4,000 tokens
    python benchmarks/host.py --requests 256 --context 2000

`one by one`: the device waits from the end of a step's sampling to the start of the next step. `ahead` (see
kvframe.flight, what engines on CUDA do): the next step is started as soon as tokens are chosen, and the rest of the
step's host work runs beside the device. Medians; the two take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from kvframe import Request, SamplingParams, compose, engine
from kvframe.config import build_engine, build_model
from kvframe.report import console, human_seconds, table
from kvframe.sampling import Sampled

STEPS = 40


class Times:
    """When steps were started, and when tokens were there."""

    def __init__(self, model):
        self.started, self.chosen, self.logits = [], [], torch.zeros(1, model.vocab_size)
        model.forward = self.forward

    def forward(self, tokens, plan, wanted):
        self.started.append(time.perf_counter())
        return self.logits.expand(len(wanted), -1)

    def sample(self, logits, rows, meanwhile=lambda tokens: None):
        ids = np.full(len(rows), 1000 % self.logits.shape[1])
        self.chosen.append(time.perf_counter())
        meanwhile(torch.from_numpy(ids))
        return Sampled(ids)


def gaps(made, times: Times, requests: int, context: int) -> tuple[float, float]:
    """Median seconds from tokens to the next start, and of a whole step."""
    sampling, prompt = SamplingParams(max_new_tokens=STEPS + 20, ignore_eos=True), np.arange(context) % 200
    for i in range(requests):
        made.add(Request(prompt_tokens=prompt + i % 7, sampling=sampling))
    while made.scheduler.waiting or any(s.computed < context for s in made.scheduler.running):
        made.step()
    waits, whole = [], []
    for _ in range(STEPS):
        starts, began = len(times.started), time.perf_counter()
        tokens = times.chosen[-1]
        made.step()
        whole.append(time.perf_counter() - began)
        waits.append(times.started[starts] - (times.chosen[-1] if made.ahead else tokens))
    for name in list(made._live):
        made.abort(name)
    made.step()
    made.cache.reset()
    return statistics.median(waits), statistics.median(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    most, rows = max(args.requests), []
    longest = args.context + STEPS + 30
    limits = [f"engine.max_requests={most}", f"engine.max_len={longest}", "engine.max_step_tokens=4096"]
    blocks = f"cache.num_blocks={most * (args.context // 16 + 6)}"
    cfg = compose([f"model={args.model}", "cache=paged", "kernel=cpu", "engine.replay=false", blocks, *limits])
    model = build_model(cfg)
    made, times = build_engine(cfg, model), Times(model)
    engine.sample = times.sample
    for requests in args.requests:
        found: dict[bool, list] = {False: [], True: []}
        for made.ahead in (False, True) * 3:
            found[made.ahead].append(gaps(made, times, requests, args.context))
        for ahead, several in found.items():
            wait, whole = (statistics.median(column) for column in zip(*several))
            rows.append([requests, "ahead" if ahead else "one by one", human_seconds(wait), human_seconds(whole)])
    columns = ["requests", "steps", "tokens chosen to next start", "host time of a step"]
    console().print(table(rows, columns, title=f"contexts of {args.context:,} tokens, {args.model}"))


if __name__ == "__main__":
    main()
