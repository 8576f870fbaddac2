"""Contexts that rows of a batch attend to, cut into pieces of equal length for the threads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from workers.engine.kernels.threads import described

TILE = 32
"""Tokens that kernels compute together, and the unit of cutting: few enough that they and their scores stay in the
first-level cache."""


@dataclass(frozen=True)
class Contexts:
    """`rows [contexts, n]` lists the rows that see each context. The contexts' tokens, one behind the other, are in
    `slots` of the pool. They are cut into pieces, and thereby fall into segments, each of one context and one piece:
    `segments[j]` is `(context, begin, end)`, a range of `slots`. Piece `p` consists of the segments from `of_piece[p]`
    to `of_piece[p + 1]`, context `i` of those from `of_context[i]` to `of_context[i + 1]`. All are int64."""

    rows: torch.Tensor
    slots: torch.Tensor
    segments: torch.Tensor
    of_piece: torch.Tensor
    of_context: torch.Tensor

    @cached_property
    def described(self) -> list[int]:
        """All of the above as arguments of a kernel."""
        return described(self.rows, self.slots, self.segments, self.of_piece, self.of_context)


def gather(rows: np.ndarray, slots: list[np.ndarray], pieces: int) -> Contexts:
    """Contexts in these slots, none of them empty, each seen by equally many rows, `rows [contexts, n]`. Some of the
    pieces may stay empty."""
    lengths = np.array([len(one) for one in slots])
    tiles = -(-lengths // TILE)
    ends = np.cumsum(tiles)
    bounds = ends[-1] * np.arange(pieces + 1) // pieces
    cuts = np.unique(np.concatenate([bounds, ends]))
    context = np.searchsorted(ends, cuts[:-1], side="right")
    # Tiles of a context that are before a cut become tokens; only the last one may be a smaller tile.
    start, before = (np.cumsum(lengths) - lengths)[context], (ends - tiles)[context]
    stops = np.minimum((cuts[1:] - before) * TILE, lengths[context])
    segments = np.stack([context, start + (cuts[:-1] - before) * TILE, start + stops], axis=1)
    of_piece = np.searchsorted(cuts, bounds)
    of_context = np.searchsorted(cuts, np.concatenate([bounds[:1], ends]))
    parts = (rows, np.concatenate(slots), segments, of_piece, of_context)
    return Contexts(*(torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in parts))
