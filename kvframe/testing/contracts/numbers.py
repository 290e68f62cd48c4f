"""CodecNumbers: what comes back from a codec, and how far off.

Shape legend: n vectors or groups, G sealing group, H heads, D size of a vector.
"""

from __future__ import annotations

import functools

import torch

from kvframe.interfaces import Codec
from kvframe.testing.contracts.promises import Contract, differs, example, promise
from kvframe.testing.contracts.vectors import broken, samples, shares

DTYPES = ("float32", "bfloat16")


def each(check):
    """Runs a check `(self, codec, kind, dim)` for keys and values and every size of vectors."""

    @functools.wraps(check)
    def run(self):
        for dim in self.dims:
            for kind in ("k", "v"):
                with example(kind=kind, head_size=dim):
                    check(self, self.bound_to(kind, dim), kind, dim)

    del run.__wrapped__  # pytest would take the arguments for fixtures
    return run


class CodecNumbers(Contract):
    """Part of CodecContract, which says what `bound`, `low` and `high` are."""

    @promise("an exact codec gives back every bit; any other declares how far off its numbers are at most (`bound`)")
    def test_exact_or_bounded(self):
        if not self.make().exact:
            assert self.bound is not None, "exact is False, and the test class has no `bound`"
            return
        assert self.bound is None, f"exact is True, and bound={self.bound}"
        for kind in ("k", "v"):
            codec = self.bound_to(kind, self.dims[0])
            for name, x in samples(self.dims[0], codec.group).items():
                for dtype in (torch.float32, torch.bfloat16):
                    given = x.to(dtype)
                    with example(kind=kind, which=name, dtype=dtype):
                        assert not differs(codec.decode(codec.encode(given), dtype), given), "other bits came back"

    def _errors(self, codec: Codec, kind: str, dim: int):
        """`(name of the sample, dtype, x, errors)`: each as a share of the largest size in the vector or group."""
        for name, x in samples(dim, codec.group, self.low, self.high).items():
            for dtype in DTYPES:
                given = x.to(getattr(torch, dtype))
                back = codec.decode(codec.encode(given), torch.float32)
                yield name, dtype, given, shares(given.float(), back, codec.group, self.low)

    def _bound(self, kind: str) -> float | None:
        return self.bound[kind] if isinstance(self.bound, dict) else self.bound

    @promise("no number comes back further away than the declared bound")
    @each
    def test_errors_are_within_the_bound(self, codec, kind, dim):
        for name, dtype, x, errors in self._errors(codec, kind, dim):
            worst = errors.flatten(1).max(1).values
            i = int(worst.nan_to_num(nan=torch.inf).argmax())
            with example(which=name, dtype=dtype, x=x[i].flatten()[:8], bound=self._bound(kind)):
                limit = (self._bound(kind) or 0.0) * (1 + 1e-5)
                assert float(worst[i]) <= limit, f"{float(worst[i]):.4g} of the largest size"

    @promise("the declared bound is not too wide: at most 4 times the largest error")
    def test_the_bound_is_tight(self):
        for kind in ("k", "v"):
            measured, bound = 0.0, self._bound(kind)
            for dim in self.dims:
                for _, _, _, errors in self._errors(self.bound_to(kind, dim), kind, dim):
                    measured = max(measured, float(errors.nan_to_num(0.0).max()))
            with example(kind=kind, bound=bound):
                assert bound is None or bound <= 4 * measured, f"the largest error is {measured:.4g}"

    @promise("a NaN stays NaN, and hurts nobody but its own vector (or its channel of the group that is sealed)")
    @each
    def test_nan_stays_at_home(self, codec, kind, dim):
        x = samples(dim, codec.group)["normal"]
        plain = codec.decode(codec.encode(x), torch.float32)
        bad, at = x.clone(), ((1,) if codec.group == 1 else (1, codec.group // 2)) + (1, dim // 2)
        bad[at] = torch.nan
        back, hurt = codec.decode(codec.encode(bad), torch.float32), torch.zeros_like(x, dtype=torch.bool)
        hurt[at[:-1]] = True
        if codec.group > 1:
            hurt[(1, slice(None), 1, dim // 2) if self.nan_hurts == "vector" else 1] = True
        with example(x=f"normal, NaN at {list(at)} of {list(x.shape)}"):
            assert back[at].isnan(), f"the NaN came back as {float(back[at])}"
            wrong = ((back != plain) & ~hurt).nonzero()
            assert not len(wrong), f"the number at {wrong[0].tolist()} changed"

    @promise("a number that is too large comes back finite, and hurts no other vector")
    @each
    def test_large_numbers_saturate(self, codec, kind, dim):
        x = samples(dim, codec.group)["normal"]
        plain = codec.decode(codec.encode(x), torch.float32)
        for value in broken(self.saturates and not self.make().exact):
            bad = x.clone()
            bad[1, ..., 1, dim // 2] = value
            back = codec.decode(codec.encode(bad), torch.float32)
            with example(x=f"normal, with {value:g}"):
                assert bool(back.isfinite().all()), "something is not finite"
                others = torch.ones(len(x), dtype=torch.bool)
                others[1] = False
                assert not differs(back[others], plain[others]), "another vector changed"
