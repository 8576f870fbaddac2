"""The geometry of a pool: its regions, its fingerprint, and how two pools differ."""

import dataclasses
import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from transfer.layout import DTYPE_BYTES, KVLayout, LayerGeometry, Shard, slices_for
from workers.kv.memory import DTYPES, KVMemory, runs

ONE = KVLayout("model", "float32", 4, (LayerGeometry(2, 8, 8), LayerGeometry(1, 6, 5)), 3)
ALL = (0, len(ONE.layers))


@st.composite
def drawn_layouts(draw: st.DrawFn) -> KVLayout:
    """Of all heads as often as of some of them."""
    of = draw(st.sampled_from([1, 1, 2, 3, 4]))
    first = draw(st.integers(0, of - 1))
    count = draw(st.integers(1, of - first))
    geometries = st.builds(
        LayerGeometry, st.integers(1, 4).map(lambda heads: heads * count), st.integers(1, 9), st.integers(1, 9)
    )
    return KVLayout(
        "model",
        draw(st.sampled_from(sorted(DTYPE_BYTES))),
        draw(st.integers(1, 5)),
        tuple(draw(st.lists(geometries, min_size=1, max_size=4))),
        draw(st.integers(1, 6)),
        Shard(first, count, of),
    )


layouts = drawn_layouts()


@given(layouts)
def test_regions_tile_the_pool(layout: KVLayout) -> None:
    end = 0
    for region in layout.regions():
        assert region.offset == end
        end += region.block_bytes * layout.num_blocks
    assert end == layout.total_bytes == layout.block_bytes * layout.num_blocks
    assert len(layout.regions()) == 2 * len(layout.layers) * layout.shard.count
    assert layout.block_bytes == layout.token_bytes * layout.block_size


