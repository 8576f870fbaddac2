"""Batch: the packed input of one forward pass, from the work the scheduler chose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from workers.scheduler import Work


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a batch: rows `[row, row + count)` are its tokens `[start, start + count)`, and `blocks`
    is its table, int64."""

    row: int
    count: int
    start: int
    blocks: np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """`input_ids` and `positions` are `[1, T]`; `slots` `[T]` says where each token's KV goes in the pool;
    `logit_rows` lists the last row of each span, then all rows of those that are wanted whole. `hidden`: hidden states
    are wanted, too."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    spans: list[Span]
    logit_rows: torch.Tensor
    hidden: bool = False


def build(works: list[Work], block_size: int, device: torch.device) -> Batch:
    """Pack the chosen tokens of all sequences one behind the other."""
    ids, positions, slots, spans = [], [], [], []
    row = 0
    for work in works:
        sequence, count = work.sequence, work.count
        start, stop = sequence.computed, sequence.computed + count
        table = np.asarray(sequence.blocks, dtype=np.int64)
        where = np.arange(start, stop, dtype=np.int64)
        ids.append(sequence.tokens(start, stop))
        positions.append(where)
        slots.append(table[where // block_size] * block_size + where % block_size)
        spans.append(Span(row, count, start, table))
        row += count
    rows = [span.row + span.count - 1 for span in spans]
    for work, span in zip(works, spans, strict=True):
        if work.sequence.wants_logits:
            rows.extend(range(span.row, span.row + span.count))

    # One copy to the device for all of them.
    packed = np.concatenate([*ids, *positions, *slots, rows]).astype(np.int64)
    parts = torch.from_numpy(packed).to(device, non_blocking=True).split([row, row, row, len(rows)])
    hidden = any(work.sequence.request.embed for work in works)
    return Batch(parts[0][None], parts[1][None], parts[2], spans, parts[3], hidden)


def as_index(rows: np.ndarray) -> slice | torch.Tensor:
    """Ascending row numbers as what indexes them fastest: a slice, which gives a view, where they are consecutive."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else torch.from_numpy(rows)
