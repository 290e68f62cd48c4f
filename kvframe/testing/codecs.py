"""Plain codecs for tests: whole numbers with a scale per vector, and whole numbers with a scale per group of tokens."""

from __future__ import annotations

import torch

from kvframe.interfaces import Codec
from kvframe.types import PlaneSpec

PEAK = 127.0
LEAST, MOST = 2.0**-126, 2.6793883890187504e36  # of scales: normal, and `MOST * PEAK` is finite


class Eights(Codec):
    """`code = round(x / scale)`, `scale = max|x| / 127` of each vector. NaN makes the scale NaN."""

    exact = False
    affine = True
    peak = PEAK

    def planes(self, dim):
        return {"payload": PlaneSpec((dim,), "int8"), "scale": PlaneSpec((1,), "float32")}

    def encode(self, x):
        x = x.float()
        scale = (x.abs().amax(-1, keepdim=True) / PEAK).clamp(LEAST, MOST)
        codes = (x / scale).round().clamp(-PEAK, PEAK).nan_to_num()
        return {"payload": codes.to(torch.int8), "scale": scale}

    def decode(self, planes, dtype):
        return (planes["payload"].float() * planes["scale"]).to(dtype)


class Sealed(Codec):
    """The same with one scale per channel and group of tokens: a group is sealed when it is full."""

    exact = False

    def __init__(self, group: int = 4):
        self.group = group

    def planes(self, dim):
        return {"payload": PlaneSpec((dim,), "int8"), "scale": PlaneSpec((dim,), "float32", per="group")}

    def encode(self, x):
        x = x.float()  # [n, G, Hkv, D]
        scale = (x.abs().amax(1, keepdim=True) / PEAK).clamp(LEAST, MOST)
        codes = (x / scale).round().clamp(-PEAK, PEAK).nan_to_num()
        return {"payload": codes.to(torch.int8), "scale": scale.squeeze(1)}

    def decode(self, planes, dtype):
        return (planes["payload"].float() * planes["scale"][:, None]).to(dtype)
