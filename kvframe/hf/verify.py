"""Is the model, run flat through kvframe's seam, the model itself? A few tokens tell.

One sequence B is computed by transformers' own eager attention, alone. Then two flat steps run through the seam,
with the reference attention and a tiny store, behind other sequences:

    step 1:  [ A | B, first half ]
    step 2:  [ C | B, second half ]

Its logits must be the same. They are not when the probe misread the attention (scale, window, softcap, ...), when
something leaks from one sequence to the next (convolutions, recurrent state, positions that the model counts
itself), or when something of the first half was kept outside attention and is lost. When they differ, a third step
with B alone tells which.

In low precision roundings hide small leaks. There step 1 runs once more with another A of the same length, which
rounds B in the same way: what changes now is a leak.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kvframe.errors import UnsupportedModelError
from kvframe.hf import seam
from kvframe.hf.positions import countable
from kvframe.kernels.reference import attend_one

HALF = 3  # tokens of each half of B; more when the end of a short window or chunk would not be reached
NEIGHBOURS = 2, 1  # tokens of A and of C
SHORT = 16  # windows and chunks up to this size are left behind by B

# Highest error in units of the logits' standard deviation. In low precision it is the middle token's, because a
# mixture of experts may route one token differently after a rounding; in fp32 it is the worst token's.
TOLERANCE = {"float64": 2e-4, "float32": 2e-4, "float16": 0.1, "bfloat16": 0.3}
LEAK = {"float16": 0.05, "bfloat16": 0.05}  # highest change of a token of B when only A changes


class TinyCache:
    """Keys and values per sequence, in a dictionary; attention by the reference formula.

    The plan is a list of chunks `(sequence, start, stop)`: tokens `start : stop` of the flat step.
    """

    def __init__(self, layers, sinks):
        self.layers, self.sinks, self.kept = layers, sinks, {}

    def attend(self, layer, q, k, v, plan):
        spec = self.layers[layer]
        source = layer if spec.kv_source is None else spec.kv_source
        out = q.new_empty(q.shape[0], q.shape[1], spec.v_dim)
        for sequence, start, stop in plan.chunks:
            if spec.kv_source is None:
                old = self.kept.get((layer, sequence))
                new = k[start:stop].float(), v[start:stop].float()
                self.kept[layer, sequence] = new if old is None else tuple(map(torch.cat, zip(old, new)))
            keys, values = self.kept[source, sequence]
            k_pos = torch.arange(len(keys), device=q.device)
            q_pos = k_pos[len(keys) - (stop - start) :, None]
            mask = k_pos <= q_pos
            if spec.window is not None:
                mask = mask & (q_pos - k_pos < spec.window)
            if spec.chunk is not None:
                mask = mask & (q_pos // spec.chunk == k_pos // spec.chunk)
            out[start:stop] = attend_one(q[start:stop], keys, values, mask, spec, self.sinks.get(layer))
        return out


def verify(model) -> float:
    """Compares; answers the measured error, in units of the logits' standard deviation.

    Args:
        model: an HFModel whose layers are bound.
    Raises: UnsupportedModelError with the measured difference.
    """
    sizes = [n for spec in model.layers for n in (spec.window, spec.chunk) if n is not None and n <= SHORT]
    half = max(HALF, (max(sizes, default=0) + 5) // 2)
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, model.vocab_size, (2 * half + sum(NEIGHBOURS),), generator=draws).to(model.device)
    tokens = countable(model.module, tokens)
    b, a, c = tokens.split([2 * half, *NEIGHBOURS])
    name, before = type(model.module).__name__, model.running.cache
    limit, leak_limit = TOLERANCE.get(model.dtype, 0.3), LEAK.get(model.dtype)

    def fresh():
        model.running.cache = TinyCache(model.layers, model.learned_sinks)

    alone = leak = 0.0
    try:
        with torch.inference_mode(), seam.implementation(model.module, "eager"):
            eager = model.flat_logits(b, None)
        fresh()
        one = _step(model, [("a", a, 0), ("b", b[:half], 0)])[len(a) :]
        two = _step(model, [("c", c, 0), ("b", b[half:], half)])[len(c) :]
        first, second = _error(model, one, eager[:half]), _error(model, two, eager[half:])
        if leak_limit is not None:
            fresh()
            other = (a + model.vocab_size // 2) % model.vocab_size
            rows = _rows(_step(model, [("a", other, 0), ("b", b[:half], 0)])[len(a) :], one)
            leak = float(rows.max())
        if not (first <= limit and second <= limit):
            fresh()
            alone = _error(model, _step(model, [("b", b, 0)]), eager)
    except Exception as error:
        raise UnsupportedModelError(f"{name} cannot run flat: {type(error).__name__}: {error}") from error
    finally:
        model.running.cache, model.running.plan = before, None
    findings = (
        (alone, limit, "attention through the cache differs from transformers' eager attention"),
        (leak, leak_limit, "a sequence changes when another one runs before it (state that crosses sequences)"),
        (first, limit, "a sequence changes when another one runs before it (state that crosses sequences)"),
        (second, limit, "a sequence changes when it is computed in two chunks (state outside attention)"),
    )
    for value, allowed, what in findings:
        if allowed is not None and not value <= allowed:  # NaN is refused, too
            raise UnsupportedModelError(
                f"{name}: {what}: the logits are off by {value:.2g} of their standard deviation "
                f"({model.dtype}, allowed {allowed:g})",
                fix="this model cannot be decoded by kvframe; verify=False would skip the check, not the error",
            )
    return max(first, second)


def _rows(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Root mean square difference of each token's logits [T], in units of the logits' standard deviation."""
    return ((found - wanted) / wanted.std().clamp_min(1e-6)).square().mean(-1).sqrt()


def _error(model, found: torch.Tensor, wanted: torch.Tensor) -> float:
    rows = _rows(found, wanted)
    return float(rows.max() if model.dtype in ("float32", "float64") else rows.median())


def _step(model, parts) -> torch.Tensor:
    """One flat step of `(sequence, tokens, first position)` parts; logits `[T, V]` in float32."""
    tokens = torch.cat([tokens for _, tokens, _ in parts])
    positions = torch.cat([torch.arange(at, at + len(t), device=t.device) for _, t, at in parts])
    chunks, start = [], 0
    for sequence, t, _ in parts:
        chunks.append((sequence, start, start + len(t)))
        start += len(t)
    model.running.plan = SimpleNamespace(positions=positions, chunks=chunks)
    with torch.inference_mode():
        return model.flat_logits(tokens, positions)
