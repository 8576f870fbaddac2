"""The attention backend for CUDA: FlashInfer's paged kernels over the pool as it lies.

Every row attends to its own context, causally, and to each level of shared contexts; partial results are merged by
their log-sum-exp (cascade attention, Ye et al., 2024). FlashInfer works out a schedule once a step ("plan") for every
variant of layers: heads, scaling, window, soft cap. Layers with a window share nothing, since rows see different ends
of a context. A sink is applied at the end, from the log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from workers.engine.attention import AttentionOptions, LayerAttention
from workers.engine.attention.paging import Level, Pages, level, own_pages, window_blocks
from workers.engine.attention.sharing import Reuse, SharedContext, depth, shared_blocks, shared_contexts
from workers.engine.batch import Batch
from workers.kv.memory import KVMemory

HEAD_SIZES = (64, 128, 256)
"""Sizes of keys and values that FlashInfer's kernels are made for."""
WORKSPACE_BYTES = 384 << 20
"""Room for partial results of contexts that are split over processors; FlashInfer's advice of 128 MiB is too little for
many heads on large devices, and says so only when a step needs more."""
_LN_2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class Fixed:
    """What never changes in a captured graph: `rows` of one token each, and the bound `max_blocks` on a table."""

    rows: int
    max_blocks: int

    @property
    def groups(self) -> int:
        """Contexts of a level at most: each has two rows or more."""
        return max(1, self.rows // 2)


@dataclass(frozen=True, slots=True)
class Variant:
    """What a plan is made for; layers that agree in it share the plan."""

    heads: int
    kv_heads: int
    size: int
    scaling: float
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, layer: LayerAttention) -> Variant:
        """The variant of a layer."""
        geometry, options = layer.geometry, layer.options
        return cls(layer.heads, geometry.kv_heads, geometry.key_size, options.scaling, options.window, options.softcap)


def unsupported(layers: Sequence[LayerAttention], dtype: str) -> str | None:
    """Why FlashInfer cannot serve these layers; None when it can."""
    if dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 and float16, not in {dtype} (worker.dtype)"
    for index, one in enumerate(layers):
        key, value = one.geometry.key_size, one.geometry.value_size
        if key != value:
            return f"keys of layer {index} have {key} elements a head and values {value}, which have to be equal"
        if key not in HEAD_SIZES:
            return f"heads of layer {index} have {key} elements; it has kernels for {', '.join(map(str, HEAD_SIZES))}"
    return None


class FlashInferBackend:
    """See the module; `memory` is the pool, whose last block is nobody's (see `plan_memory`), and `shared` switches the
    grouping by shared context on. With `fixed`, all tensors stay where they are, so that graphs can be captured.
    `workspace` may be shared by backends that run one after the other."""

    def __init__(
        self,
        memory: KVMemory,
        layers: Sequence[LayerAttention],
        shared: bool,
        workspace: torch.Tensor | None = None,
        fixed: Fixed | None = None,
    ) -> None:
        import flashinfer

        self._merge = flashinfer.merge_state_in_place
        self._memory = memory
        self._layers = layers
        self.shares = shared
        self.reuse = Reuse()
        self._fixed = fixed
        device, layout = memory.flat.device, memory.layout
        self.block_size, self.spare = layout.block_size, layout.num_blocks - 1
        if workspace is None:
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.workspace = workspace
        shape = (layout.num_blocks, layout.block_size)
        self._pools = [
            (keys.view(*shape, *keys.shape[1:]), values.view(*shape, *values.shape[1:]))
            for keys, values in zip(memory.keys, memory.values, strict=True)
        ]
        self._variants = [Variant.of(one) for one in layers]
        self._kernels = {variant: _Kernels(variant, memory, workspace, fixed) for variant in self._variants}
        self._levels: list[_PlacedLevel] = []
        self._places: list[_PlacedLevel] = []
        self._slots = torch.empty(0, dtype=torch.int64, device=device)

    def fixed(self, shape: Fixed) -> FlashInferBackend:
        """A backend over the same pool and workspace whose tensors stay where they are."""
        return FlashInferBackend(self._memory, self._layers, self.shares, self.workspace, shape)

    def prepare(self, batch: Batch) -> None:
        """Plan for a batch; see `Backend`."""
        contexts = self.contexts(batch)
        self.plan(batch, contexts, depth(contexts))

    def contexts(self, batch: Batch) -> list[SharedContext]:
        """The contexts that spans of a batch share, as far as that is switched on."""
        found = shared_contexts(batch.spans, self.block_size) if self.shares else []
        self.reuse.count(found, self.block_size)
        return found

    def plan(self, batch: Batch, contexts: list[SharedContext], number: int) -> None:
        """Plan for a batch of which `contexts` are read once, those of the first `number` levels; there may be fewer
        levels than that."""
        size, rows = self.block_size, len(batch.slots)
        contexts = [one for one in contexts if one.level < number]
        by_level = [[one for one in contexts if one.level == index] for index in range(number)]
        groups = [self._fixed.groups if self._fixed else len(ones) for ones in by_level]
        levels = [level(ones, rows, count, self.spare, size) for ones, count in zip(by_level, groups, strict=True)]
        own = own_pages(batch.spans, shared_blocks(contexts), size)
        for variant, kernels in self._kernels.items():
            if variant.window is None:
                kernels.plan(own, levels)
            else:
                kernels.plan(own_pages(batch.spans, window_blocks(batch.spans, variant.window, size), size), [])
        self._place(levels)
        self._slots = batch.slots

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """One layer's attention; see `Backend`."""
        dtype, pool = self._pools[layer][0].dtype, self._pools[layer]
        self._memory.keys[layer].index_copy_(0, self._slots, key.to(dtype))
        self._memory.values[layer].index_copy_(0, self._slots, value.to(dtype))
        rows = query.to(dtype).contiguous()
        kernels = self._kernels[self._variants[layer]]
        output, lse = kernels.own.run(rows, pool)
        if options.window is None:
            for placed, kernel in zip(self._levels, kernels.shared, strict=False):
                part, part_lse = kernel.run(rows[placed.order], pool)
                self._merge(output, lse, part[placed.places], part_lse[placed.places], placed.merged)
        if options.sinks is not None:
            # A sink is one more score without a value: it only takes its share of the softmax. FlashInfer's
            # log-sum-exp is to base 2.
            output = output * torch.sigmoid(lse * _LN_2 - options.sinks.float())[..., None]
        return output.to(query.dtype)

    def _place(self, levels: list[Level]) -> None:
        """Bring the rows' order to the device, where a graph reads it: into the tensors that are there."""
        fresh = [_PlacedLevel(*map(torch.from_numpy, (one.order, one.places, one.merged))) for one in levels]
        known = self._places if self._fixed else []
        for old, new in zip(known, fresh, strict=False):
            old.copy_(new)
        self._places = [*known, *(one.to(self._memory.flat.device) for one in fresh[len(known) :])]
        self._levels = self._places[: len(levels)]


