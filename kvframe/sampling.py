"""Choose the next token of every row of a batch, with batched tensor operations only.

Shape legend: B rows of the batch, R some of them, V vocabulary, K log-probabilities.

What one row means, whatever else is in the batch (the order is that of transformers' `generate`; vLLM differs only in
that it applies min_p before top_k and top_p):

    y = logits, after the repetition penalty          (CTRL: y > 0: y / penalty, else y * penalty; prompt and output)
    temperature 0:  the best token of y, ties take the lowest id
    z = (y - max y) / temperature                     z <= 0
    w = floor(exp(z) * 2**bits)                       int64 weights: sums are exact in any order
    top_k, top_p    keep the shortest prefix, in the order (z descending, id ascending), that holds k tokens, then
                    that holds at least top_p of the weight that is left
    min_p           keep weights >= min_p * (best weight)
    token = first id, in id order, whose cumulative weight exceeds floor(u * total)      u = uniforms(seed, index)

Integer weights are why a request gets the same token alone and in any batch: no sum depends on how a device splits a
reduction, and the fast and the plain filters (filters.py) agree exactly. bits = 44 for V < 2**18: a token whose
probability is under 2**-44 of the best one's is never drawn.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvframe.errors import KVFrameError
from kvframe.filters import best, draw, per_block, top
from kvframe.moving import sent
from kvframe.types import SamplingParams

CPU_ELEMENTS = 1 << 21  # on CPU, rows are drawn in chunks of about this many logits: fewer page faults
GOLDEN = 0x9E3779B97F4A7C15
MASK64 = (1 << 64) - 1


@dataclass(slots=True)
class SampleInput:
    """One row of the batch.

    Attributes:
        params: how to choose.
        tokens: int32 [n]; prompt + output so far (read only when there is a repetition penalty).
        seed: resolved seed of this sample (64 bits, see `resolve_seed`).
        index: number of output tokens so far; the draw is a pure function of (seed, index).
        name: id of the request, for error messages.
    """

    params: SamplingParams
    tokens: np.ndarray
    seed: int
    index: int
    name: str = ""


@dataclass(slots=True)
class Sampled:
    """What was chosen.

    Attributes:
        tokens: int64 [B].
        logprobs: None when no row asks, else per row None or `{"token", "logprob", "top": {id: logprob}}`, best first.
            They come from log_softmax of the raw logits, before penalty, temperature and filters.
    """

    tokens: np.ndarray
    logprobs: list[dict | None] | None = None


class BadLogitsError(KVFrameError):
    """The model answered NaN or infinity; `rows` are the rows of the batch (the other rows are fine)."""

    def __init__(self, rows: Sequence[int], names: Sequence[str]):
        self.rows = tuple(rows)
        named = ", ".join(f"{name or 'request'} (row {row})" for row, name in zip(rows, names, strict=True))
        fix = "check the weights and the dtype (dtype=float32), and run the same request with kernel=reference"
        super().__init__(f"the model answered NaN or infinite logits for {named}", fix=fix)


def sample(
    logits: torch.Tensor, rows: Sequence[SampleInput], meanwhile: Callable[[torch.Tensor], None] = lambda tokens: None
) -> Sampled:
    """Choose one token per row. Tokens (and log-probabilities) travel to the host in one copy.

    Args:
        logits: [B, V] float32 on any device; not changed.
        rows: B inputs.
        meanwhile: called with the tokens (int64 [B], on the device of the logits; -1: bad logits) once all has been
            started, before anything is waited for.

    Raises:
        BadLogitsError: the best logit of a row is NaN or infinite.
    """
    assert logits.ndim == 2 and len(rows) == len(logits), (tuple(logits.shape), len(rows))
    if not rows:
        return Sampled(np.zeros(0, np.int64))
    logits = logits.float()
    y = penalize(logits, rows)  # [B, V]
    value, tokens = best(y)  # [B], [B]
    bad = ~value.isfinite()
    if not y.is_cuda:  # an answer costs nothing here; on a GPU it waits for the one copy at the end
        _refuse(bad.numpy(), rows)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        _draw(y, value, tokens, drawn, rows)
    tokens.masked_fill_(bad, -1)
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        wait = _to_host(tokens)
        meanwhile(tokens)
        chosen = wait()
        _refuse(chosen < 0, rows)
        return Sampled(chosen)
    k = min(max(rows[i].params.logprobs for i in asked), y.shape[1])
    at = sent(np.array(asked), y.device)
    info = _logprobs(logits[at], tokens[at], k)  # [len(asked), 1 + 2K] float64
    wait = _to_host(torch.cat([tokens.double(), info.flatten()]))
    meanwhile(tokens)
    flat = wait()
    chosen, info = flat[: len(rows)].astype(np.int64), flat[len(rows) :].reshape(len(asked), -1)
    _refuse(chosen < 0, rows)
    logprobs: list[dict | None] = [None] * len(rows)
    for i, (mine, *others) in zip(asked, info.tolist(), strict=True):
        pairs = zip(others[:k], others[k:], strict=True)
        best_n = {int(token): value for token, value in list(pairs)[: rows[i].params.logprobs]}
        logprobs[i] = {"token": int(chosen[i]), "logprob": mine, "top": best_n}
    return Sampled(chosen, logprobs)


def _to_host(x: torch.Tensor) -> Callable[[], np.ndarray]:
    """Starts the copy; what is answered waits for it, and for nothing that is started later."""
    if not x.is_cuda:
        return lambda: x.cpu().numpy()
    here = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    here.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(x.device))

    def wait() -> np.ndarray:
        copied.synchronize()
        return here.numpy()

    return wait


def _draw(y: torch.Tensor, value: torch.Tensor, tokens: torch.Tensor, drawn: list[int], rows) -> None:
    """Overwrite tokens [B] at the rows `drawn` with draws from y [B, V], whose maxima are value [B]."""
    some = [rows[i] for i in drawn]
    knobs = [(p.temperature, p.top_k, p.top_p, p.min_p) for p in (row.params for row in some)]
    table = np.column_stack([drawn, uniforms([r.seed for r in some], [r.index for r in some]), knobs])
    table = sent(table, y.device)  # [R, 6] float64: row, u, temperature, top_k, top_p, min_p
    for part in table.split(len(drawn) if y.is_cuda else max(1, CPU_ELEMENTS // y.shape[1])):
        at = part[:, 0].long()
        z = (y if len(at) == len(y) else y[at]) - value[at, None]
        z.div_(part[:, 2:3].float().clamp_(1e-10, 1e30))
        tokens[at] = draw(z, part[:, 1], part[:, 3:])


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) per (seed, index), float64 [R], from a counter-based hash.

    For one seed this is the splitmix64 generator (Steele, Lea, Flood 2014) started at mix(seed): draw number `index`
    is mix(mix(seed + G) + (index + 1) * G), and the upper 53 bits are the fraction.
    """
    seed = np.array([s & MASK64 for s in seeds], np.uint64)
    step = np.array([(i + 1) * GOLDEN & MASK64 for i in indices], np.uint64)
    return (_mix(_mix(seed + np.uint64(GOLDEN)) + step) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def resolve_seed(seed: int | None, sample: int = 0) -> int:
    """The 64-bit seed of one sample of a request: the seed itself for sample 0, a hash of both for the others."""
    if seed is None:
        return secrets.randbits(64)
    pair = np.array([seed & MASK64], np.uint64), np.uint64(sample * GOLDEN & MASK64)
    return seed & MASK64 if sample == 0 else int(_mix(_mix(pair[0]) ^ pair[1])[0])


def penalize(logits: torch.Tensor, rows: Sequence[SampleInput]) -> torch.Tensor:
    """Logits [B, V] after the repetition penalty: a copy when a row has one, else the same tensor."""
    at = [i for i, row in enumerate(rows) if row.params.repetition_penalty != 1 and len(row.tokens)]
    if not at:
        return logits
    longest = max(len(rows[i].tokens) for i in at)
    seen = np.empty((len(at), longest), np.int64)
    for line, i in zip(seen, at, strict=True):
        line[: len(rows[i].tokens)] = rows[i].tokens
        line[len(rows[i].tokens) :] = rows[i].tokens[0]  # padding repeats a token: the same write twice
    device = logits.device
    row, seen = sent(np.array(at), device)[:, None], sent(seen, device)  # [P, 1], [P, longest]
    penalties = np.array([rows[i].params.repetition_penalty for i in at], dtype=np.float32)
    penalty = sent(penalties, device)[:, None]  # [P, 1]
    old = logits[row, seen]
    y = logits.clone()
    y[row, seen] = torch.where(old > 0, old / penalty, old * penalty)
    return y


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
    """[R, 1 + 2K] float64: log-probability of the chosen token; ids of the K best (ties: lowest id first); theirs."""
    value = best(logits)[0][:, None]
    norm = value + per_block((logits - value).exp_(), "sum").double().sum(1, keepdim=True).log()
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])
    ids = top(logits, k) if k else tokens.new_zeros(len(tokens), 0)  # [R, K]
    return torch.cat([chosen - norm, ids.double(), logits.gather(1, ids) - norm], 1)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 on uint64 arrays (arithmetic modulo 2**64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _refuse(bad: np.ndarray, rows: Sequence[SampleInput]) -> None:
    """Raise for the rows where bad [B] is true."""
    if bad.any():
        at = np.flatnonzero(bad).tolist()
        raise BadLogitsError(at, [rows[i].name for i in at])
