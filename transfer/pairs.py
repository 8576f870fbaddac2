"""Who writes what to whom, when the ranks of one worker send blocks to those of another one.

Each rank holds consecutive slices of the model's KV heads. A slice is sent by the first rank that holds it, to every
rank that holds it on the other side, straight into its place there; so no rank ever has to hold more than its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transfer.layout import KVLayout, Shard, Slices


@dataclass(frozen=True, slots=True)
class Pair:
    """Rank `sender` of the one worker writes these slices into the pool of rank `receiver` of the other."""

    sender: int
    receiver: int
    slices: Slices


def holders(shards: Sequence[Shard]) -> list[tuple[int, ...]]:
    """For each slice the ranks that hold it, ascending; `shards` are those of all ranks of a worker."""
    return [
        tuple(rank for rank, shard in enumerate(shards) if number in shard.slices) for number in range(shards[0].of)
    ]


def pairs(senders: Sequence[Shard], receivers: Sequence[Shard]) -> list[Pair]:
    """What the ranks of one worker write to those of another one, whose shards `mismatch` has found to fit."""
    found: list[Pair] = []
    first = [ranks[0] for ranks in holders(senders)]
    for receiver, shard in enumerate(receivers):
        begin = shard.first
        for number in shard.slices:
            if number + 1 == shard.first + shard.count or first[number + 1] != first[begin]:
                found.append(Pair(first[begin], receiver, (begin, number + 1)))
                begin = number + 1
    return found


def mismatch(mine: Sequence[KVLayout], theirs: Sequence[KVLayout]) -> str | None:
    """The first field, with its values, by which the heads that the ranks of two workers hold cannot be mapped to each
    other; None when they can."""
    for layouts in (mine, theirs):
        for rank, layout in enumerate(layouts):
            if difference := layouts[0].difference(layout):
                return f"rank {rank}: {difference}"
            if layout.num_blocks != layouts[0].num_blocks:
                return f"rank {rank}: num_blocks: {layouts[0].num_blocks} on rank 0, {layout.num_blocks} on this one"
    if difference := mine[0].difference(theirs[0]):
        return difference
    for layouts in (mine, theirs):
        for number, ranks in enumerate(holders([layout.shard for layout in layouts])):
            if not ranks:
                return f"shard: none of {len(layouts)} ranks holds slice {number} of {layouts[0].shard.of}"
    return None
