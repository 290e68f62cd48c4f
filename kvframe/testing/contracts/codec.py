"""CodecContract: what kvframe.interfaces.Codec promises.

Shape legend: n vectors or groups, G sealing group, H heads, D size of a vector.
"""

from __future__ import annotations

import torch

from kvframe import sealing
from kvframe.interfaces import Codec
from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing.attending import Attending
from kvframe.testing.contracts.facts import CodecFacts
from kvframe.testing.contracts.numbers import DTYPES, CodecNumbers, each
from kvframe.testing.contracts.part import PartContract, cache_of, parts_of
from kvframe.testing.contracts.promises import differs, example, promise
from kvframe.testing.contracts.vectors import all_samples, samples
from kvframe.testing.parts import Blocks, some_layers
from kvframe.testing.trie import TrieIndex
from kvframe.testing.walker import Walker
from kvframe.types import LayerSpec


class CodecContract(CodecNumbers, CodecFacts, PartContract):
    """Subclass it and define `make(self) -> Codec`.

    Attributes:
        bound: the declared error, None for a codec that is exact: no number comes back further away than `bound` times
            the largest size in its vector (in its group and head, when the codec seals). `{"k": ..., "v": ...}` where
            keys and values differ. It must hold, and be at most 4 times the largest error that is seen.
        low, high: the largest sizes of vectors for which that is declared; below `low` the error is at most
            `bound * low`, and what is larger than `high` comes back as some finite number.
        dims: sizes of vectors.
        saturates: infinities come back as finite numbers.
        nan_hurts: "vector": a NaN makes no number of another vector NaN or different; when the codec seals, of its own
            vector or its own channel in the group. "group": of another group.
    """

    kind = "codec"
    bound: float | dict[str, float] | None = None
    low, high = 2.0**-100, 2.0**100
    dims: tuple[int, ...] = (64, 16)
    saturates = True
    nan_hurts = "vector"

    def bound_to(self, kind: str, dim: int) -> Codec:
        """A new codec for a layer with vectors of this size."""
        return self.make().for_layer(LayerSpec(0, 4, 2, dim, dim, dim**-0.5), kind)

    @promise("the codec has no conflict with vectors of the sizes that are tried: set `dims` to sizes that it serves")
    def test_dims(self):
        for dim in self.dims:
            codec = self.make()
            found = codec.conflicts(parts_of(some_layers((None,), dims=(dim, dim)), codec=codec))
            with example(dims=self.dims, head_size=dim):
                assert not found, f"{'; '.join(found)}"

    # -- planes and bytes ------------------------------------------------------------------------------------

    @promise("encode answers the planes that `planes` declares: names, shapes and dtypes")
    @each
    def test_planes_are_as_declared(self, codec, kind, dim):
        for dtype in DTYPES:
            x = samples(dim, codec.group)["normal"].to(getattr(torch, dtype))
            made, declared = codec.encode(x), codec.planes(dim)
            want = {}
            for name, plane in declared.items():
                lead = x.shape[:-1] if plane.per == "token" else (x.shape[0], x.shape[-2])
                want[name] = (*lead, *plane.shape), plane.resolved(dtype)
            got = {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in made.items()}
            with example(x=x, dtype=dtype):
                assert got == want, f"encode answered {got}, declared is {want}"

    @promise("the stored bytes are those that `planes` declares")
    @each
    def test_bytes_are_as_declared(self, codec, kind, dim):
        x = samples(dim, codec.group)["normal"]
        made, declared = codec.encode(x), codec.planes(dim)
        for name, plane in declared.items():
            entries = x[..., 0].numel() // (codec.group if plane.per == "group" else 1)
            with example(plane=name, x=x):
                assert made[name].nbytes == entries * plane.nbytes("float32"), f"{made[name].nbytes} bytes"
                assert codec.group > 1 or plane.per == "token", "there are no groups of tokens"

    @promise("for_layer answers the same codec whenever it is asked")
    @each
    def test_for_layer_is_stable(self, codec, kind, dim):
        part, layer = self.make(), LayerSpec(0, 4, 2, dim, dim, dim**-0.5)
        first = part.for_layer(layer, kind)
        part.for_layer(LayerSpec(1, 4, 2, 8, 8, 1.0), "v" if kind == "k" else "k")
        for again in (part.for_layer(layer, kind), codec):
            for fact in ("group", "affine", "fixed", "peak", "plain"):
                assert getattr(first, fact) == getattr(again, fact), f"{fact} has changed"
            assert first.planes(dim) == again.planes(dim), "planes have changed"
            x = samples(dim, codec.group)["normal"]
            a, b = first.encode(x), again.encode(x)
            assert not any(differs(a[name], b[name]) for name in a), "other codes of the same vectors"

    # -- from itself alone -----------------------------------------------------------------------------------

    @promise("a vector (or a full group) is encoded from itself alone: no other token and no other head matters")
    @each
    def test_each_is_encoded_alone(self, codec, kind, dim):
        names, x = all_samples(dim, codec.group, self.high)
        for turn, dtype in enumerate(DTYPES):
            given = x.to(getattr(torch, dtype))
            whole, heads = codec.encode(given), codec.encode(given[..., 1:, :])
            for i, name in list(enumerate(names))[turn :: len(DTYPES)]:
                alone = codec.encode(given[i : i + 1])
                with example(token=i, which=name, beside=f"{len(given) - 1} others", dtype=dtype):
                    for plane, made in whole.items():
                        assert not differs(alone[plane][0], made[i]), f"other codes alone: plane {plane!r}"
                        mine = made[i].narrow(made[i].dim() - len(codec.planes(dim)[plane].shape) - 1, 1, 1)
                        assert not differs(heads[plane][i], mine), f"other codes without head 0: plane {plane!r}"

    @promise("encode does not depend on how the batch is laid out in memory or shaped")
    @each
    def test_any_layout_of_the_batch(self, codec, kind, dim):
        x = all_samples(dim, codec.group, self.high)[1]
        whole = codec.encode(x)
        strided = codec.encode(x.transpose(0, -2).contiguous().transpose(0, -2))
        for plane in whole:
            assert not differs(strided[plane], whole[plane]), f"strides change plane {plane!r}"
        if codec.group == 1:
            pairs = x[: len(x) // 2 * 2]
            for plane, made in codec.encode(pairs.unflatten(0, (2, -1))).items():
                assert not differs(made.flatten(0, 1), whole[plane][: len(pairs)]), f"[2, n, H, D] changes {plane!r}"

    @promise("encode and decode are functions: they remember nothing, and leave what they are given as it was")
    @each
    def test_nothing_is_remembered_or_changed(self, codec, kind, dim):
        x = samples(dim, codec.group)["normal"]
        given = x.clone()
        first = codec.encode(given)
        assert not differs(given, x), "encode has changed its input"
        planes = {name: plane.clone() for name, plane in first.items()}
        back = codec.decode(planes, torch.float32)
        assert not any(differs(planes[name], first[name]) for name in planes), "decode has changed the planes"
        loud = all_samples(dim, codec.group, self.high)[1]
        given = loud.clone()
        codec.decode(codec.encode(given), torch.bfloat16)
        assert not differs(given, loud), "encode has changed its input"
        again = codec.encode(x)
        assert not any(differs(again[name], first[name]) for name in first), "other codes the second time"
        assert not differs(codec.decode(first, torch.float32), back), "other numbers the second time"

    @promise("decode reads the vector it is asked for and no other: what lies beside it may be poison")
    @each
    def test_each_is_decoded_alone(self, codec, kind, dim):
        names, x = all_samples(dim, codec.group, self.high)
        planes = codec.encode(x)
        whole = codec.decode(planes, torch.float32)
        poisoned = {name: plane.clone() for name, plane in planes.items()}
        for plane in poisoned.values():
            plane[::2] = float("nan") if plane.is_floating_point() else {torch.int8: -128}.get(plane.dtype, 127)
        beside = codec.decode(poisoned, torch.float32)
        for i, name in list(enumerate(names))[1::2]:
            alone = codec.decode({name: plane[i : i + 1] for name, plane in planes.items()}, torch.float32)
            with example(token=i, which=name):
                assert not differs(alone[0], whole[i]), "other numbers alone than in a batch"
                assert not differs(beside[i], whole[i]), "other numbers beside poison"

    @promise("decode answers [..., H, D] in the dtype that it is asked for")
    @each
    def test_dtypes_of_decode(self, codec, kind, dim):
        x = samples(dim, codec.group)["normal"]
        planes = codec.encode(x)
        exactly = codec.decode(planes, torch.float32)
        for dtype in (torch.float32, torch.bfloat16):
            got = codec.decode(planes, dtype)
            with example(x=x, dtype=dtype):
                assert got.dtype == dtype and got.shape == x.shape, f"{got.dtype} {list(got.shape)}"
                off = (got.float() - exactly).abs() > exactly.abs() / 64 + 1e-6
                assert not off.any(), "it is not the float32 answer, rounded"

    # -- in a cache ------------------------------------------------------------------------------------------

    @promise(
        "a cache with this codec works: what is stored is read, in any chunks, with hits, forks and poison beside it"
    )
    def test_in_a_cache(self):
        dim = min(self.dims)
        layers = some_layers((None, 10), (0,), dims=(dim, dim))
        unit = sealing.unit(self.make(), layers)
        cache = cache_of(
            layers, {"kernels": (ReferenceKernel(),)}, layout=Blocks(max(8, unit)), index=TrieIndex(), codec=self.make()
        )
        walker = Walker(cache, seed=1, watcher=Attending(cache))
        walker.walk(24)
        assert walker.watcher.outputs > 20, "the walk compared nothing"