@given(layouts)
def test_views_cover_every_byte_once(layout: KVLayout) -> None:
    memory = KVMemory(layout, torch.device("cpu"))
    memory.flat.zero_()
    for part in (*memory.keys, *memory.values):
        part += 1
    assert (memory.flat.view(DTYPES[layout.dtype]) == 1).all()
    slots, count = layout.num_blocks * layout.block_size, layout.shard.count
    for geometry, keys, values in zip(layout.layers * count, memory.keys, memory.values, strict=True):
        assert keys.shape == (slots, geometry.kv_heads // count, geometry.key_size)
        assert values.shape == (slots, geometry.kv_heads // count, geometry.value_size)
    assert memory.size(layout.num_blocks, (0, memory.layers)) == layout.total_bytes


def test_a_block_of_a_region_is_where_the_layout_says() -> None:
    memory = KVMemory(ONE, torch.device("cpu"))
    memory.flat.zero_()
    memory.values[1][2 * 4 : 3 * 4] = 7.0  # block 2 of the last region
    region = ONE.regions()[3]
    start = region.offset + 2 * region.block_bytes
    assert (memory.flat[start : start + region.block_bytes].view(torch.float32) == 7.0).all()
    assert int((memory.flat != 0).sum()) <= region.block_bytes


CHANGES: dict[str, object] = {
    "model": "other",
    "dtype": "bfloat16",
    "block_size": 8,
    "layers": (LayerGeometry(2, 8, 8), LayerGeometry(1, 5, 6)),
}


def test_a_pool_of_all_heads_is_what_it_was() -> None:
    """What is on disks was written under this name, by versions that knew no slices."""
    assert ONE.fingerprint == "33662fb9a9c8df6956b66b756cdb3ceb"
    assert [one.offset for one in ONE.regions()] == [0, 768, 1536, 1824]


SLICED = KVLayout("model", "float32", 4, (LayerGeometry(4, 8, 8), LayerGeometry(8, 6, 5)), 3, Shard(0, 4, 4))


def ranks(layout: KVLayout, size: int) -> list[KVLayout]:
    """What the ranks of a gang hold of it."""
    shards = [Shard.of_rank(rank, size, layout.shard.of) for rank in range(size)]
    parts = [
        tuple(dataclasses.replace(g, kv_heads=g.kv_heads // layout.shard.of * shard.count) for g in layout.layers)
        for shard in shards
    ]
    return [dataclasses.replace(layout, layers=part, shard=shard) for part, shard in zip(parts, shards, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_ranks_of_a_gang_say_the_same_of_the_whole(size: int) -> None:
    for one in ranks(SLICED, size):
        assert one.whole == SLICED
        assert one.fingerprint == SLICED.fingerprint
        assert one.difference(SLICED) is None
        assert SLICED.difference(one) is None
        assert one.block_bytes * max(size, 4) // one.shard.count == SLICED.block_bytes * max(size, 4) // 4


def test_slices_of_a_block_have_the_same_pieces_on_every_rank() -> None:
    pieces = {
        size: [region.block_bytes for one in ranks(SLICED, size) for region in one.regions()] for size in (1, 2, 4)
    }
    assert pieces[1] == pieces[2] == pieces[4]


def test_another_number_of_slices_does_not_fit_and_is_named() -> None:
    other = dataclasses.replace(SLICED, shard=Shard(0, 2, 2))
    assert SLICED.difference(other) == "shard.of: 4 slices of the KV heads here, 2 there"
    assert dataclasses.replace(SLICED, shard=Shard()).fingerprint == other.fingerprint == SLICED.fingerprint


def test_heads_are_not_cut() -> None:
    with pytest.raises(ValueError, match="layers: 4 KV heads of layer 0 are not 3 equal slices"):
        dataclasses.replace(SLICED, shard=Shard(0, 3, 3))


@pytest.mark.parametrize("shard", [(-1, 1, 2), (0, 0, 2), (1, 2, 2), (2, 1, 2)])
def test_there_are_only_so_many_slices(shard: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="shard: there are no"):
        Shard(*shard)


@pytest.mark.parametrize(
    ("size", "of", "held"),
    [
        (1, 4, [[0, 1, 2, 3]]),
        (2, 4, [[0, 1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (4, 2, [[0], [0], [1], [1]]),
        (3, 1, [[0], [0], [0]]),
    ],
)
def test_ranks_hold_consecutive_slices(size: int, of: int, held: list[list[int]]) -> None:
    assert [list(Shard.of_rank(rank, size, of).slices) for rank in range(size)] == held


def test_slices_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks cannot share 4 slices"):
        Shard.of_rank(0, 3, 4)


@pytest.mark.parametrize(
    ("sizes", "heads", "of"),
    [
        ([1, 1], [3], 1),
        ([1, 2], [4, 8], 2),
        ([2, 4], [8], 4),
        ([2, 3], [6], 6),
        ([1, 4], [2], 2),
        ([2, 8], [4], 4),
        ([1, 2], [1], 1),
    ],
)
def test_heads_are_cut_so_that_every_rank_holds_whole_slices(sizes: list[int], heads: list[int], of: int) -> None:
    assert slices_for(sizes, heads) == of
    for size in sizes:
        assert [Shard.of_rank(rank, size, of) for rank in range(size)]


@pytest.mark.parametrize(("size", "heads"), [(2, [3]), (4, [6]), (3, [2]), (4, [4, 2]), (8, [4, 2])])
def test_heads_that_ranks_cannot_share_are_named(size: int, heads: list[int]) -> None:
    told = " or ".join(map(str, sorted(heads)))
    with pytest.raises(ValueError, match=f"{size} ranks cannot share the {told} KV heads"):
        slices_for([1, size], heads)


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_counts_and_is_named(field: str) -> None:
    other = dataclasses.replace(ONE, **{field: CHANGES[field]})
    assert other.fingerprint != ONE.fingerprint
    difference = ONE.difference(other)
    assert difference is not None
    assert difference.startswith(f"{field}: ")
    assert str(getattr(ONE, field)) in difference
    assert str(CHANGES[field]) in difference


def test_pools_of_different_sizes_fit() -> None:
    other = dataclasses.replace(ONE, num_blocks=1000)
    assert other.fingerprint == ONE.fingerprint
    assert ONE.difference(other) is None


@given(layouts)
def test_a_layout_survives_as_a_tuple(layout: KVLayout) -> None:
    assert KVLayout.from_tuple(layout.to_tuple()) == layout


@given(st.lists(st.integers(0, 8), max_size=8))
def test_runs_are_the_blocks(blocks: list[int]) -> None:
    pieces = list(runs(blocks))
    assert [first + i for first, count in pieces for i in range(count)] == blocks
    for (first, count), (following, _) in itertools.pairwise(pieces):
        assert first + count != following


def test_a_checksum_depends_on_content_and_order_and_not_on_ids() -> None:
    one, other = (KVMemory(ONE, torch.device("cpu")) for _ in range(2))
    for memory in (one, other):
        memory.flat.zero_()
    for part, its in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        part[0:4], part[4:8] = 1.0, 2.0
        its[8:12], its[0:4] = 1.0, 2.0
    assert one.checksum([0, 1], ALL) == other.checksum([2, 0], ALL)
    assert one.checksum([0, 1], ALL) != one.checksum([1, 0], ALL)
    for part in (*one.keys, *one.values):
        before = one.checksum([0, 1], ALL)
        part[7, 0, 0] += 1
        assert one.checksum([0, 1], ALL) != before
    assert one.checksum([0], ALL) == other.checksum([2], ALL)
    whole = [one.checksum([0], (layer, layer + 1)) for layer in range(one.layers)]
    one.values[0][0, 0, 0] += 1
    changed = [one.checksum([0], (layer, layer + 1)) for layer in range(one.layers)]
    assert [a == b for a, b in zip(whole, changed, strict=True)] == [False] + [True] * (one.layers - 1)


def test_every_slice_has_its_own_checksum_wherever_it_is_held() -> None:
    whole = KVMemory(SLICED, torch.device("cpu"))
    whole.flat.copy_(torch.arange(len(whole.flat)) * 7 % 251)
    digests = whole.checksum([0, 2], ALL)
    assert len(set(digests)) == 4
    for number, one in enumerate(whole.slices):
        rank = KVMemory(SLICED.slice(number), torch.device("cpu"))
        rank.flat.copy_(one.flat)
        assert rank.checksum([0, 2], ALL) == (digests[number],)
    whole.slices[2].values[1][11] += 1  # in block 2
    changed = whole.checksum([0, 2], ALL)
    assert [a == b for a, b in zip(digests, changed, strict=True)] == [True, True, False, True]


def test_tokens_are_copied_in_every_slice() -> None:
    memory = KVMemory(SLICED, torch.device("cpu"))
    memory.flat.zero_()
    for part in (*memory.keys, *memory.values):
        part[4:8] = 1.0
    memory.copy_tokens(1, 2, 3)
    for part in (*memory.keys, *memory.values):
        assert part[:, 0, 0].tolist() == [0.0] * 4 + [1.0] * 4 + [1.0] * 3 + [0.0]
