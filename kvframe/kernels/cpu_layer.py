"""What the `cpu` kernel knows of a layer in every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvframe.kernels.cpu_codes import Reader, reader
from kvframe.kernels.native import address, callback
from kvframe.storage import LayerStorage


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Kept by the storage of the layer (`LayerStorage.memo`).

    Attributes:
        k_how, v_how: how the planes are read. plain: both hold vectors as they are.
        key: which Work serves it: layer group, window, sinks, block size. shape: which Deal.
        sizes: Hq, Hkv, Dk, Dv, block size. factors: of scores, softcap, of values. key_bytes: of one token.
        sinks: float32 [Hq] or None; sinks_at, tables_at: addresses, or 0. scratch: bytes of a thread.
        function: the compiled one that attends.
    """

    k_how: Reader
    v_how: Reader
    plain: bool
    key: tuple[int, int | None, int, int]
    shape: tuple
    sizes: tuple[int, ...]
    factors: tuple[float, float, float]
    key_bytes: int
    sinks: torch.Tensor | None
    sinks_at: int
    tables_at: tuple[int, int]
    scratch: int
    function: object

    @classmethod
    def of(cls, storage: LayerStorage) -> Layer:
        """storage: of a layer that the kernel can serve."""
        from kvframe.kernels.cpu_decode import scratch_bytes

        spec, rule = storage.spec, storage.retention
        hq, hkv, dk, dv = spec.q_heads, spec.kv_heads, spec.k_dim, spec.v_dim
        k, v = reader(storage.codec_k, dk, spec.dtype), reader(storage.codec_v, dv, spec.dtype)
        sinks = None if storage.learned_sinks is None else storage.learned_sinks.float().contiguous()
        spread = hkv * max(dk, dv) if k.table is not None or v.table is not None else 0
        sizes = storage.k["payload"].element_size(), storage.v["payload"].element_size()
        key_bytes, scratch = hkv * (dk * sizes[0] + dv * sizes[1]), scratch_bytes(hq, dk, dv, spread)
        return cls(
            k_how=k, v_how=v, plain=k.plain and v.plain, sizes=(hq, hkv, dk, dv, storage.block_size),
            key=(storage.group, rule.window, rule.sinks, storage.block_size),
            shape=(hq, hkv, dk, dv, key_bytes, scratch),
            factors=(spec.scale * k.factor, spec.softcap or 0.0, v.factor), key_bytes=key_bytes, sinks=sinks,
            sinks_at=0 if sinks is None else sinks.data_ptr(), scratch=scratch,
            tables_at=tuple(0 if how.table is None else address(how.table) for how in (k, v)),
            function=callback(*attend_name(spec.dtype, k, v)),
        )  # fmt: skip


def layer_of(storage: LayerStorage) -> Layer:
    """The Layer of a storage, made at the first call."""
    layer = storage.memo.get("cpu")
    if layer is None:
        layer = storage.memo["cpu"] = Layer.of(storage)
    return layer


def attend_name(dtype: str, k: Reader, v: Reader) -> tuple[str, ...]:
    """Which compiled function attends to what these read."""
    return "attend", dtype, k.type, v.type, k.scale or "float32", v.scale or "float32"
