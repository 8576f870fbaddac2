"""Who writes what to whom: every slice of every rank comes once, from a rank that has it."""

import dataclasses
import itertools
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from transfer.layout import KVLayout, LayerGeometry, Shard, slices_for
from transfer.pairs import Pair, holders, mismatch, pairs


def gang(size: int, of: int) -> list[Shard]:
    return [Shard.of_rank(rank, size, of) for rank in range(size)]


def layouts(size: int, of: int, heads: tuple[int, ...] = (4, 8), blocks: int = 6) -> list[KVLayout]:
    """What ranks have of a model's layers with so many heads."""
    return [
        KVLayout(
            "model",
            "float32",
            4,
            tuple(LayerGeometry(count // of * shard.count, 8, 6) for count in heads),
            blocks,
            shard,
        )
        for shard in gang(size, of)
    ]


@st.composite
def two_sizes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Sizes of two gangs, KV heads that they can share, and into how many slices those are cut for them."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
    fitting = [size for size in range(1, 17) if heads % size == 0 or size % heads == 0]
    one, other = draw(st.sampled_from(fitting)), draw(st.sampled_from(fitting))
    return one, other, heads, slices_for([one, other, draw(st.sampled_from(fitting))], [heads])


@given(two_sizes())
def test_every_slice_comes_once_from_a_rank_that_has_it(drawn: tuple[int, int, int, int]) -> None:
    one, other, _, of = drawn
    mine, theirs = gang(one, of), gang(other, of)
    written: Counter[tuple[int, int]] = Counter()
    senders: dict[int, set[int]] = {}
    for pair in pairs(mine, theirs):
        for number in range(*pair.slices):
            assert number in mine[pair.sender].slices
            assert number in theirs[pair.receiver].slices
            written[pair.receiver, number] += 1
            senders.setdefault(number, set()).add(pair.sender)
    wanted = [(rank, number) for rank, shard in enumerate(theirs) for number in shard.slices]
    assert written == Counter(wanted)
    assert all(len(ranks) == 1 for ranks in senders.values())


@given(two_sizes())
def test_as_many_bytes_travel_as_between_equals(drawn: tuple[int, int, int, int]) -> None:
    one, other, heads, of = drawn
    receivers = layouts(other, of, (heads, 2 * heads))

    def sent(senders: int) -> int:
        chosen = pairs(gang(senders, of), [layout.shard for layout in receivers])
        return sum(
            layout.block_bytes // layout.shard.count * (pair.slices[1] - pair.slices[0])
            for pair in chosen
            for layout in [receivers[pair.receiver]]
        )

    assert sent(one) == sent(other) == sum(layout.block_bytes for layout in receivers)


@given(two_sizes())
def test_what_fits_is_not_refused(drawn: tuple[int, int, int, int]) -> None:
    one, other, heads, of = drawn
    assert mismatch(layouts(one, of, (heads,)), layouts(other, of, (heads,), blocks=9)) is None


@pytest.mark.parametrize(
    ("sizes", "of", "expected"),
    [
        ((1, 1), 1, [Pair(0, 0, (0, 1))]),
        ((1, 1), 4, [Pair(0, 0, (0, 4))]),
        ((1, 2), 2, [Pair(0, 0, (0, 1)), Pair(0, 1, (1, 2))]),
        ((2, 1), 2, [Pair(0, 0, (0, 1)), Pair(1, 0, (1, 2))]),
        ((2, 4), 4, [Pair(0, 0, (0, 1)), Pair(0, 1, (1, 2)), Pair(1, 2, (2, 3)), Pair(1, 3, (3, 4))]),
        ((4, 2), 4, [Pair(0, 0, (0, 1)), Pair(1, 0, (1, 2)), Pair(2, 1, (2, 3)), Pair(3, 1, (3, 4))]),
        ((2, 4), 2, [Pair(0, 0, (0, 1)), Pair(0, 1, (0, 1)), Pair(1, 2, (1, 2)), Pair(1, 3, (1, 2))]),
        ((4, 2), 2, [Pair(0, 0, (0, 1)), Pair(2, 1, (1, 2))]),
        ((2, 3), 6, [Pair(0, 0, (0, 2)), Pair(0, 1, (2, 3)), Pair(1, 1, (3, 4)), Pair(1, 2, (4, 6))]),
    ],
)
def test_pairs(sizes: tuple[int, int], of: int, expected: list[Pair]) -> None:
    assert pairs(gang(sizes[0], of), gang(sizes[1], of)) == expected


def test_holders_of_replicated_heads() -> None:
    assert holders(gang(4, 2)) == [(0, 1), (2, 3)]
    assert holders(gang(2, 4)) == [(0,), (0,), (1,), (1,)]


def changed(rank: int, **changes: object) -> list[KVLayout]:
    made = layouts(2, 4)
    made[rank] = dataclasses.replace(made[rank], **changes)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (layouts(2, 2), "shard.of: 4 slices of the KV heads here, 2 there"),
        (layouts(2, 4, (8, 8)), "layers: "),
        ([dataclasses.replace(one, model="other") for one in layouts(2, 4)], "model: model here, other there"),
        (changed(1, model="other"), "rank 1: model: "),
        (changed(1, num_blocks=7), "rank 1: num_blocks: 6 on rank 0, 7 on this one"),
        (layouts(2, 4)[:1], "shard: none of 1 ranks holds slice 2 of 4"),
        (changed(1, shard=Shard(1, 2, 4)), "shard: none of 2 ranks holds slice 3 of 4"),
    ],
)
def test_heads_that_cannot_be_mapped_are_refused_by_field(theirs: list[KVLayout], says: str) -> None:
    """Whoever sends."""
    found = mismatch(layouts(1, 4), theirs)
    assert found is not None
    assert found.startswith(says)
    assert mismatch(theirs, layouts(1, 4)) is not None


def test_consecutive_slices_go_in_one_write() -> None:
    for one, other in itertools.product((1, 2, 4, 8), repeat=2):
        assert len(pairs(gang(one, 8), gang(other, 8))) == max(one, other)
