"""Attention over a pool of several slices of the KV heads: a backend for each slice, with its share of the heads.

Heads attend by themselves, so what comes out is what one backend over a pool of all heads would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from workers.engine.attention import AttentionOptions, LayerAttention
from workers.engine.attention.flashinfer_backend import FlashInferBackend
from workers.engine.attention.sharing import Reuse
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.batch import Batch


def of_one_slice(layers: Sequence[LayerAttention], index: int, count: int) -> list[LayerAttention]:
    """How the layers attend in slice number `index` of `count`."""
    return [
        LayerAttention(
            one.heads // count,
            replace(one.geometry, kv_heads=one.geometry.kv_heads // count),
            _options(one.options, count)[index],
        )
        for one in layers
    ]


class SlicedBackend:
    """See the module; `backends` are those of the pool's slices, in order."""

    def __init__(self, backends: Sequence[TorchBackend | FlashInferBackend]) -> None:
        self._backends = backends

    @property
    def reuse(self) -> Reuse:
        """All of them read the same contexts."""
        return self._backends[0].reuse

    def prepare(self, batch: Batch) -> None:
        """See `Backend`."""
        for one in self._backends:
            one.prepare(batch)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `Backend`."""
        count = len(self._backends)
        queries, keys, values = (rows.chunk(count, dim=1) for rows in (query, key, value))
        parts = zip(self._backends, queries, keys, values, _options(options, count), strict=True)
        return torch.cat([one.attend(layer, q, k, v, its) for one, q, k, v, its in parts], dim=1)


def _options(options: AttentionOptions, count: int) -> list[AttentionOptions]:
    if options.sinks is None:
        return [options] * count
    return [replace(options, sinks=part) for part in options.sinks.chunk(count)]
