"""No codec: keys and values are stored as the model computes them."""

from __future__ import annotations

from kvframe.interfaces import Codec
from kvframe.types import PlaneSpec


class NoCodec(Codec):
    """One plane, the vector itself in the model's dtype."""

    plain = True

    def planes(self, dim):
        return {"payload": PlaneSpec((dim,))}

    def encode(self, x):
        return {"payload": x}

    def decode(self, planes, dtype):
        return planes["payload"].to(dtype)
