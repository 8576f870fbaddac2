"""The geometry of a pool: its regions, its fingerprint, and how two pools differ."""

import dataclasses
import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from transfer.layout import DTYPE_BYTES, KVLayout, LayerGeometry
from workers.kv.memory import DTYPES, KVMemory, runs

ONE = KVLayout("model", "float32", 4, (LayerGeometry(2, 8, 8), LayerGeometry(1, 6, 5)), 3)
ALL = (0, len(ONE.layers))
geometries = st.builds(LayerGeometry, st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
layouts = st.builds(
    KVLayout,
    st.just("model"),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.integers(1, 5),
    st.lists(geometries, min_size=1, max_size=4).map(tuple),
    st.integers(1, 6),
)


@given(layouts)
def test_regions_tile_the_pool(layout: KVLayout) -> None:
    end = 0
    for region in layout.regions():
        assert region.offset == end
        end += region.block_bytes * layout.num_blocks
    assert end == layout.total_bytes == layout.block_bytes * layout.num_blocks
    assert len(layout.regions()) == 2 * len(layout.layers)
    assert layout.block_bytes == layout.token_bytes * layout.block_size


@given(layouts)
def test_views_cover_every_byte_once(layout: KVLayout) -> None:
    memory = KVMemory(layout, torch.device("cpu"))
    memory.flat.zero_()
    for part in (*memory.keys, *memory.values):
        part += 1
    assert (memory.flat.view(DTYPES[layout.dtype]) == 1).all()
    slots = layout.num_blocks * layout.block_size
    for geometry, keys, values in zip(layout.layers, memory.keys, memory.values, strict=True):
        assert keys.shape == (slots, geometry.kv_heads, geometry.key_size)
        assert values.shape == (slots, geometry.kv_heads, geometry.value_size)


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
