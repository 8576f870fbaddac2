"""Records: what a block is below the device in each format, there and back."""

from typing import Any

import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from transfer.layout import KVLayout, LayerGeometry
from workers.kv.memory import DTYPES, KVMemory
from workers.kv.records import LARGEST, RecordLayout, Records, quantized, quantized_there, restored, restored_there

LAYERS = (LayerGeometry(2, 8, 8), LayerGeometry(1, 6, 5), LayerGeometry(3, 7, 1))
BLOCKS, SLOTS = 12, 16
LOSSY = sorted(LARGEST)
dtypes = st.sampled_from(sorted(DTYPES))
DIGITS = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""What is lost at most when a number is told in a type, relatively."""


def pool(dtype: str = "float32", seed: int = 0) -> KVMemory:
    """A pool of random numbers of very different sizes."""
    made = KVMemory(KVLayout("model", dtype, 4, LAYERS, BLOCKS), torch.device("cpu"))
    random = torch.Generator().manual_seed(seed)
    for part in (*made.keys, *made.values):
        sizes = 10.0 ** torch.randint(-3, 3, (len(part), 1, 1), generator=random)
        part.copy_(torch.randn(part.shape, generator=random) * sizes)
    return made


def records(memory: KVMemory, form: Any) -> Records:
    return Records(memory, RecordLayout(memory.layout, form), SLOTS)


def blocks_of(memory: KVMemory) -> list[torch.Tensor]:
    """Every region as float32 `[num_blocks, block_size, kv_heads, size]`."""
    return [part.float().unflatten(0, (BLOCKS, -1)) for part in (*memory.keys, *memory.values)]


def round_trip(memory: KVMemory, form: Any, blocks: list[int], slots: list[int]) -> list[torch.Tensor]:
    """Save blocks, spoil the pool, load them again, and return what it has then."""
    made = records(memory, form)
    made.rows[:] = 0xAA
    made.save(blocks, slots)
    assert (made.rows[[slot for slot in range(SLOTS) if slot not in slots]] == 0xAA).all()
    memory.flat.fill_(0xFF)
    made.load(slots, blocks)
    return blocks_of(memory)


places = st.permutations(range(SLOTS)).map(lambda slots: slots[:BLOCKS])
some = st.tuples(st.permutations(range(BLOCKS)), places, st.integers(1, BLOCKS))


@given(dtypes, some, st.integers(0, 5))
def test_exact_is_byte_for_byte(dtype: str, where: Any, seed: int) -> None:
    """In whatever runs blocks and slots come."""
    memory = pool(dtype, seed)
    blocks, slots = where[0][: where[2]], where[1][: where[2]]
    before = blocks_of(memory)
    whole = [memory.flat[one.offset :][: one.block_bytes * BLOCKS].view(BLOCKS, -1) for one in memory.layout.regions()]
    expected = torch.cat([one[blocks] for one in whole], dim=1).numpy().copy()
    made = records(memory, "exact")
    made.save(blocks, slots)
    assert made.rows.shape == (SLOTS, memory.layout.block_bytes)
    assert (made.rows[slots] == expected).all()
    for was, now in zip(before, round_trip(memory, "exact", blocks, slots), strict=True):
        assert torch.equal(was[blocks], now[blocks])


@pytest.mark.parametrize("form", LOSSY)
@given(dtype=dtypes, where=some, seed=st.integers(0, 5))
def test_lossy_formats_lose_little(form: str, dtype: str, where: Any, seed: int) -> None:
    """Half a step of int8; half a step of three digits of float8, or of its smallest number."""
    memory = pool(dtype, seed)
    blocks, slots = where[0][: where[2]], where[1][: where[2]]
    before = blocks_of(memory)
    after = round_trip(memory, form, blocks, slots)
    for was, now in zip(before, after, strict=True):
        was, now = was[blocks], now[blocks]
        scale = was.abs().amax((1, 3), keepdim=True) / LARGEST[form]
        step = scale if form == "int8" else torch.maximum(was.abs() / 8, scale * 2.0**-9)
        assert ((was - now).abs() <= 0.5001 * step + DIGITS[dtype] * was.abs() * 1.01).all()
    others = [block for block in range(BLOCKS) if block not in blocks]
    assert (memory.keys[0].unflatten(0, (BLOCKS, -1))[others].isnan()).all()


@pytest.mark.parametrize("form", LOSSY)
def test_runs_do_not_matter(form: str) -> None:
    memory = pool()
    one, other = records(memory, form), records(memory, form)
    one.save([2, 3, 4, 9], [0, 1, 2, 3])
    for block, slot in ((9, 3), (3, 1), (4, 2), (2, 0)):
        other.save([block], [slot])
    assert (one.rows[:4] == other.rows[:4]).all()


@pytest.mark.parametrize("form", LOSSY)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_zeros_stay_zeros(form: str, dtype: str) -> None:
    """Blocks of zeros, and heads of zeros beside others."""
    memory = pool(dtype)
    memory.keys[0][:, 1] = 0
    memory.values[2][4:8] = 0
    after = round_trip(memory, form, list(range(BLOCKS)), list(range(BLOCKS)))
    assert not any(one.isnan().any() for one in after)
    keys, values = after[0], after[len(LAYERS) + 2]
    assert (keys[:, :, 1] == 0).all()
    assert (keys[:, :, 0].abs().amax((1, 2)) > 0).all()
    assert (values[1] == 0).all()


numbers = npst.arrays(
    np.float32, (2, 3, 2, 4), elements=st.floats(-(2.0**100), 2.0**100, width=32), fill=st.just(np.float32(0))
)


@pytest.mark.parametrize("form", LOSSY)
@given(values=numbers)
def test_whatever_is_finite_comes_back_finite(form: str, values: np.ndarray) -> None:
    """And the largest of a head as it was, unless it is next to nothing."""
    back = restored(*quantized(values, form), form)
    assert np.isfinite(back).all()
    largest = np.abs(values).max(axis=(1, 3))
    np.testing.assert_allclose(np.abs(back).max(axis=(1, 3)), largest, rtol=1e-6, atol=1e-35)
    assert (np.abs(values - back) <= largest[:, None, :, None] / (250 if form == "int8" else 28) + 1e-35).all()


@pytest.mark.parametrize("form", LOSSY)
@pytest.mark.parametrize("tiny", [1e-45, 2.7e-43, 1e-40, 1.4e-37, 1.5e-36, 1e-35])
def test_next_to_nothing_is_nothing_or_itself(form: str, tiny: float) -> None:
    """Where the inverse of a scale would be infinite, or its last digits are lost."""
    values = np.full((1, 2, 1, 3), tiny, np.float32)
    values[0, 0] = 0
    back = restored(*quantized(values, form), form)
    assert (back[0, 0] == 0).all()
    assert (back[0, 1] == 0).all() or np.allclose(back, values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", LOSSY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_becomes_a_number(form: str, bad: float) -> None:
    values = np.ones((2, 3, 2, 4), np.float32)
    values[1, 2, 0, 3] = bad
    back = restored(*quantized(values, form), form)
    assert not np.isfinite(back[1, :, 0]).any()
    assert (back[0] == 1).all()
    assert (back[1, :, 1] == 1).all()


@pytest.mark.parametrize("form", LOSSY)
@given(values=numbers)
def test_other_devices_do_the_same(form: str, values: np.ndarray) -> None:
    """Also that codes of fp8 are those of PyTorch."""
    scales, codes = quantized(values, form)
    there = quantized_there(torch.from_numpy(values), form)
    assert (scales == there[0].numpy()).all()
    assert (codes == there[1].numpy()).all()
    assert (restored(scales, codes, form) == restored_there(*there, form).numpy()).all()


def test_float8_is_rounded_as_pytorch_does() -> None:
    """Every number between the smallest and the largest that differs in its first 12 bits; the largest makes the scale
    one."""
    bits = np.arange(0, 1 << 31, 1 << 17, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.append(values[values <= 448], np.float32(448))
    both = np.concatenate((values, -values))[None, :, None, None]
    scales, codes = quantized(both, "fp8")
    assert (scales == 1).all()
    assert (codes.ravel() == torch.from_numpy(both).to(torch.float8_e4m3fn).view(torch.uint8).numpy().ravel()).all()


def test_sizes_and_fingerprints() -> None:
    layout = KVLayout("model", "float32", 4, LAYERS, BLOCKS)
    values = sum(one.kv_heads * (one.key_size + one.value_size) for one in LAYERS) * 4
    exact, *lossy = (RecordLayout(layout, form) for form in ("exact", "int8", "fp8"))
    assert (exact.record_bytes, exact.fingerprint) == (layout.block_bytes, layout.fingerprint)
    assert [one.record_bytes for one in lossy] == [values + 4 * 2 * 6] * 2
    assert len({exact.fingerprint, *(one.fingerprint for one in lossy)}) == 3
    assert all(len(one.fingerprint) <= 64 for one in lossy)
