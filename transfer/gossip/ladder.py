"""The ladder of checkpoints: of which prefixes a worker publishes a key.

Dense for the first tokens, where prompts part from one another, and sparser after: a router that knows the ladder's
keys knows a match to within one step. The ladder is the same for all prompts, so a prompt has the checkpoints of all
its prefixes.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

import numpy as np

STEPS = ((64, 1024), (256, 8192), (512, 32768), (1024, 1 << 31))
"""(tokens from one checkpoint to the next, up to this many tokens)."""


@lru_cache(maxsize=1024)
def checkpoints(blocks: int, block_size: int) -> np.ndarray:
    """Depths in blocks, ascending int32, of the checkpoints of a prompt with `blocks` whole blocks; read-only."""
    depths = np.array(between(0, blocks, block_size), np.int32)
    depths.flags.writeable = False
    return depths


def between(above: int, upto: int, block_size: int) -> tuple[int, ...]:
    """The checkpoints deeper than `above` blocks and not deeper than `upto`, ascending."""
    ladder = _ladder(1 << max(10, upto.bit_length()), block_size)
    return ladder[bisect_right(ladder, above) : bisect_right(ladder, upto)]


@lru_cache(maxsize=64)
def _ladder(blocks: int, block_size: int) -> tuple[int, ...]:
    """All checkpoints up to `blocks` blocks. Asked for powers of two only, so that few are kept."""
    depths: list[int] = []
    above = 0
    for step, bound in STEPS:
        stride, upto = max(1, step // block_size), min(blocks, bound // block_size)
        depths += range(above + stride, upto + 1, stride)
        above = upto
    return tuple(depths)
