"""What every part promises, and compositions of one part under test with plain ones.

Plain parts stand where no part is under test (see kvframe.testing.parts), so a suite needs no other package.
"""

from __future__ import annotations

from typing import Any

from kvframe import sealing
from kvframe.interfaces import CacheContext, Parts
from kvframe.testing.contracts.promises import Contract, example, promise
from kvframe.testing.parts import Band, Blocks, Oldest, Unkept, Verbatim, some_layers

LAYERS = {
    "two layers, the second with a window": some_layers(),
    "one layer": some_layers((None,)),
    "heads of 15 and 9": some_layers((None, 10), dims=(15, 9)),
    "a layer that reads another one's keys": some_layers((None,), (0,)),
}
SIZES = (16, 5, 96)  # slots of a block, for requests of at most MAX_LEN tokens
MAX_LEN = 96


def composed(layers, max_len=MAX_LEN, **parts: Any) -> dict[str, Any]:
    """layout, index, eviction, retention and codec: those that are given, and plain ones."""
    usual = {"layout": Blocks, "index": Unkept, "eviction": Oldest, "retention": Band, "codec": Verbatim}
    return {name: parts[name] if name in parts else make() for name, make in usual.items()}


def parts_of(layers, max_len=MAX_LEN, **parts: Any) -> Parts:
    """The composition as `conflicts` sees it."""
    found = composed(layers, max_len, **parts)
    return Parts(
        **found,
        layers=layers,
        max_len=max_len,
        block_size=found["layout"].block_size(max_len, sealing.unit(found["codec"], layers)),
        stored=tuple((layer, kind, dim) for layer in layers for kind, dim in sealing.kinds(layer)),
    )


def cache_of(layers, context: dict | None = None, num_blocks: int | None = None, **parts: Any):
    """A BlockKVCache of the composition: room for one long request and a half, and no tensors unless the context has
    kernels."""
    from kvframe.cache import BlockKVCache

    made = CacheContext(layers, **{"max_len": MAX_LEN, "max_requests": 6, "max_step_tokens": 96, **(context or {})})
    found = composed(layers, made.max_len, **parts)
    if num_blocks is None:
        size = found["layout"].block_size(made.max_len, sealing.unit(found["codec"], layers))
        num_blocks = -(-3 * made.max_len // (2 * size)) + 2
    return BlockKVCache(made, **found, num_blocks=num_blocks)


class PartContract(Contract):
    """Attributes: kind: where the part stands in a composition."""

    kind: str

    @promise("conflicts answers a list of sentences, and each names the override that fixes it (name=value)")
    def test_conflicts_name_their_fix(self):
        for name, layers in LAYERS.items():
            for size in SIZES if self.kind != "layout" else SIZES[:1]:
                made = {"layout": Blocks(size), self.kind: self.make()}
                parts = parts_of(layers, **made)
                with example(model=name, block_size=parts.block_size):
                    found = made[self.kind].conflicts(parts)
                    assert isinstance(found, list), f"it answered a {type(found).__name__}"
                    assert all(isinstance(r, str) and r for r in found), f"it answered {found}"
                    unfixed = [reason for reason in found if "=" not in reason]
                    assert not unfixed, f"no override in {unfixed[:1]}"

    @promise("conflicts only looks: asked again it answers the same, and the other parts are as they were")
    def test_conflicts_changes_nothing(self):
        for name, layers in LAYERS.items():
            with example(model=name):
                part, twin = self.make(), self.make()
                parts = parts_of(layers, **{self.kind: part})
                others = [p for p in (parts.layout, parts.eviction, parts.retention, parts.codec) if p is not part]
                before = [dict(vars(other)) for other in others]
                first, second = part.conflicts(parts), part.conflicts(parts)
                assert first == second, f"it answered {first}, then {second}"
                again = twin.conflicts(parts_of(layers, **{self.kind: twin}))
                assert first == again, f"a new part of the same kind answered {again}, this one {first}"
                assert before == [vars(other) for other in others], "another part has changed"