@dataclass(frozen=True, slots=True)
class _PlacedLevel:
    """The rows of a `Level` as tensors, each `[rows]`."""

    order: torch.Tensor
    places: torch.Tensor
    merged: torch.Tensor

    def to(self, device: torch.device) -> _PlacedLevel:
        return _PlacedLevel(*(one.to(device, non_blocking=True) for one in (self.order, self.places, self.merged)))

    def copy_(self, other: _PlacedLevel) -> None:
        self.order.copy_(other.order, non_blocking=True)
        self.places.copy_(other.places, non_blocking=True)
        self.merged.copy_(other.merged, non_blocking=True)


class _Kernels:
    """A variant's kernels: for own contexts, and for each level of shared ones. Each keeps a plan of its own."""

    def __init__(self, variant: Variant, memory: KVMemory, workspace: torch.Tensor, fixed: Fixed | None) -> None:
        self._arguments = (variant, memory, workspace)
        self._fixed = fixed
        self.own = _Kernel(*self._arguments, True, fixed.rows if fixed else None, fixed)
        self.shared: list[_Kernel] = []

    def plan(self, own: Pages, levels: list[Level]) -> None:
        """Plan all of them; `shared` grows to as many levels as there ever were."""
        self.own.plan(own)
        while len(self.shared) < len(levels):
            requests = self._fixed.groups + 1 if self._fixed else None
            self.shared.append(_Kernel(*self._arguments, False, requests, self._fixed))
        for kernel, one in zip(self.shared, levels, strict=False):
            kernel.plan(one.pages)


class _Kernel:
    """FlashInfer's kernel for one variant, and what it is to do in this step. `requests` is their number where a graph
    fixes it."""

    def __init__(
        self,
        variant: Variant,
        memory: KVMemory,
        workspace: torch.Tensor,
        causal: bool,
        requests: int | None,
        fixed: Fixed | None,
    ) -> None:
        import flashinfer

        buffers: dict[str, Any] = {}
        if fixed is not None and requests is not None:
            lengths = {
                "qo_indptr_buf": requests + 1,
                "paged_kv_indptr_buf": requests + 1,
                "paged_kv_indices_buf": fixed.rows * fixed.max_blocks + 1,
                "paged_kv_last_page_len_buf": requests,
            }
            device = workspace.device
            buffers = {name: torch.zeros(n, dtype=torch.int32, device=device) for name, n in lengths.items()}
            # A graph keeps the kernels that it was captured with, and these suit rows of one token.
            buffers |= {"use_cuda_graph": True, "backend": "fa2"}
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **buffers)
        self._geometry = (variant.heads, variant.kv_heads, variant.size, memory.layout.block_size)
        self._options = {
            "causal": causal,
            "sm_scale": variant.scaling,
            # FlashInfer counts the tokens before a row, we count the row itself too.
            "window_left": -1 if variant.window is None else variant.window - 1,
            "logits_soft_cap": variant.softcap,
            "q_data_type": memory.keys[0].dtype,
            "kv_data_type": memory.keys[0].dtype,
        }

    def plan(self, pages: Pages) -> None:
        """FlashInfer plans on the host, from host tensors, and copies what the kernels need."""
        arrays: list[np.ndarray] = [pages.row_ends, pages.block_ends, pages.indices, pages.last_tokens]
        self._wrapper.plan(*map(torch.from_numpy, arrays), *self._geometry, **self._options)

    def run(self, query: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `[n, heads, size]` and log-sum-exp to base 2 `[n, heads]`, float32."""
        output, lse = self._wrapper.run(query, pool, return_lse=True)
        return output, lse
