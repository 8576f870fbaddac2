"""Attention of single rows over their own blocks, compiled with numba: what a decode step does for each sequence.

PyTorch has no operator that reads a block table on the CPU. Doing without means a gather, a flash call and a merge for
every sequence and layer, whose overheads cost several times the arithmetic. This kernel walks the tables itself, reads
every key and value once for all query heads of its KV head, and keeps a running softmax (Milakov and Gimelshein,
2018), in float32 whatever the pool's type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from workers.engine.batch import Span, as_index
from workers.engine.kernels.compiled import compiled
from workers.engine.kernels.vector import exp, widen
from workers.kv.memory import KVMemory

_LOWEST = np.float32(-1e30)
# Rounding may be reordered, as in any matrix product, but infinities and signs are kept.
_FAST = {"reassoc", "contract", "arcp", "nsz"}


@cache
def _compiled(group: int, size: int, block_size: int, dtype: str) -> Callable[..., None]:
    """The kernel for `group` query heads per KV head of `size` and a pool of `dtype`; constants let the compiler unroll
    the inner loops."""

    def kernel(
        query: Any, keys: Any, values: Any, tables: Any, starts: Any, lengths: Any, scaling: Any, output: Any, lse: Any
    ) -> None:
        q = np.empty((group, size), np.float32)
        tile = np.empty((block_size, size), np.float32)
        scores = np.empty((group, block_size), np.float32)
        total = np.empty((group, size), np.float32)
        top = np.empty(group, np.float32)
        mass = np.empty(group, np.float32)
        for row in range(query.shape[0]):
            for head in range(keys.shape[1]):
                for g in range(group):
                    top[g] = _LOWEST
                    mass[g] = 0
                    for d in range(size):
                        q[g, d] = query[row, head * group + g, d] * scaling
                        total[g, d] = 0
                for index in range((lengths[row] + block_size - 1) // block_size):
                    slot = tables[starts[row] + index] * block_size
                    count = min(block_size, lengths[row] - index * block_size)
                    for t in range(count):
                        for d in range(size):
                            tile[t, d] = widen(keys[slot + t, head, d])
                    for t in range(count):
                        for g in range(group):
                            score = np.float32(0)
                            for d in range(size):
                                score += q[g, d] * tile[t, d]
                            scores[g, t] = score
                    for t in range(count, block_size):
                        for g in range(group):
                            scores[g, t] = _LOWEST
                    for t in range(count):
                        for d in range(size):
                            tile[t, d] = widen(values[slot + t, head, d])
                    for g in range(group):
                        highest = top[g]
                        for t in range(block_size):
                            highest = max(highest, scores[g, t])
                        shrink = exp(top[g] - highest)
                        top[g] = highest
                        added = np.float32(0)
                        for t in range(block_size):
                            weight = exp(scores[g, t] - highest)
                            scores[g, t] = weight
                            added += weight
                        mass[g] = mass[g] * shrink + added
                        for d in range(size):
                            total[g, d] *= shrink
                    for t in range(count):
                        for g in range(group):
                            weight = scores[g, t]
                            for d in range(size):
                                total[g, d] += weight * tile[t, d]
                for g in range(group):
                    for d in range(size):
                        output[row, head * group + g, d] = total[g, d] / mass[g]
                    lse[row, head * group + g] = top[g] + math.log(mass[g])

    name = f"decode-{group}-{size}-{block_size}-{dtype}"
    return compiled(name, kernel, fastmath=_FAST)


@dataclass(frozen=True, slots=True)
class Rows:
    """Single rows of a batch and where their own context lies: row `index[i]` sees `lengths[i]` tokens in the blocks
    `tables[starts[i]]` and so on."""

    index: slice | torch.Tensor
    tables: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


class DecodeKernel:
    """The kernel over one pool, `memory`."""

    def __init__(self, memory: KVMemory) -> None:
        self._block_size = memory.layout.block_size
        self._keys = [_as_numpy(one) for one in memory.keys]
        self._values = [_as_numpy(one) for one in memory.values]

    @staticmethod
    def supports(memory: KVMemory) -> bool:
        """Whether this pool can be read: bfloat16 or float32 in host memory."""
        return memory.flat.device.type == "cpu" and memory.layout.dtype in ("bfloat16", "float32")

    def rows(self, spans: list[Span], begins: list[int]) -> Rows:
        """Single-token spans whose own context is `[begin, start + 1)`; each `begin` is at a block's start."""
        size = self._block_size
        tables = [
            span.blocks[begin // size : span.start // size + 1] for span, begin in zip(spans, begins, strict=True)
        ]
        starts = np.cumsum([0, *(len(table) for table in tables[:-1])])
        lengths = np.array([span.start + 1 - begin for span, begin in zip(spans, begins, strict=True)])
        return Rows(as_index(np.array([span.row for span in spans])), np.concatenate(tables), starts, lengths)

    def attend(self, layer: int, query: torch.Tensor, rows: Rows, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
        """`query [n, heads, size]` → output `[n, heads, size]` and log-sum-exp `[n, heads]`, both float32."""
        count, heads, size = query.shape
        keys, values = self._keys[layer], self._values[layer]
        output, lse = torch.empty((count, heads, size)), torch.empty((count, heads))
        kernel = _compiled(heads // keys.shape[1], size, self._block_size, keys.dtype.name)
        kernel(
            query.float().contiguous().numpy(),
            keys,
            values,
            rows.tables,
            rows.starts,
            rows.lengths,
            np.float32(scaling),
            output.numpy(),
            lse.numpy(),
        )
        return output, lse


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The same memory; bfloat16, which numpy lacks, as its bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()
