"""CUDA graphs for steps that only decode: a recorded pass is launched as a whole, instead of kernel by kernel.

A graph replays the same kernels on the same addresses. So there is one for each padded batch size and number of levels
of shared context; batches are copied into its tensors, and FlashInfer plans into its buffers. Padding rows are a token
of a sequence that is not there: they write to, and see, only the pool's spare block, which no sequence can own.
Everything else runs as it is: steps with chunks of prompts, larger batches, and models whose pass cannot be captured
because it waits for the device, as routing to experts may.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from workers.engine.attention.flashinfer_backend import Fixed, FlashInferBackend
from workers.engine.attention.sharing import SharedContext, depth
from workers.engine.batch import Batch, Span
from workers.engine.model import Model

_log = logging.getLogger(__name__)
MAX_LEVELS = 2
"""Levels of shared context in a graph; deeper ones are read by each sequence. Each costs some launches a layer."""


def batch_sizes(max_running: int) -> list[int]:
    """Padded batch sizes, ascending: powers of two, and `max_running`."""
    return sorted({*(1 << power for power in range(max_running.bit_length())), max_running})


class DecodeGraphs:
    """Runs batches, by a graph where there is one that fits. `eager` runs the others; `max_blocks` bounds a table."""

    def __init__(self, model: Model, eager: FlashInferBackend, max_running: int, max_blocks: int) -> None:
        self._model, self._eager = model, eager
        self._sizes = batch_sizes(max_running)
        self._max_blocks = max_blocks
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def capture(self) -> None:
        """Record all graphs. Leaves none when the model cannot be captured, and logs why."""
        pool: Any = None
        try:
            for size in reversed(self._sizes):  # the largest first, so that the others find room in its memory
                backend = self._eager.fixed(Fixed(size, self._max_blocks))
                for levels in range(MAX_LEVELS + 1 if self._eager.shares and size > 1 else 1):
                    graph = self._graphs[size, levels] = _Graph(self._model, backend, size, levels, pool)
                    pool = graph.pool
        except Exception as error:  # a capture fails in as many ways as a model can wait for the device
            self._graphs.clear()
            _log.warning("no CUDA graphs for decoding, every kernel is launched by itself: %s", error)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits `[len(batch.logit_rows), vocab]`, float32, which the next call may overwrite."""
        contexts = self._eager.contexts(batch)
        graph = self._fitting(batch, contexts)
        if graph is not None:
            return graph.run(batch, contexts)
        self._eager.plan(batch, contexts, depth(contexts))
        return self._model.compute(batch, self._eager)

    def _fitting(self, batch: Batch, contexts: list[SharedContext]) -> _Graph | None:
        rows = len(batch.slots)
        if batch.hidden or not rows == len(batch.spans) == len(batch.logit_rows) <= self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, rows)]
        return self._graphs.get((size, min(MAX_LEVELS, depth(contexts))))


class _Graph:
    """The recorded pass of `size` rows of one token each, with `levels` of shared contexts."""

    def __init__(self, model: Model, backend: FlashInferBackend, size: int, levels: int, pool: Any) -> None:
        self._backend, self._levels = backend, levels
        self._padding = torch.tensor([[0], [0], [backend.spare * backend.block_size]], device=model.device)
        self._rows = self._padding.repeat(1, size)
        self._spans = [Span(row, 1, 0, np.array([backend.spare])) for row in range(size)]
        every_row = torch.arange(size, device=model.device)
        self._batch = Batch(self._rows[0:1], self._rows[1:2], self._rows[2], self._spans, every_row)
        backend.plan(self._batch, [], levels)
        model.compute(self._batch, backend)  # what libraries set up on first use cannot be captured
        model.synchronize()
        self._replay, self._logits, self.pool = record(lambda: model.compute(self._batch, backend), pool)

    def run(self, batch: Batch, contexts: list[SharedContext]) -> torch.Tensor:
        """Logits of a batch of at most `size` rows."""
        count = len(batch.spans)
        # The padding is written each time: a larger batch before may have left slots of sequences there.
        self._rows[:, count:] = self._padding
        self._rows[:, :count] = torch.stack([batch.input_ids[0], batch.positions[0], batch.slots])
        padded = replace(self._batch, spans=[*batch.spans, *self._spans[count:]])
        self._backend.plan(padded, contexts, self._levels)
        self._replay()
        return self._logits[:count]


def record(function: Callable[[], torch.Tensor], pool: Any) -> tuple[Callable[[], None], torch.Tensor, Any]:
    """Capture a call: what launches it again, its result, which each launch overwrites, and its memory pool (graphs of
    one `pool` share memory, and must not run at the same time)."""
    graph = torch.cuda.CUDAGraph()
    # Only this thread must not wait for the device meanwhile; others copy blocks.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = function()
    return graph.replay, output, graph.pool()
