"""Attention of a single row over a context: what a sequence that decodes does for what it shares with no other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from workers.engine.kernels.compiled import FAST
from workers.engine.kernels.threads import argument1, argument2, argument3, share
from workers.engine.kernels.vector import LOWEST, exp, prefetch, widen

_TOKENS = 16
"""Tokens that are computed together: a vector of scores."""


def layout(rows: int, size: int) -> tuple[int, int]:
    """Room that a result of `rows` vectors of `size` needs."""
    return rows, size


def part(group: int, size: int, element: type) -> Any:
    """One thread's segments, for `group` query heads per KV head of `size` and a pool of `element`; constants let the
    compiler unroll the inner loops."""

    def run(arguments: Any) -> None:
        rows, slots = argument2(arguments, 0, np.int64), argument1(arguments, 1, np.int64)
        segments, of_piece = argument2(arguments, 2, np.int64), argument1(arguments, 3, np.int64)
        query, keys = argument3(arguments, 5, np.float32), argument3(arguments, 6, element)
        values, totals = argument3(arguments, 7, element), argument3(arguments, 8, np.float32)
        sums = argument3(arguments, 9, np.float32)
        kv_heads = keys.shape[1]
        begin_piece, end_piece = share(len(of_piece) - 1)
        q, mean = np.empty((group, size), np.float32), np.empty((group, size), np.float32)
        tile, scores = np.empty((_TOKENS, size), np.float32), np.empty((group, _TOKENS), np.float32)
        top, mass = np.empty(group, np.float32), np.empty(group, np.float32)
        for number in range(of_piece[begin_piece], of_piece[end_piece]):
            context, first, end = segments[number]
            for head in range(kv_heads):
                for g in range(group):
                    top[g], mass[g] = LOWEST, 0
                    for d in range(size):
                        q[g, d], mean[g, d] = query[rows[context, 0], head * group + g, d], 0
                for begin in range(first, end, _TOKENS):
                    count = min(end - begin, _TOKENS)
                    following = slots[begin + _TOKENS : min(begin + 2 * _TOKENS, end)]
                    prefetch(keys, following, head)
                    for t in range(count):
                        slot = slots[begin + t]
                        for d in range(size):
                            tile[t, d] = widen(keys[slot, head, d])
                    for t in range(count):
                        for g in range(group):
                            score = np.float32(0)
                            for d in range(size):
                                score += q[g, d] * tile[t, d]
                            scores[g, t] = score
                    _soften(scores, count, mean, top, mass)
                    prefetch(values, following, head)
                    for t in range(count):
                        slot = slots[begin + t]
                        for d in range(size):
                            tile[t, d] = widen(values[slot, head, d])
                    for t in range(count):
                        for g in range(group):
                            weight = scores[g, t]
                            for d in range(size):
                                mean[g, d] += weight * tile[t, d]
                at = number * kv_heads + head
                for g in range(group):
                    sums[0, at, g], sums[1, at, g] = top[g], mass[g]
                    for d in range(size):
                        totals[at, g, d] = mean[g, d]

    return run


@njit(error_model="numpy", fastmath=FAST, inline="always")
def _soften(scores: Any, count: int, mean: Any, top: Any, mass: Any) -> None:
    """Scores of `count` tokens become weights, and what older ones have left shrinks."""
    group, size = mean.shape
    for g in range(group):
        for t in range(count, _TOKENS):
            scores[g, t] = LOWEST
        highest = top[g]
        for t in range(_TOKENS):
            highest = max(highest, scores[g, t])
        shrink = exp(top[g] - highest)
        top[g] = highest
        added = np.float32(0)
        for t in range(_TOKENS):
            weight = exp(scores[g, t] - highest)
            scores[g, t] = weight
            added += weight
        mass[g] = mass[g] * shrink + added
        for d in range(size):
            mean[g, d] *= shrink
