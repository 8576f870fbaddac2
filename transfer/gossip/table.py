"""SummaryTable: which keys each of many workers has, in memory that is bounded and known beforehand.

One row a worker: an open-addressed hash table of 64-bit keys with linear probing, at most half full, from which keys
are deleted by shifting back (Knuth, vol. 3, 6.4, algorithm R), so that it never fills up with tombstones. A row of its
own for each worker keeps what one worker says from slowing down or displacing what others say. numba compiles the loops
when this module is imported, which only a process with a router does, and files the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types

from transfer.gossip.summary import DEVICE, HOST, digest

_CHUNK = 64
"""Rows allocated at once. Rows never move, so growing copies nothing."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_NONE = np.uint64(0)


class SummaryTable:
    """Rows of up to `keys_per_row` keys, numbered from 0. Key 0 means none and is never there."""

    def __init__(self, keys_per_row: int) -> None:
        self.keys_per_row = keys_per_row
        self.rows = 0
        self.counts: list[int] = []
        """Keys in each row."""
        self._bits = max(1, (2 * keys_per_row - 1).bit_length())
        self._chunks: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def row_bytes(self) -> int:
        """Memory that a row takes, however full it is."""
        return 9 << self._bits

    @property
    def nbytes(self) -> int:
        """Memory that the table has allocated."""
        return len(self._chunks) * _CHUNK * self.row_bytes

    def new_row(self) -> int:
        """One more row, empty; its number."""
        if self.rows == len(self._chunks) * _CHUNK:
            shape = (_CHUNK, 1 << self._bits)
            self._chunks.append((np.zeros(shape, np.uint64), np.zeros(shape, np.uint8)))
        self.counts.append(0)
        self.rows += 1
        return self.rows - 1

    def add(self, row: int, keys: np.ndarray, tiers: np.ndarray) -> tuple[int, int]:
        """Add '<u8' keys with a uint8 tier each; a key that is there changes its tier. Stops at the first that does not
        fit. Returns how many of `keys` it has dealt with and by how much the digest of the row has grown."""
        done, new, grown = _add(*self._row(row), keys, tiers, self.keys_per_row - self.counts[row])
        self.counts[row] += new
        return done, grown

    def remove(self, row: int, keys: np.ndarray) -> int:
        """Remove those of the keys that are there. Returns by how much the digest of the row has grown."""
        gone, grown = _remove(*self._row(row), keys)
        self.counts[row] -= gone
        return int(grown)

    def clear(self, row: int) -> None:
        """Empty a row."""
        keys, _ = self._row(row)
        keys.fill(0)
        self.counts[row] = 0

    def items(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The keys of a row and their tiers, in no order."""
        keys, tiers = self._row(row)
        there = np.flatnonzero(keys)
        return keys[there], tiers[there]

    def digest(self, row: int) -> int:
        """The digest of a row, computed anew."""
        return digest(*self.items(row))

    def depths(self, keys: np.ndarray) -> np.ndarray:
        """int32 `[rows]`: how many of the leading '<u8' keys each row has. A row that has a key must have those before
        it, as sets that are closed under prefix do: it is found by binary search."""
        found = np.empty(self.rows, np.int32)
        for number, (chunk, _) in enumerate(self._chunks):
            _depths(chunk, keys, found[number * _CHUNK : (number + 1) * _CHUNK])
        return found

    def tier(self, row: int, key: int) -> int | None:
        """The tier of a key; None where the row does not have it."""
        keys, tiers = self._row(row)
        slot = _slot(keys, np.uint64(key))
        return int(tiers[slot]) if key and keys[slot] == key else None

    def device_depths(self, keys: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """int32 `[rows]`: of the leading keys that each row has (its `depths`), how many it has on the device. What is
        before a key on the device must be there, too."""
        found = np.empty(self.rows, np.int32)
        for number, (chunk, tiers) in enumerate(self._chunks):
            part = slice(number * _CHUNK, (number + 1) * _CHUNK)
            _device_depths(chunk, tiers, keys, depths[part], found[part])
        return found

    def tiers(self, row: int, keys: np.ndarray, depth: int) -> tuple[int, int]:
        """The same of one row, and how many of the others it has in host memory. Of the lower tiers none need be closed
        under prefix."""
        device, host = _tiers(*self._row(row), keys, depth)
        return device, host

    def _row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        keys, tiers = self._chunks[row // _CHUNK]
        return keys[row % _CHUNK], tiers[row % _CHUNK]


_KEY, _TIER, _COUNT = types.uint64, types.uint8, types.int64
_ROW, _ROWS, _TIERS, _TIER_ROWS, _DEPTHS = _KEY[::1], _KEY[:, ::1], _TIER[::1], _TIER[:, ::1], types.int32[::1]
# Read-only arrays, which views of messages are, have a type of their own, into which others are converted.
_KEYS, _NEW_TIERS = (types.Array(kind, 1, "C", readonly=True) for kind in (_KEY, _TIER))


def _compiled(*signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for one signature, (result, arguments), or take it from numba's cache. All that it calls is in
    this file, whose time stamp the cache compares. Where numba finds no directory that can be written, it compiles in
    every process."""

    def compiled(function: Callable[..., Any]) -> Any:
        result, *arguments = signature
        try:
            return njit(result(*arguments), cache=True)(function)
        except RuntimeError:
            return njit(result(*arguments))(function)

    return compiled


@_compiled(_KEY, _KEY)
def _mixed(key):  # type: ignore[no-untyped-def]
    """As `summary.mixed`."""
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


@_compiled(_KEY, _KEY, _TIER)
def _weight(key, tier):  # type: ignore[no-untyped-def]
    return _mixed(key) * (np.uint64(2) * np.uint64(tier) + np.uint64(1))


@_compiled(_COUNT, _KEY, _COUNT)
def _home(key, mask):  # type: ignore[no-untyped-def]
    """Where a key would be if no other were in its way: keys that somebody chose do not cluster."""
    spread = key * _SPREAD
    return np.int64((spread >> np.uint64(32)) & np.uint64(mask))


@_compiled(_COUNT, _ROW, _KEY)
def _slot(table, key):  # type: ignore[no-untyped-def]
    """Where a key is, or the free slot where it would go."""
    mask = len(table) - 1
    slot = _home(key, mask)
    while table[slot] != key and table[slot] != _NONE:
        slot = (slot + 1) & mask
    return slot


@_compiled(types.Tuple((_COUNT, _COUNT, _KEY)), _ROW, _TIERS, _KEYS, _NEW_TIERS, _COUNT)
def _add(table, tiers, keys, new_tiers, room):  # type: ignore[no-untyped-def]
    grown, new = np.uint64(0), 0
    for index in range(len(keys)):
        key = keys[index]
        if key == _NONE:
            continue
        slot = _slot(table, key)
        if table[slot] == key:
            grown -= _weight(key, tiers[slot])
        elif new == room:
            return index, new, grown
        else:
            table[slot] = key
            new += 1
        tiers[slot] = new_tiers[index]
        grown += _weight(key, tiers[slot])
    return len(keys), new, grown


@_compiled(types.Tuple((_COUNT, _KEY)), _ROW, _TIERS, _KEYS)
def _remove(table, tiers, keys):  # type: ignore[no-untyped-def]
    mask = len(table) - 1
    grown, gone = np.uint64(0), 0
    for key in keys:
        hole = _slot(table, key)
        if table[hole] == _NONE:
            continue
        grown -= _weight(key, tiers[hole])
        gone += 1
        at = (hole + 1) & mask
        while table[at] != _NONE:
            # What is at `at` may move into the hole unless its home lies behind the hole.
            if ((at - _home(table[at], mask)) & mask) >= ((at - hole) & mask):
                table[hole], tiers[hole] = table[at], tiers[at]
                hole = at
            at = (at + 1) & mask
        table[hole] = _NONE
    return gone, grown


@_compiled(types.void, _ROWS, _KEYS, _DEPTHS)
def _depths(tables, keys, found):  # type: ignore[no-untyped-def]
    for row in range(len(found)):
        table = tables[row]
        low, high = 0, len(keys)  # it has `low` keys and not as many as `high + 1`
        middle = min(1, high)  # most rows do not even have the first
        while low < high:
            key = keys[middle - 1]
            if key != _NONE and table[_slot(table, key)] == key:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        found[row] = low


@_compiled(_COUNT, _ROW, _TIERS, _KEYS, _COUNT)
def _on_device(table, tiers, keys, depth):  # type: ignore[no-untyped-def]
    low, high = 0, depth
    middle = high  # most prefixes are in one tier to their end
    while low < high:
        if tiers[_slot(table, keys[middle - 1])] == DEVICE:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low


@_compiled(types.void, _ROWS, _TIER_ROWS, _KEYS, _DEPTHS, _DEPTHS)
def _device_depths(tables, tiers, keys, depths, found):  # type: ignore[no-untyped-def]
    for row in range(len(found)):
        found[row] = _on_device(tables[row], tiers[row], keys, depths[row])


@_compiled(types.Tuple((_COUNT, _COUNT)), _ROW, _TIERS, _KEYS, _COUNT)
def _tiers(table, tiers, keys, depth):  # type: ignore[no-untyped-def]
    device, host = _on_device(table, tiers, keys, depth), 0
    for index in range(device, depth):
        host += tiers[_slot(table, keys[index])] == HOST
    return device, host
