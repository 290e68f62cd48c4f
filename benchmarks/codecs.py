"""A decode step of SmolLM2's shape at 8 x 1,024 tokens of context, bf16 weights: the plain cache against cached codes.

    OMP_NUM_THREADS=2 python benchmarks/codecs.py [--rounds 40] [--shape smollm2_135m] [caches ...]

Random weights, since only speed counts. Each cache has an engine of its own on the same model; its requests are
prefilled, and then the engines take one decode step each in turns, so that a busy neighbour hits all of them. Reported
are medians: the whole step, and in it the time in `cache.attend` (store and attention of all layers).
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from kvframe.config import build_cache, build_model, cache_context, compose, plain
from kvframe.engine import Engine
from kvframe.types import Request, SamplingParams

REQUESTS, CONTEXT = 8, 1024


def engine_of(model, overrides: list[str], rounds: int) -> Engine:
    """An engine whose requests are all prefilled."""
    cfg = compose([*overrides, f"engine.max_len={CONTEXT + rounds + 8}", "engine.max_requests=8", "cache.memory=1GiB"])
    context, settings = cache_context(cfg, model), plain(cfg, "engine")
    settings |= {"max_len": context.max_len, "clock": "virtual"}
    engine = Engine(model, build_cache(cfg, context), **settings)
    random = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=rounds + 4, ignore_eos=True)
    for _ in range(REQUESTS):
        engine.add(Request(prompt_tokens=random.integers(3, 1000, CONTEXT).tolist(), sampling=sampling))
    model.bind(engine.cache)
    produced = 0
    while produced < REQUESTS:
        produced += sum(event.token is not None for event in engine.step())
    return engine


def watch(cache) -> list[float]:
    """Adds up the seconds in `cache.attend` in the answer's only number."""
    spent, attend = [0.0], cache.attend

    def timed(*args):
        start = time.perf_counter()
        out = attend(*args)
        spent[0] += time.perf_counter() - start
        return out

    cache.attend = timed
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--shape", default="smollm2_135m")
    parser.add_argument("caches", nargs="*", default=["paged", "int8", "fp8"], help="presets")
    options = parser.parse_args()
    chosen = ["model=random", f"model.shape={options.shape}", "model.dtype=bfloat16"]
    model = build_model(compose(chosen))
    engines = {name: engine_of(model, [*chosen, f"cache={name}"], options.rounds) for name in options.caches}
    spent = {name: watch(engine.cache) for name, engine in engines.items()}
    steps, attention = ({name: [] for name in engines} for _ in range(2))
    for turn in range(options.rounds):
        for name, engine in engines.items():
            model.bind(engine.cache)
            spent[name][0], start = 0.0, time.perf_counter()
            engine.step()
            if turn > 1:  # the first ones warm up
                steps[name].append(time.perf_counter() - start)
                attention[name].append(spent[name][0])
    base = {kind: statistics.median(next(iter(times.values()))) for kind, times in (("s", steps), ("a", attention))}
    for name in engines:
        step, part = statistics.median(steps[name]), statistics.median(attention[name])
        print(
            f"{name:>12}: step {step * 1e3:6.2f} ms ({step / base['s']:4.2f} x), in cache.attend {part * 1e3:6.2f} ms "
            f"({part / base['a']:4.2f} x), {REQUESTS / step:6.1f} tokens/s"
        )


if __name__ == "__main__":
    main()
