"""The one list of compositions, and the conditions they are tested under."""

from __future__ import annotations

from kvframe.config import build_cache, compose
from kvframe.engine import Engine
from kvframe.interfaces import CacheContext
from kvframe.kernels.reference import ReferenceKernel
from kvframe.memory import live_blocks

MAX_LEN = 96

# name -> overrides
STRATEGIES = {
    "contiguous": ["cache=contiguous"],
    "paged-1": ["cache=paged", "cache.layout.block_size=1"],
    "paged-16": ["cache=paged"],
    "paged-64": ["cache=paged", "cache.layout.block_size=64"],
}
INDEXES = {"none": [], "radix": ["cache/index=radix"]}
RETENTIONS = {
    "model": [],
    "window": ["cache/retention=sliding_window", "cache.retention.window=12", "cache.retention.sinks=0"],
    "window+sinks": ["cache/retention=sliding_window", "cache.retention.window=12", "cache.retention.sinks=3"],
}
# every composition of these that is allowed; a block of max_len is never shared, so contiguous has no index
COMPOSITIONS = {
    f"{layout} {index} {retention}": [*STRATEGIES[layout], *INDEXES[index], *RETENTIONS[retention]]
    for layout in STRATEGIES
    for index in INDEXES
    for retention in RETENTIONS
    if (layout, index) != ("contiguous", "radix")
}
# ragged, around every block size and window
LENGTHS = (
    1,
    2,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    60,
    61,
    62,
    7,
    8,
    9,
    5,
    3,
    47,
    48,
    49,
    10,
    20,
    30,
    40,
    50,
    70,
    1,
    2,
    4,
    80,
)


def context_for(model, **options) -> CacheContext:
    """A CacheContext for a probed tiny model."""
    options = {
        "max_len": MAX_LEN, "max_requests": len(LENGTHS), "max_step_tokens": 512,
        "kernels": (ReferenceKernel(),), "dtype": model.dtype, **options,
    }  # fmt: skip
    return CacheContext(layers=model.layers, learned_sinks=model.learned_sinks, **options)


def make_cache(strategy: str, context: CacheContext, short: bool = False, overrides=()):
    """The cache of a strategy, through Hydra as a user would get it."""
    chosen = COMPOSITIONS[strategy] if strategy in COMPOSITIONS else STRATEGIES[strategy]
    cache = build_cache(compose([*chosen, *overrides]), context)
    if not short:
        return cache
    need = max(live_blocks(rule, context.max_len, 1, cache.block_size) for rule in cache.rules)
    blocks = need + max(need // 3, 1)  # one request always fits, two long ones do not
    return build_cache(compose([*chosen, *overrides, f"cache.num_blocks={blocks}"]), context)


def make_engine(model, strategy: str, short: bool = False, chunk: int | None = None, overrides=(), **options) -> Engine:
    """An engine over a tiny model whose requests compute at most `chunk` tokens a step."""
    context = context_for(model, **options)
    return Engine(
        model,
        make_cache(strategy, context, short, overrides),
        max_len=context.max_len,
        max_requests=context.max_requests,
        max_step_tokens=context.max_step_tokens,
        prefill_chunk=chunk,
        clock="virtual",
    )
