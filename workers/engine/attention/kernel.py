"""Attention over contexts in the pool, compiled with numba: what decode steps need.

PyTorch has no operator that reads a block table on the CPU. Doing without means a gather, a flash call and a merge for
every context and layer, whose overheads cost several times the arithmetic of single rows. Here keys and values are read
where they lie, once for all rows and query heads of their KV head, tile by tile, with a running softmax (Milakov and
Gimelshein, 2018), in float32 whatever the pool's type.

Every thread takes a piece of the contexts and leaves a partial result of each of its segments. These are then merged by
their log-sum-exp, together with what is known of the rows from other keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from workers.engine.attention import context_kernel, decode_kernel
from workers.engine.attention.contexts import Contexts
from workers.engine.kernels.threads import argument1, argument2, argument3, described, runner, share
from workers.kv.memory import KVMemory

_ELEMENTS = {torch.float32: np.float32, torch.bfloat16: np.uint16}


def supports(memory: KVMemory) -> bool:
    """Whether this pool can be read: bfloat16 or float32 in host memory."""
    return memory.flat.device.type == "cpu" and memory.keys[0].dtype in _ELEMENTS


def prepare(memory: KVMemory) -> None:
    """Compile now what the first request alone would not, so that no later one waits for it."""
    for dtype in {keys.dtype for keys in memory.keys}:
        _context(dtype)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    contexts: Contexts,
    output: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """`query [T, heads, size]`, float32 and scaled, over contexts in `keys` and `values` `[slots, kv_heads, size]`. The
    result is merged into `output [T, heads, size]` and `lse [T, heads]`, both float32; where nothing is known yet,
    `lse` is minus infinity. All contiguous."""
    kv_heads, size = keys.shape[1:]
    group = query.shape[1] // kv_heads
    rows = contexts.rows.shape[1]
    lines, width = (decode_kernel if rows == 1 else context_kernel).layout(rows * group, size)
    parts = len(contexts.segments) * kv_heads
    totals, sums = torch.empty((parts, lines, width)), torch.empty((2, parts, lines))
    arguments = [*contexts.described, *described(query, keys, values, totals, sums, output, lse)]
    kernel = _decode(group, size, keys.dtype) if rows == 1 else _context(keys.dtype)
    kernel(arguments)
    _merge()(arguments)


@cache
def _decode(group: int, size: int, dtype: torch.dtype) -> Callable[[list[int]], None]:
    return runner(f"decode-{group}-{size}-{dtype}", decode_kernel.part(group, size, _ELEMENTS[dtype]))


@cache
def _context(dtype: torch.dtype) -> Callable[[list[int]], None]:
    return runner(f"context-{dtype}", context_kernel.part(_ELEMENTS[dtype]))


def _merged(arguments: Any) -> None:
    """One thread's share of merging the segments' results into `output` and `lse`."""
    rows, of_context = argument2(arguments, 0, np.int64), argument1(arguments, 4, np.int64)
    totals, sums = argument3(arguments, 8, np.float32), argument3(arguments, 9, np.float32)
    output, lse = argument3(arguments, 10, np.float32), argument2(arguments, 11, np.float32)
    tops, masses = sums[0], sums[1]
    contexts, count = rows.shape
    kv_heads = len(totals) // of_context[contexts]
    group, size = output.shape[1] // kv_heads, output.shape[2]
    begin, end = share(contexts * count * kv_heads)
    for each in range(begin, end):
        context, row, head = each // (count * kv_heads), each // kv_heads % count, each % kv_heads
        first, last = of_context[context] * kv_heads + head, of_context[context + 1] * kv_heads
        for g in range(group):
            line, to, at = row * group + g, rows[context, row], head * group + g
            top = lse[to, at]
            for one in range(first, last, kv_heads):
                top = max(top, tops[one, line])
            mass = math.exp(lse[to, at] - top)
            for d in range(size):
                output[to, at, d] *= mass
            for one in range(first, last, kv_heads):
                weight = math.exp(tops[one, line] - top)
                mass += weight * masses[one, line]
                for d in range(size):
                    output[to, at, d] += weight * totals[one, line, d]
            for d in range(size):
                output[to, at, d] /= mass
            lse[to, at] = top + math.log(mass)


@cache
def _merge() -> Callable[[list[int]], None]:
    return runner("merge", _merged)
