"""Products of float32 rows with bfloat16 weights, computed in float32.

CPUs without matrix tiles multiply bfloat16 no faster than float32, and some slower. Widening weights in registers keeps
their half size in memory and reaches the float32 rate.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from workers.engine.kernels.compiled import compiled
from workers.engine.kernels.threads import runner
from workers.engine.kernels.vector import LANES, panel_product

PANEL = 2 * LANES
"""Columns that are computed together."""
_BLOCK_ROWS = 96
"""Rows that meet a panel while it is in the second-level cache: 96 rows of 4,096 columns are 1.5 MiB."""


def pack(weight: torch.Tensor) -> np.ndarray:
    """`[out, in]` bfloat16 as panels `[out / 32, in, 32]` of bits, the last one filled up with zeros."""
    out, depth = weight.shape
    padded = torch.zeros((-(-out // PANEL) * PANEL, depth), dtype=torch.bfloat16)
    padded[:out] = weight
    bits = padded.view(torch.int16).numpy().view(np.uint16)
    return np.ascontiguousarray(bits.reshape(-1, PANEL, depth).transpose(0, 2, 1))


def product(rows: torch.Tensor, panels: np.ndarray) -> torch.Tensor:
    """`[n, in]` float32, contiguous, times packed weights → `[n, out filled up]` float32."""
    count, depth = rows.shape
    output = torch.empty((count, len(panels) * PANEL))
    arguments = (rows.data_ptr(), panels.ctypes.data, output.data_ptr(), count, depth, len(panels))
    _runner()(np.array(arguments, dtype=np.int64))
    return output


_twelve, _eight, _four, _two, _one = (panel_product(rows, 2) for rows in (12, 8, 4, 2, 1))


def _part(arguments: Any, thread: int, threads: int) -> None:
    """One thread's panels, all rows."""
    rows, panels, output = arguments[0], arguments[1], arguments[2]
    count, depth, number = arguments[3], arguments[4], arguments[5]
    width = number * PANEL
    for block in range(0, count, _BLOCK_ROWS):
        stop = min(block + _BLOCK_ROWS, count)
        for panel in range(number * thread // threads, number * (thread + 1) // threads):
            w = panels + panel * depth * PANEL * 2
            row = block
            while row < stop:
                a = rows + row * depth * 4
                c = output + (row * width + panel * PANEL) * 4
                left = stop - row
                if left >= 12:
                    _twelve(a, depth, w, depth, c, width)
                    row += 12
                elif left >= 8:
                    _eight(a, depth, w, depth, c, width)
                    row += 8
                elif left >= 4:
                    _four(a, depth, w, depth, c, width)
                    row += 4
                elif left >= 2:
                    _two(a, depth, w, depth, c, width)
                    row += 2
                else:
                    _one(a, depth, w, depth, c, width)
                    row += 1


@cache
def _runner() -> Any:
    return runner(compiled("linear", _part))
