"""CodecFacts: what a codec says of itself to kernels (`affine`, `fixed`, `peak`, `plain`, `ranged`) is true.

Shape legend: n vectors, H heads, D size of a vector.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvframe.testing.contracts.promises import Contract, differs, example, promise
from kvframe.testing.contracts.vectors import all_samples, samples
from kvframe.types import PlaneSpec

LEAST = float(np.finfo(np.float32).tiny)


class CodecFacts(Contract):
    """Part of CodecContract."""

    def _claims(self, fact: str):
        """`(kind, codec, dim)` of those that claim a fact; skips when there is none."""
        made = [(kind, self.bound_to(kind, dim), dim) for dim in self.dims for kind in ("k", "v")]
        found = [case for case in made if getattr(case[1], fact)]
        if not found:
            pytest.skip(f"this codec does not say that it is {fact}")
        return found

    @promise("plain is true: the only plane is `payload`, the vector itself in the model's dtype")
    def test_plain(self):
        for kind, codec, dim in self._claims("plain"):
            with example(kind=kind, head_size=dim):
                (plane,) = codec.planes(dim).values()
                assert (tuple(plane.shape), plane.dtype, plane.per) == ((dim,), "model", "token"), f"declared: {plane}"
                x = samples(dim, codec.group)["normal"]
                assert not differs(codec.encode(x)["payload"], x), "the payload is not the vector"

    @promise("affine is true: a vector is number * scale, from the planes `payload` and `scale` (or `fixed`)")
    def test_affine(self):
        for kind, codec, dim in self._claims("affine"):
            declared, table = codec.planes(dim), codec.values()
            with example(kind=kind, head_size=dim):
                payload = declared["payload"]
                assert (tuple(payload.shape), payload.dtype) == ((dim,), "int8" if table is None else "uint8"), (
                    f"{payload}"
                )
                assert set(declared) == ({"payload"} if codec.fixed is not None else {"payload", "scale"}), (
                    f"{declared}"
                )
                if codec.fixed is None:
                    scale = declared["scale"]
                    assert tuple(scale.shape) == (1,) and scale.dtype in ("float32", "float16"), f"{scale}"
                for name, x in samples(dim, codec.group, self.low, self.high).items():
                    planes = codec.encode(x)
                    want = self._numbers(codec, planes["payload"]) * self._scales(codec, planes)
                    got = codec.decode(planes, torch.float32)
                    with example(which=name):
                        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-38, msg=lambda text: text)

    def _numbers(self, codec, payload: torch.Tensor) -> torch.Tensor:
        """float32 numbers of the codes."""
        table = codec.values()
        if table is None:
            return payload.float()
        assert table.dtype == np.float32 and table.shape == (256,), f"values() is {table.dtype} {table.shape}"
        return torch.from_numpy(np.array(table))[payload.long()]

    def _scales(self, codec, planes) -> torch.Tensor:
        return torch.tensor(codec.fixed, dtype=torch.float32) if codec.fixed is not None else planes["scale"].float()

    @promise("peak is true: scale = max|x| / peak, and each code is the one nearest to x / scale, ties to even")
    def test_peak(self):
        for kind, codec, dim in self._claims("peak"):
            names, x = all_samples(dim, codec.group, self.high)
            planes, peak = codec.encode(x), np.float32(codec.peak)
            scale = self._scales(codec, planes)
            for i, name in enumerate(names):
                with example(kind=kind, which=name, x=x[i, 0, :8]):
                    s = scale if codec.fixed is not None else scale[i]
                    self._scale_is(codec, x[i], s, float(peak))
                    fine = x[i].isfinite().all(-1)
                    self._nearest(codec, (x[i] / s)[fine].clamp(-float(peak), float(peak)), planes["payload"][i][fine])

    @promise("ranged is true: planes, zero, scale and codes are those that kvframe.types.Ranged describes")
    def test_ranged(self):
        for kind, codec, dim in self._claims("ranged"):
            how, declared = codec.ranged, codec.planes(dim)
            with example(kind=kind, head_size=dim):
                parts = -(-dim // how.span) if how.span else dim
                per = "token" if how.span else "group"
                factor = PlaneSpec((parts,), declared["scale"].dtype, per)
                want = {"payload": PlaneSpec((dim * how.bits // 8,), "uint8"), "scale": factor, "zero": factor}
                assert declared == want, f"declared: {declared}"
            for name, x in samples(dim, codec.group, self.low, self.high).items():
                with example(kind=kind, head_size=dim, which=name):
                    self._ranges(codec, dim, x)

    def _ranges(self, codec, dim: int, x: torch.Tensor) -> None:
        """Holds `x [n, G, H, D]` to the definition."""
        how, planes = codec.ranged, codec.encode(x)
        dtype, levels = planes["scale"].dtype, (1 << how.bits) - 1
        shifts = torch.arange(0, 8, how.bits, dtype=torch.uint8)
        codes = (planes["payload"][..., None] >> shifts & levels).flatten(-2)
        spread = lambda plane: (
            plane[:, None] if how.span == 0 else plane.repeat_interleave(how.span, -1)[..., :dim]
        ).expand_as(x)
        scale, zero = (spread(planes[name].float()) for name in ("scale", "zero"))
        torch.testing.assert_close(codec.decode(planes, torch.float32), zero + scale * codes, rtol=1e-6, atol=0.0)
        most = min(torch.finfo(dtype).max, 2.0**126)
        parts = x.unflatten(-1, (-1, 1)) if how.span == 0 else _padded(x, how.span)  # [n, G, H, parts, span]
        low, high = (
            (f(1, keepdim=True) if how.span == 0 else f(-1, keepdim=True)).expand_as(parts).flatten(-2)[..., :dim]
            for f in (parts.amin, parts.amax)
        )
        low, high = low.clamp(-most, most), high.clamp(-most, most)
        assert bool(((zero <= low) & (_after(zero, dtype) > low)).all()), "zero is not the least one, rounded down"
        wide = (high - zero) / levels
        assert bool(((scale >= wide) & (_before(scale, dtype) < wide)).all()), "scale is not the range, rounded up"
        steps = (x.clamp(-(2.0**126), 2.0**126) - zero) / scale.clamp(min=LEAST)
        assert torch.equal(codes.float(), steps.round().clamp(0, levels)), "a code is not the nearest"

    def _scale_is(self, codec, x: torch.Tensor, scale: torch.Tensor, peak: float) -> None:
        """`x [H, D]`, `scale [H, 1]`."""
        if codec.fixed is not None:
            return
        bad = x.isnan().any(-1, keepdim=True)
        table = codec.values()
        if table is None or not np.isnan(table).any():
            assert bool((scale.isnan() == bad).all()), "there is no code for NaN, so it makes the scale NaN"
        size = x.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1, keepdim=True) / peak
        most = torch.tensor(np.finfo(np.float32).max / peak)
        want = torch.minimum(size, most).clamp(min=LEAST)
        assert bool((scale * peak)[~bad].isfinite().all()), "scale * peak is not finite"
        torch.testing.assert_close(scale[~bad], want[~bad], rtol=2e-7, atol=0.0)

    def _nearest(self, codec, x: torch.Tensor, codes: torch.Tensor) -> None:
        """`x` in units of the scale, and its codes."""
        numbers = np.arange(-128, 128, dtype=np.float32) if codec.values() is None else codec.values()
        there = np.unique(numbers[np.isfinite(numbers) & (np.abs(numbers) <= codec.peak)].astype(np.float64))
        given, got = x.double().numpy(), self._numbers(codec, codes).double().numpy()
        best = np.abs(given[..., None] - there).min(-1)
        off = np.abs(given - got) > best
        assert not off.any(), f"{given[off][0]} became {got[off][0]}, and there is a nearer code"
        tie = (np.abs(given[..., None] - there) == best[..., None]).sum(-1) > 1
        odd = tie & (codes.numpy().astype(np.int64) % 2 == 1)
        assert not odd.any(), f"{given[odd][0]} lies between two codes and became the odd one"


def _padded(x: torch.Tensor, span: int) -> torch.Tensor:
    """`[..., D]` -> `[..., ceil(D / span), span]`, the last number repeated."""
    missing = -x.shape[-1] % span
    return torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1).unflatten(-1, (-1, span))


def _after(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The next larger number of a dtype, as float32; infinity behind the last one."""
    return torch.nextafter(x.to(dtype), torch.full_like(x, torch.inf, dtype=dtype)).float()


def _before(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The next smaller one; minus infinity before 0, since a scale is never less."""
    less = torch.nextafter(x.to(dtype), torch.full_like(x, -torch.inf, dtype=dtype)).float()
    return less.where(x > 0, torch.tensor(-torch.inf))
