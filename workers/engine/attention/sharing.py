"""Which sequences of a batch share which context. Pure: block tables in, groups out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workers.engine.batch import Span

SHARED_MIN_TOKENS = 64
"""A shared context shorter than this is not worth a merge."""


@dataclass(frozen=True, slots=True)
class SharedContext:
    """Blocks `[begin, end)` of the tables of `spans`, which are the same in all of them and whole context to all of
    their rows. `level` counts the shared contexts that these spans have before this one, so contexts of one level have
    no row in common."""

    spans: list[Span]
    begin: int
    end: int
    level: int

    @property
    def blocks(self) -> np.ndarray:
        """The block ids."""
        return self.spans[0].blocks[self.begin : self.end]

    @property
    def rows(self) -> np.ndarray:
        """All rows of its spans, ascending."""
        return np.concatenate([np.arange(one.row, one.row + one.count) for one in self.spans])


@dataclass(slots=True)
class Reuse:
    """How much context was read once for several sequences of a step, in tokens, and how much more they would have read
    each by itself."""

    read: int = 0
    spared: int = 0

    def count(self, contexts: list[SharedContext], block_size: int) -> None:
        """The contexts of a step."""
        for one in contexts:
            tokens = (one.end - one.begin) * block_size
            self.read += tokens
            self.spared += tokens * (len(one.spans) - 1)


def shared_contexts(spans: list[Span], block_size: int) -> list[SharedContext]:
    """One context for each branch of the tree of the spans' tables that is long enough, at any depth."""
    found: list[SharedContext] = []
    # Spans whose tables agree up to block `depth`, and whose context is shared up to block `begin`.
    open_groups = [(spans, 0, 0, 0)]
    while open_groups:
        group, begin, depth, level = open_groups.pop()
        branches: dict[int, list[Span]] = {}
        for span in group:
            if span.start // block_size > depth:
                branches.setdefault(int(span.blocks[depth]), []).append(span)
        for members in branches.values():
            if len(members) < 2:
                continue
            common, done, below = _common_blocks(members, depth, block_size), begin, level
            if (common - begin) * block_size >= SHARED_MIN_TOKENS:
                found.append(SharedContext(members, begin, common, level))
                done, below = common, level + 1
            open_groups.append((members, done, common, below))
    return found


def depth(contexts: list[SharedContext]) -> int:
    """How many levels there are."""
    return 1 + max((one.level for one in contexts), default=-1)


def shared_blocks(contexts: list[SharedContext]) -> dict[int, int]:
    """How many leading blocks of a span are in shared contexts, by the span's first row; spans without are left out."""
    ends: dict[int, int] = {}
    for one in contexts:
        for span in one.spans:
            ends[span.row] = max(one.end, ends.get(span.row, 0))
    return ends


def _common_blocks(spans: list[Span], known: int, block_size: int) -> int:
    """Leading blocks that all tables have in common and that lie before all of their rows; the first `known` do."""
    first = spans[0].blocks
    common = min(span.start // block_size for span in spans)
    for span in spans[1:]:
        differs = first[known:common] != span.blocks[known:common]
        if differs.any():
            common = known + int(differs.argmax())
    return common
