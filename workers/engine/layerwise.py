"""Layer by layer: a backend that says when a layer's keys and values are in the pool, while later ones are computed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workers.engine.attention import AttentionOptions, Backend
from workers.engine.batch import Batch

GROUPS = 4
"""Parts in which a chunk's layers are offered. Each costs a write for the sender; all but the last are hidden."""


def cuts(layers: int) -> frozenset[int]:
    """Behind which layers a part ends, the last one excepted."""
    return frozenset(layers * part // GROUPS for part in range(1, GROUPS)) - {0}


class LayerWatch:
    """Does what `backend` does, and calls `after` with the number of each layer behind it."""

    def __init__(self, backend: Backend, after: Callable[[int], None]) -> None:
        self._backend = backend
        self._after = after

    def prepare(self, batch: Batch) -> None:
        """See `Backend`."""
        self._backend.prepare(batch)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `Backend`."""
        output = self._backend.attend(layer, query, key, value, options)
        self._after(layer)
        return output
