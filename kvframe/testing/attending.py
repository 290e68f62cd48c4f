"""Watchers that run the data plane of a walk: every step stores and attends, and every output is held against what it
must be, computed from the request's tokens alone.

`Attending` knows the parts of a BlockKVCache and poisons what nobody holds. `Alone` works for any KVCache: a request
gets what it gets when it has the cache for itself, whatever the batch, the chunks and the hits; and what the definition
says, where the cache calls itself exact.

Shape legend: L tokens of a request, C of a step, Hq/Hkv heads, Dk/Dv sizes.
"""

from __future__ import annotations

import numpy as np
import torch

from kvframe.testing.contracts.promises import example, promise
from kvframe.testing.definition import attention, qkv, seen, stored
from kvframe.testing.harness import poison_free
from kvframe.testing.parts import model_mask
from kvframe.testing.shadow import Shadow, values
from kvframe.testing.walked import Walked, Watcher
from kvframe.types import LayerSpec

NEAR = 1e-5


class Outputs:
    """The outputs of a step, layer by layer. `outputs` counts the vectors that were compared."""

    outputs = 0

    def layers(self) -> list[LayerSpec]:
        raise NotImplementedError

    def wanted(self, layer: LayerSpec, request: Walked, start: int, stop: int) -> torch.Tensor:
        """What the queries of the positions start .. stop get, `[C, Hq, Dv]`."""
        raise NotImplementedError

    def attend(self, cache, plan, batch) -> None:
        spans = [(request, request.computed, request.computed + n) for request, n in batch]
        for layer in self.layers():
            parts = [[x[start:stop] for x in qkv(layer, values(request))] for request, start, stop in spans]
            given = [torch.cat([part[i] for part in parts]) for i in range(3)]
            copies = [x.clone() for x in given]
            got, at = cache.attend(layer.index, *given, plan), 0
            with promise("attend leaves q, k and v as they were"):
                assert all(torch.equal(a, b) for a, b in zip(given, copies))
            with promise("attend answers [T, Hq, Dv]"):
                shape = (len(given[0]), layer.q_heads, layer.v_dim)
                assert tuple(got.shape) == shape, f"{tuple(got.shape)}, not {shape}"
            for request, start, stop in spans:
                with example(layer=layer.index, request=request.id, positions=f"{start} .. {stop - 1}"):
                    self.compare(layer, request, start, stop, got[at : at + stop - start])
                at += stop - start
                self.outputs += stop - start

    def compare(self, layer, request, start, stop, got) -> None:
        raise NotImplementedError


class Attending(Shadow, Outputs):
    """For a BlockKVCache with storage: what its rule and its codecs say, in poisoned storage."""

    near = NEAR

    def layers(self):
        return [layer.spec for layer in self.cache.storage.layers]

    def run(self, plan, batch) -> None:
        super().run(plan.host, batch)
        poison_free(self.cache)
        self.attend(self.cache, plan, batch)

    @promise("attention reads what is stored, and of that only what the retention lets a query see")
    def compare(self, layer, request, start, stop, got):
        held, at = self.cache.storage.layers[layer.index], np.arange(start, stop)
        q, k, v = (x[:stop] for x in qkv(layer, values(request)))
        k, v = stored(k, held.codec_k, at), stored(v, held.codec_v, at)
        want = attention(q[start:], k, v, seen(held.retention, at, stop), layer, held.learned_sinks)
        _near(got, want, self.near)


class Alone(Watcher, Outputs):
    """For any KVCache.

    Args:
        context: what the cache was made for. lone: another one of the same kind, for requests that run alone.
        near: how far an output may be off.
    """

    def __init__(self, cache, context, lone, near: float = NEAR):
        self.cache, self.context, self.lone, self.near, self.made = cache, context, lone, near, 0

    def layers(self):
        return list(self.context.layers)

    def run(self, plan, batch) -> None:
        poison_free(self.cache)
        self.alone = {id(request): self._alone(request, request.computed + n) for request, n in batch}
        self.attend(self.cache, plan, batch)

    def compare(self, layer, request, start, stop, got):
        with promise("a request gets the same attention alone and in any batch, in any chunks, with and without hits"):
            _near(got, self.alone[id(request)][layer.index][start:stop], self.near)
        if self.cache.exact:
            with promise("a cache that calls itself exact computes the attention of the model"):
                q, k, v = (x[:stop] for x in qkv(layer, values(request)))
                at = np.arange(start, stop)
                learned = (self.context.learned_sinks or {}).get(layer.index)
                mask = torch.from_numpy(model_mask(layer, at[:, None], np.arange(stop)[None, :]))
                _near(got, attention(q[start:], k, v, mask, layer, learned), self.near)

    def _alone(self, request: Walked, stop: int) -> list[torch.Tensor]:
        """Per layer, what the first `stop` tokens get in an empty cache."""
        self.made += 1
        lone = Walked(f"alone{self.made}", request.tokens[:stop], f"alone{self.made}", version=request.version)
        twin, parts = Walked("", lone.tokens, request.salt, version=request.version), []
        numbers = values(twin)
        self.lone.reset()
        lone.computed = self.lone.admit(lone)
        assert lone.computed == 0, f"an empty cache answered {lone.computed} to admit"
        while lone.computed < stop:
            n = stop - lone.computed
            while not self.lone.grow(lone, n):
                n //= 2
                assert n, f"an empty cache has no room for token {lone.computed} of {stop}"
            plan, span = self.lone.plan([(lone, n)]), slice(lone.computed, lone.computed + n)
            parts.append([self.lone.attend(x.index, *(y[span] for y in qkv(x, numbers)), plan) for x in self.layers()])
            self.lone.commit(lone, n)
            lone.computed += n
        self.lone.release(lone)
        return [torch.cat(outs) for outs in zip(*parts)]


def _near(got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    """Fails also where one of them is no number."""
    error = (got.double() - want.double()).abs()
    assert bool((error <= limit).all()), f"an output is off by {float(error.max()):.3g} (allowed: {limit:g})"
