"""Records: what blocks are below the device, and copying them there and back.

A record is one block, with all KV heads, and the same into how many slices they are cut. In the format `exact` it has
the block's bytes, the layers one after the other. In a lossy format it begins with one float32 scale for each KV head
of each region (a layer's keys or values), and has then, region by region, a byte for each value: int8 or float8 (e4m3),
which times its head's scale is about the value. A head's largest absolute value becomes the largest number that the
format has; a head of zeros has the scale 0. A head with a value that is not finite comes back as NaN.

In host memory NumPy does the arithmetic, in the one thread that calls it: PyTorch would take the cores on which an
engine computes. On another device PyTorch does it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from transfer.layout import DTYPE_BYTES, KVLayout
from workers.config import StartError, TierFormat
from workers.kv.memory import DTYPES, KVMemory, runs

LARGEST = {"int8": 127.0, "fp8": 448.0}
"""The largest number of a lossy format."""
_SCALE_BYTES = 4
_LEAST_SCALE = float(np.finfo(np.float32).tiny)
"""Values of a head that would need a smaller scale are taken to be zero: its inverse could not be told."""
_TO_FLOAT8 = 2.0**-120
"""Between the exponents of float8 and float32: a float8 times this has its bits at the top of a float32, also where it
is subnormal."""
_FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""The number of each code."""


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """How blocks of a pool, which holds all slices, look in a format."""

    layout: KVLayout
    format: TierFormat

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        if self.format == "exact":
            return self.layout.block_bytes
        heads = sum(2 * one.kv_heads for one in self.layout.layers)
        return _SCALE_BYTES * heads + self.layout.block_bytes // DTYPE_BYTES[self.layout.dtype]

    @property
    def fingerprint(self) -> str:
        """Equal for two of them exactly when a record of one means the same in the other."""
        return self.layout.fingerprint if self.format == "exact" else f"{self.layout.fingerprint}-{self.format}"


