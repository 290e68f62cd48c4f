"""Codecs, retentions, layouts and evictions that are broken on purpose, each in one way."""

from __future__ import annotations

import torch

from kvframe.testing.codecs import Eights, Sealed
from kvframe.testing.parts import Band, Blocks, Oldest

# -- codecs --------------------------------------------------------------------------------------------------


class LooksAround(Eights):
    """One scale for the whole batch."""

    def encode(self, x):
        scale = x.float().nan_to_num(0.0, 1.0, 1.0).abs().amax().clamp(min=1e-9) / 127
        codes = (x.float() / scale).round().clamp(-127, 127).nan_to_num()
        return {"payload": codes.to(torch.int8), "scale": scale.expand(*x.shape[:-1], 1).clone()}


class SharesAcrossHeads(Eights):
    def encode(self, x):
        made = super().encode(x)
        scale = made["scale"].amax(-2, keepdim=True).expand_as(made["scale"]).clone()
        return {"payload": (x.float() / scale).round().nan_to_num().to(torch.int8), "scale": scale}


class WiderThanDeclared(Eights):
    def encode(self, x):
        made = super().encode(x)
        return {**made, "payload": made["payload"].short()}


class Remembers(Eights):
    """The scale never shrinks."""

    most = 0.0

    def encode(self, x):
        made = super().encode(x)
        self.most = max(self.most, float(made["scale"].nan_to_num(0.0).max()))
        return {"payload": (x.float() / self.most).round().nan_to_num().to(torch.int8),
                "scale": torch.full_like(made["scale"], self.most)}  # fmt: skip


class SwallowsNaN(Eights):
    def encode(self, x):
        return super().encode(x.nan_to_num(0.0))


class Shifted(Eights):
    """Says that it is number * scale, and adds something."""

    def decode(self, planes, dtype):
        return super().decode(planes, dtype) + planes["scale"].to(dtype)


class RoundsDown(Eights):
    def encode(self, x):
        made = super().encode(x)
        return {**made, "payload": (x.float() / made["scale"]).floor().clamp(-127, 127).nan_to_num().to(torch.int8)}


class ReadsItsNeighbours(Eights):
    def decode(self, planes, dtype):
        return super().decode(planes, dtype) + 0 * super().decode(planes, dtype).sum()


class SpoilsItsInput(Eights):
    def encode(self, x):
        return super().encode(x.clamp_(-1e6, 1e6))


class SealsTogether(Sealed):
    """One scale for all groups of a batch."""

    def encode(self, x):
        return {name: plane if name == "payload" else plane.amax(0, keepdim=True).expand_as(plane).clone()
                for name, plane in super().encode(x).items()}  # fmt: skip


class NoFix(Eights):
    def conflicts(self, others):
        return ["it does not like these parts"]


# -- retentions ----------------------------------------------------------------------------------------------


class Moody(Band):
    """Every third answer is another one."""

    asked = [0]

    def visible(self, q_pos, k_pos):
        self.asked[0] += 1
        seen = super().visible(q_pos, k_pos)
        return seen & (q_pos == k_pos) if self.asked[0] % 3 == 0 else seen


class Wakes(Band):
    """What is dead lives again at every eighth token."""

    def dead(self, start, stop, num_computed):
        gone = super().dead(start, stop, num_computed)
        return gone & (num_computed % 8 != 0)


class KillsTooSoon(Band):
    def dead(self, start, stop, num_computed):
        return super().dead(start, stop, num_computed + 1)


class LooksAhead(Band):
    def visible(self, q_pos, k_pos):
        return k_pos <= q_pos + 1


class AllAlike(Band):
    def __eq__(self, other):
        return isinstance(other, AllAlike)

    def __hash__(self):
        return 1


class SaysItIsExact(Band):
    exact = True


# -- layouts -------------------------------------------------------------------------------------------------


class Grows(Blocks):
    """Blocks of another size each time that somebody asks."""

    def block_size(self, max_len, unit=1):
        self.size += 1
        return self.size


class IgnoresUnits(Blocks):
    def block_size(self, max_len, unit=1):
        return 5


# -- evictions -----------------------------------------------------------------------------------------------


class AsksNobody(Oldest):
    def victims(self, evictable):
        yield from list(self.order)


class Hoards(Oldest):
    """Remembers every run that is gone."""

    def __init__(self):
        super().__init__()
        self.gone = []

    def on_remove(self, run):
        super().on_remove(run)
        self.gone.append(run)


class YieldsTheDead(Oldest):
    def on_remove(self, run):
        pass


class DropsWhomItPasses(Oldest):
    def victims(self, evictable):
        for run in list(self.order):
            if run in self.order and evictable(run):
                yield run
            else:
                self.order.pop(run, None)


class OneForAll(Oldest):
    """All copies share one order."""

    def __deepcopy__(self, memo):
        return self
