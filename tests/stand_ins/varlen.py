"""`torch.nn.attention.varlen.varlen_attn` with a block table, from its documentation and torch's checks (2.13).

`implementation` is what was activated: None (FlashAttention-2) or "FA3". `DTYPES` is what the real ones know; tests in
fp32 widen it. `ran` counts calls.

Shape legend: R requests, T tokens, B pages of a table, P slots of a page, Hq/Hkv query/KV heads, D head size.
"""

from __future__ import annotations

import torch

from stand_ins.leaky import attend

DTYPES = {torch.float16, torch.bfloat16}

implementation: str | None = None
ran: list[int] = []


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None,
    num_splits=None,
):  # fmt: skip
    (tokens, q_heads, dim), (pages, page, kv_heads, _) = query.shape, key.shape
    requests = len(cu_seq_q) - 1
    assert query.dtype == key.dtype == value.dtype and query.dtype in DTYPES
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == block_table.stride(-1) == 1
    assert key.shape == value.shape == (pages, page, kv_heads, dim) and dim % 8 == 0 and dim <= 256
    assert q_heads == kv_heads or enable_gqa and q_heads % kv_heads == 0
    for given, shape in ((cu_seq_q, (requests + 1,)), (seqused_k, (requests,)), (block_table, (requests, None))):
        assert given.dtype == torch.int32 and given.dim() == len(shape) and given.shape[0] == shape[0]
    assert cu_seq_q.is_contiguous() and seqused_k.is_contiguous()
    if implementation is None:
        assert page % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert cu_seq_k is not None and cu_seq_k.dtype == torch.int32 and cu_seq_k.shape == cu_seq_q.shape
        assert torch.equal(cu_seq_k.diff(), seqused_k) and cu_seq_k[0] == 0
    else:
        assert cu_seq_k is None, "If cu_seqlens_k is passed in, then page table is not supported"
    assert num_splits == 1, "split keys in a packed batch: rows of the output stay unwritten"
    assert tuple(window_size) == (-1, 0) and return_aux is None
    assert int(cu_seq_q[-1]) == tokens and int(cu_seq_q.diff().max()) == max_q and int(seqused_k.max()) == max_k
    out = torch.full_like(query, float("nan"))
    for r in range(requests):
        mine = slice(int(cu_seq_q[r]), int(cu_seq_q[r + 1]))
        ids = block_table[r].long()  # all of the table, what no block stands behind included
        k, v = key[ids].flatten(0, 1), value[ids].flatten(0, 1)
        out[mine] = attend(query[mine], k, v, int(seqused_k[r]), dim**-0.5 if scale is None else scale)
    ran.append(requests)
    return out