class Records:
    """Host memory for so many records of a pool's blocks: `rows`, uint8 `[slots, record_bytes]`, where there is none
    yet. A pool that does not hold all slices saves and loads its part of a record. Raises StartError."""

    def __init__(self, memory: KVMemory, records: RecordLayout, slots: int, rows: np.ndarray | None = None) -> None:
        self.rows = _rows(memory, records, slots) if rows is None else rows
        numbered = zip(memory.layout.shard.slices, memory.slices, strict=True)
        self._parts = [part for number, one in numbered for part in _parts(one, records, number)]

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks of the pool to slots."""
        for block, slot, count in _paired(blocks, slots):
            for part in self._parts:
                part.save(block, self.rows[slot : slot + count])

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """The inverse of `save`, as far as the format allows."""
        for block, slot, count in _paired(blocks, slots):
            for part in self._parts:
                part.load(self.rows[slot : slot + count], block)


def _rows(memory: KVMemory, records: RecordLayout, slots: int) -> np.ndarray:
    shape = slots, records.record_bytes
    try:
        rows: np.ndarray = torch.empty(shape, dtype=torch.uint8, pin_memory=memory.flat.is_cuda).numpy()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise StartError(f"tiers.host: cannot have {slots * records.record_bytes} bytes: {reason}") from None
    return rows


def _paired(ones: Sequence[int], others: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where two lists of ids run on together: (first of one, first of the other, count)."""
    at = 0
    for first, count in runs(ones):
        for other, length in runs(others[at : at + count]):
            yield first, other, length
            first += length
        at += count


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one slice's heads of a region, slice number `number` of `of`, are in a record: among the region's `scales`
    and `values`."""

    scales: slice
    values: slice
    number: int
    of: int

    def scales_in(self, rows: np.ndarray) -> np.ndarray:
        """Float32 `[n, heads]`."""
        scales: np.ndarray = rows[:, self.scales].view(np.float32).reshape(len(rows), self.of, -1)
        return scales[:, self.number]

    def values_in(self, rows: np.ndarray, tokens: int) -> np.ndarray:
        """Bytes `[n, tokens, a token's bytes]`."""
        return rows[:, self.values].reshape(len(rows), tokens, self.of, -1)[:, :, self.number]


class _Exact:
    """One region of a pool of one slice, uint8 `[num_blocks, block_size, a token's bytes]`, and its place in a
    record."""

    def __init__(self, pool: torch.Tensor, place: _Place) -> None:
        self._pool = pool
        self._host = None if pool.is_cuda else pool.numpy()
        self._place = place

    def save(self, first: int, rows: np.ndarray) -> None:
        """Copy the blocks from `first` on to rows."""
        blocks = slice(first, first + len(rows))
        values = self._pool[blocks].cpu().numpy() if self._host is None else self._host[blocks]
        np.copyto(self._place.values_in(rows, self._pool.shape[1]), values)

    def load(self, rows: np.ndarray, first: int) -> None:
        """The inverse."""
        blocks = slice(first, first + len(rows))
        values = self._place.values_in(rows, self._pool.shape[1])
        if self._host is None:
            self._pool[blocks] = torch.from_numpy(np.ascontiguousarray(values)).to(self._pool.device)
        else:
            np.copyto(self._host[blocks], values)


class _Lossy:
    """One region of a pool of one slice, `[num_blocks, block_size, kv_heads, size]`, and its place in a record."""

    def __init__(self, pool: torch.Tensor, format: str, place: _Place) -> None:
        self._pool = pool
        self._host = None if pool.is_cuda else _host(pool)
        self._format = format
        self._place = place

    def save(self, first: int, rows: np.ndarray) -> None:
        """Copy the blocks from `first` on to rows."""
        blocks = slice(first, first + len(rows))
        if self._host is None:
            scales, codes = (one.cpu().numpy() for one in quantized_there(self._pool[blocks].float(), self._format))
        else:
            scales, codes = quantized(_floats(self._host[blocks]), self._format)
        np.copyto(self._place.scales_in(rows), scales)
        np.copyto(self._place.values_in(rows, codes.shape[1]), codes.reshape(*codes.shape[:2], -1))

    def load(self, rows: np.ndarray, first: int) -> None:
        """The inverse."""
        blocks = slice(first, first + len(rows))
        scales = self._place.scales_in(rows)
        codes = self._place.values_in(rows, self._pool.shape[1]).reshape(-1, *self._pool.shape[1:])
        if self._host is None:
            numbers, factors = (torch.from_numpy(np.ascontiguousarray(one)) for one in (codes, scales))
            device = self._pool.device
            self._pool[blocks] = restored_there(factors.to(device), numbers.to(device), self._format)
        else:
            _store(restored(scales, codes, self._format), self._host[blocks])


def _parts(memory: KVMemory, records: RecordLayout, number: int) -> Iterator[_Exact | _Lossy]:
    """The regions of a pool of one slice, in order; it has slice number `number` of the records'."""
    layout, of = memory.layout, records.layout.shard.of
    heads = [one.kv_heads for one in layout.layers for _ in range(2)]
    scale = 0
    at = 0 if records.format == "exact" else _SCALE_BYTES * of * sum(heads)
    for region, count in zip(layout.regions(), heads, strict=True):
        pool = memory.flat[region.offset : region.offset + region.block_bytes * layout.num_blocks]
        exact = records.format == "exact"
        width = of * (region.block_bytes if exact else region.block_bytes // DTYPE_BYTES[layout.dtype])
        scales = slice(scale, scale + _SCALE_BYTES * of * count)
        place = _Place(scales, slice(at, at + width), number, of)
        if exact:
            yield _Exact(pool.view(layout.num_blocks, layout.block_size, -1), place)
        else:
            values = pool.view(DTYPES[layout.dtype]).view(layout.num_blocks, layout.block_size, count, -1)
            yield _Lossy(values, records.format, place)
        scale, at = scales.stop, at + width


# --- arithmetic in host memory --------------------------------------------------------------------------------------


def quantized(values: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Scales `[n, heads]` and codes, uint8, of float32 values `[n, tokens, heads, size]`."""
    with np.errstate(invalid="ignore"):  # what is not finite
        scales = np.abs(values).max(axis=1).max(axis=-1) / np.float32(LARGEST[format])
        scales[scales < _LEAST_SCALE] = 0
        factors = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
        scaled = values * factors[:, None, :, None]
        codes = np.rint(scaled, out=scaled).astype(np.int8).view(np.uint8) if format == "int8" else _float8(scaled)
    return scales, codes


def restored(scales: np.ndarray, codes: np.ndarray, format: str) -> np.ndarray:
    """The inverse, as far as that goes."""
    values: np.ndarray = codes.view(np.int8).astype(np.float32) if format == "int8" else np.take(_FLOAT8, codes)
    with np.errstate(invalid="ignore"):
        values *= scales[:, None, :, None]
    return values


def _float8(values: np.ndarray) -> np.ndarray:
    """Codes of the nearest numbers of float8 (e4m3), ties to even, of float32 that are at most its largest number."""
    bits = (values * np.float32(_TO_FLOAT8)).view(np.uint32)
    nearest = bits & 0x7FFFFFFF
    nearest += (bits >> 20 & 1) + 0x7FFFF
    nearest >>= 20
    nearest |= bits >> 24 & 0x80
    return nearest.astype(np.uint8)


def _host(pool: torch.Tensor) -> np.ndarray:
    """A pool as an array; NumPy does not have bfloat16: its bits, uint16."""
    array: np.ndarray = pool.view(torch.uint16).numpy() if pool.dtype is torch.bfloat16 else pool.numpy()
    return array


def _floats(values: np.ndarray) -> np.ndarray:
    """Values of an array that `_host` made, as float32."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def _store(values: np.ndarray, out: np.ndarray) -> None:
    """The inverse; ties to even."""
    if out.dtype == np.uint16:
        bits = values.view(np.uint32)
        np.copyto(out, (bits + (bits >> 16 & 1) + 0x7FFF) >> 16, casting="same_kind")
    else:
        np.copyto(out, values, casting="same_kind")


# --- the same on another device -------------------------------------------------------------------------------------


def quantized_there(values: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """See `quantized`."""
    scales = values.abs().amax((1, 3)) / LARGEST[format]
    scales[scales < _LEAST_SCALE] = 0
    factors = torch.where(scales == 0, scales, 1 / scales)
    scaled = values * factors[:, None, :, None]
    codes = scaled.round().to(torch.int8) if format == "int8" else scaled.to(torch.float8_e4m3fn)
    return scales, codes.view(torch.uint8)


def restored_there(scales: torch.Tensor, codes: torch.Tensor, format: str) -> torch.Tensor:
    """See `restored`."""
    numbers = codes.view(torch.int8 if format == "int8" else torch.float8_e4m3fn)
    return numbers.float() * scales[:, None, :, None]
