"""What FlashInfer promises, spelled out in float64 on the CPU: the parts of its interface that the backend uses.

It checks what FlashInfer checks, and poisons what a call may not rely on.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch


class BatchPrefillWithPagedKVCacheWrapper:
    """Requests of consecutive query rows over pages, bottom-right causal or not."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "NHD"
        self._buffers = [qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf]
        self._fixed = use_cuda_graph
        self._rows: int | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        arrays = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        assert all(one.dtype == torch.int32 and one.device.type == "cpu" for one in arrays)
        requests = len(qo_indptr) - 1
        assert len(paged_kv_indptr) == requests + 1
        assert len(paged_kv_last_page_len) == requests
        assert (qo_indptr.diff() >= 0).all()
        assert (paged_kv_indptr.diff() >= 0).all()
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        if self._fixed:
            self._rows = self._rows or int(qo_indptr[-1])
            assert int(qo_indptr[-1]) <= self._rows
            for index, (buffer, array) in enumerate(zip(self._buffers, arrays, strict=True)):
                assert buffer is not None
                assert len(array) <= len(buffer) if index == 2 else len(array) == len(buffer)
                buffer[: len(array)].copy_(array)
            arrays = [buffer for buffer in self._buffers if buffer is not None]
        self._arrays = arrays
        self._geometry = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._page_size, self._causal, self._scale = page_size, causal, sm_scale
        self._window, self._cap, self._types = window_left, logits_soft_cap, (q_data_type, kv_data_type)

    def run(
        self, query: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor], return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, ends, indices, last = self._arrays
        assert return_lse
        assert len(query) == rows[-1]
        assert (query.dtype, pool[0].dtype) == self._types
        assert query.is_contiguous()
        heads, kv_heads, size = self._geometry
        assert query.shape[1:] == (heads, size)
        assert pool[0].shape[1:] == (self._page_size, kv_heads, size)
        output, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:2], torch.nan)
        for request in range(len(last)):
            begin, stop = int(rows[request]), int(rows[request + 1])
            if begin == stop:
                continue
            pages = indices[int(ends[request]) : int(ends[request + 1])].long()
            length = (len(pages) - 1) * self._page_size + int(last[request])
            keys, values = (part[pages].flatten(0, 1)[:length] for part in pool)
            output[begin:stop], lse[begin:stop] = self._attend(query[begin:stop], keys, values)
        return output, lse

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, Any]:
        group = query.shape[1] // keys.shape[1]
        k, v = (part.double().repeat_interleave(group, 1) for part in (keys, values))
        scores = torch.einsum("qhd,thd->qht", query.double(), k) * self._scale
        if self._cap:
            scores = self._cap * torch.tanh(scores / self._cap)
        at = torch.arange(len(query))[:, None] + len(keys) - len(query)
        seen = torch.arange(len(keys))[None]
        hidden = seen > at if self._causal else torch.zeros_like(seen > at)
        if self._window >= 0:
            hidden = hidden | (seen < at - self._window)
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        output = torch.einsum("qht,thd->qhd", torch.softmax(scores, -1), v)
        return output.to(query.dtype), (torch.logsumexp(scores, -1) / math.log(2)).float()


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor
) -> None:
    """Merge two partial results by their base-2 log-sum-exp, in the rows of the mask."""
    assert mask.dtype == torch.bool
    assert all(one.is_contiguous() for one in (v, s, v_other, s_other))
    both = torch.logaddexp2(s.double(), s_other.double())
    merged = v.double() * torch.exp2(s - both)[..., None] + v_other.double() * torch.exp2(s_other - both)[..., None]
    v[mask], s[mask] = merged[mask].to(v.dtype), both[mask].float()


module = SimpleNamespace(
    BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper, merge_state_in_place=merge_state_in_place
)
