"""Attention of a few rows over one context that all of them see: what sequences that decode behind a common prefix do.

Rows and query heads are the lanes of vectors when scores are computed, so that neither do keys have to be transposed,
nor scores to be summed up across lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from workers.engine.attention.contexts import TILE
from workers.engine.kernels.blocks import LANES, ROWS, add_product, soften
from workers.engine.kernels.compiled import FAST
from workers.engine.kernels.threads import argument1, argument2, argument3, share
from workers.engine.kernels.vector import LOWEST, prefetch, widen


def layout(rows: int, size: int) -> tuple[int, int]:
    """Room that a result of `rows` vectors of `size` needs: whole blocks of accumulators."""
    unit = max(LANES, ROWS)
    return -(-rows // unit) * unit, -(-size // LANES) * LANES


def part(element: type) -> Any:
    """One thread's segments, for a pool of `element`."""

    def run(arguments: Any) -> None:
        rows, slots = argument2(arguments, 0, np.int64), argument1(arguments, 1, np.int64)
        segments, of_piece = argument2(arguments, 2, np.int64), argument1(arguments, 3, np.int64)
        query, keys = argument3(arguments, 5, np.float32), argument3(arguments, 6, element)
        values, totals = argument3(arguments, 7, element), argument3(arguments, 8, np.float32)
        sums = argument3(arguments, 9, np.float32)
        kv_heads = keys.shape[1]
        begin_piece, end_piece = share(len(of_piece) - 1)
        for number in range(of_piece[begin_piece], of_piece[end_piece]):
            context, begin, end = segments[number]
            for head in range(kv_heads):
                at = number * kv_heads + head
                now = slots[begin:end]
                _segment(query, rows[context], keys, values, now, head, totals[at], sums[0, at], sums[1, at])

    return run


@njit(error_model="numpy", fastmath=FAST)
def _segment(
    query: Any, rows: Any, keys: Any, values: Any, slots: Any, head: int, total: Any, top: Any, mass: Any
) -> None:
    """One segment for one KV head."""
    lines, width = total.shape
    columns = _columns(query, rows, head, query.shape[1] // keys.shape[1], lines)
    tile, scores = np.zeros((TILE, width), np.float32), np.empty((TILE, lines), np.float32)
    shrink = np.empty(lines, np.float32)
    total[:], top[:], mass[:] = 0, LOWEST, 0
    for begin in range(0, len(slots), TILE):
        now, following = slots[begin : begin + TILE], slots[begin + TILE : begin + 2 * TILE]
        _load(tile, keys, now, head)
        prefetch(keys, following, head)
        scores[: len(now)], scores[len(now) :] = 0, LOWEST
        _score(tile, columns, scores)
        _soften(scores, top, mass, shrink)
        _shrink(total, shrink)
        _load(tile, values, now, head)
        prefetch(values, following, head)
        _add_weighted(scores, tile, total)


# Addresses are only taken of arguments, which the caller keeps: numba frees an array after the last use of its name.
@njit(error_model="numpy")
def _score(tile: Any, columns: Any, scores: Any) -> None:
    """`scores [TILE, lines] += tile [TILE, width] @ columns [size, lines]`."""
    (size, lines), width = columns.shape, tile.shape[1]
    add_product(tile.ctypes.data, width, 1, columns.ctypes.data, lines, size, scores.ctypes.data, lines, TILE, lines)


@njit(error_model="numpy")
def _add_weighted(scores: Any, tile: Any, total: Any) -> None:
    """`total [lines, width] += scores [TILE, lines] transposed @ tile [TILE, width]`."""
    lines, width = total.shape
    add_product(scores.ctypes.data, 1, lines, tile.ctypes.data, width, TILE, total.ctypes.data, width, lines, width)


@njit(error_model="numpy", fastmath=FAST)
def _load(tile: Any, source: Any, slots: Any, head: int) -> None:
    for t in range(len(slots)):
        line, widened = source[slots[t], head], tile[t]
        for d in range(len(line)):
            widened[d] = widen(line[d])
    tile[len(slots) :] = 0


@njit(error_model="numpy", fastmath=FAST)
def _columns(query: Any, rows: Any, head: int, group: int, lines: int) -> Any:
    """The rows' queries of a KV head as `[size, lines]`."""
    size = query.shape[2]
    columns = np.zeros((size, lines), np.float32)
    for number in range(len(rows)):
        for g in range(group):
            for d in range(size):
                columns[d, number * group + g] = query[rows[number], head * group + g, d]
    return columns


@njit(error_model="numpy")
def _soften(scores: Any, top: Any, mass: Any, shrink: Any) -> None:
    """See `soften`; all rows."""
    s, t, m, less = scores.ctypes.data, top.ctypes.data, mass.ctypes.data, shrink.ctypes.data
    for row in range(0, len(top), LANES):
        soften(s + row * 4, len(top), len(scores), t + row * 4, m + row * 4, less + row * 4)


@njit(error_model="numpy", fastmath=FAST)
def _shrink(total: Any, shrink: Any) -> None:
    """Most tiles raise few rows' highest scores."""
    for row in range(len(total)):
        if shrink[row] != 1:
            for d in range(total.shape[1]):
                total[row, d] *= shrink[row]
