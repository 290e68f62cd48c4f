"""FlashInfer's two wrappers for paged caches, from the documentation of flashinfer-python 0.7.4.

`SIZES` and `DTYPES` are what the real ones have kernels for; tests with tiny heads widen them. `planned` and `ran`
count calls.

Shape legend: R requests, T tokens, M pages of all requests, P slots of a page, Hq/Hkv query/KV heads, D head size.
"""

from __future__ import annotations

import torch

from stand_ins.leaky import attend

SIZES = {64, 128, 256}
DTYPES = {torch.float16, torch.bfloat16}
GROUPS = {1, 2, 3, 4, 6, 8, 16}  # query heads per KV head, on CUDA cores

planned: list[str] = []
ran: list[str] = []


class _Wrapper:
    backends: tuple[str, ...]

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, *, backend="auto"):
        assert float_workspace_buffer.dtype == torch.uint8 and float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout == "NHD" and backend in self.backends and not use_cuda_graph
        assert not float_workspace_buffer.any(), "it must be zeros at its first use"
        self.device, self.paged = float_workspace_buffer.device, None

    def _plan(
        self, q_starts, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, causal, *,
        window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        for given in (q_starts, indptr, indices, last_page_len):
            assert given.dtype == torch.int32 and given.dim() == 1
        assert len(q_starts) == len(indptr) == len(last_page_len) + 1
        assert indptr[0] == q_starts[0] == 0 and indptr[-1] == len(indices)
        assert bool((indptr.diff() >= 1).all()), "a request without pages"
        assert bool((last_page_len >= 1).all()) and bool((last_page_len <= page_size).all())
        assert num_qo_heads % num_kv_heads == 0 and head_dim in SIZES and page_size >= 1
        assert window_left >= -1 and (logits_soft_cap is None or logits_soft_cap >= 0)
        assert q_data_type in DTYPES and (kv_data_type or q_data_type) == q_data_type
        lengths = (indptr.diff() - 1) * page_size + last_page_len
        assert bool((q_starts.diff() <= lengths).all()), "more queries than keys"
        self.paged = [x.clone() for x in (q_starts, indptr, indices, lengths)]
        self.heads, self.page, self.dtype = (num_qo_heads, num_kv_heads, head_dim), page_size, q_data_type
        scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self.rest = {"scale": scale, "causal": causal, "left": window_left, "softcap": logits_soft_cap or 0.0}
        planned.append(type(self).__name__)

    def run(self, q, paged_kv_cache):
        assert self.paged is not None, "plan comes before run"
        k, v = paged_kv_cache
        q_heads, kv_heads, dim = self.heads
        q_starts, indptr, indices, lengths = self.paged
        assert q.dtype == k.dtype == v.dtype == self.dtype and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert q.shape == (int(q_starts[-1]), q_heads, dim)
        assert k.shape == v.shape == (k.shape[0], self.page, kv_heads, dim) and k.stride() == v.stride()
        assert int(indices.min()) >= 0 and int(indices.max()) < len(k)
        out = torch.empty_like(q)
        for r, length in enumerate(lengths.tolist()):
            pages = indices[indptr[r] : indptr[r + 1]].long()
            mine = slice(int(q_starts[r]), int(q_starts[r + 1]))
            out[mine] = attend(q[mine], k[pages].flatten(0, 1), v[pages].flatten(0, 1), length, **self.rest)
        ran.append(type(self).__name__)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    backends = ("auto", "fa2")

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_tensor_cores=False, backend="auto"):
        super().__init__(float_workspace_buffer, kv_layout, backend=backend)
        self.tensor_cores = use_tensor_cores

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **options
    ):  # fmt: skip
        assert self.tensor_cores or num_qo_heads // num_kv_heads in GROUPS
        one_each = torch.arange(len(indptr), dtype=torch.int32)
        rest = num_qo_heads, num_kv_heads, head_dim, page_size
        self._plan(one_each, indptr, indices, last_page_len, *rest, False, **options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    backends = ("auto", "fa2", "fa3")

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal=False, **options,
    ):  # fmt: skip
        pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._plan(qo_indptr, *pages, num_qo_heads, num_kv_heads, head_dim_qk, page_size, causal, **options)
