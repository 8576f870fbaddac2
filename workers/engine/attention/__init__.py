"""Attention over the paged KV pool, registered with transformers' attention interface.

A backend has two methods: `prepare(batch)` once a step, and `attend(...)` once a layer, which writes the new keys and
values into the pool and returns the attention output. The model calls in through `register`.

Masks are never built, because the pool's layout needs none; a model that relies on one beyond causality and windows
is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from transfer.layout import LayerGeometry
from workers.engine.batch import Batch

IMPLEMENTATION = "headwater"


class ModelUnsupported(Exception):
    """The architecture attends in a way that the registered attention function does not reproduce."""


class Backend(Protocol):
    """What the registered attention function calls."""

    def prepare(self, batch: Batch) -> None:
        """Work out, once for all layers, which rows attend to which blocks."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """`query [T, heads, k]`, `key [T, kv_heads, k]`, `value [T, kv_heads, v]` → `[T, heads, v]`."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """A layer's variant: `scaling` of scores, `window` in tokens, `softcap` of scores, `sinks [heads]`."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How a layer attends: `heads` query heads over keys and values of a geometry."""

    heads: int
    geometry: LayerGeometry
    options: AttentionOptions


_current = threading.local()


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """The backend that attention calls of this thread go to, inside the block."""
    _current.backend, _current.mask_windows = backend, set()
    try:
        yield
    finally:
        _current.backend = None


def mask_windows() -> set[int]:
    """Windows or chunks, in tokens, of the masks that the model asked for in this thread's last pass."""
    return set(_current.mask_windows)


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: `query [1, heads, T, k]` and so on → `[1, T, heads, v]`."""
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ModelUnsupported(f"{type(module).__name__} attends by a mask of its own")
    options = AttentionOptions(
        scaling=scaling if scaling is not None else float(query.shape[-1]) ** -0.5,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = _current.backend.attend(int(module.layer_idx), *rows, options)  # type: ignore[arg-type]
    return output[None], None


def _no_mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """transformers' mask interface: note what was asked for."""
    if local_size is not None:
        _current.mask_windows.add(local_size)


def register() -> None:
    """Make transformers know the implementation."""
    AttentionInterface.register(IMPLEMENTATION, _forward)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
