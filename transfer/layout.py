"""KVLayout: the geometry of a KV pool and its fingerprint.

The pool is layer-major: for each layer a region of keys `[num_blocks, block_size, kv_heads, key_size]`, then one of
values `[num_blocks, block_size, kv_heads, value_size]`, all in one allocation, so that a run of consecutive blocks is
one contiguous piece of each region.

Where workers of different parallelism exchange blocks, the KV heads of the model are cut into slices, the same ones in
the whole cluster, and a pool is slice-major: for each slice that it holds all of these regions, with the slice's heads.
So what one rank has and another one wants lies in pieces of the same size on both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Slices = tuple[int, int]
"""Consecutive slices of the KV heads `[begin, end)`, of all that the model has."""


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer's keys and values: `kv_heads` heads of `key_size` and `value_size` elements."""

    kv_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What of the model's KV heads a pool holds: the slices `[first, first + count)` of `of` equal ones. Raises
    ValueError where there are no such slices."""

    first: int = 0
    count: int = 1
    of: int = 1

    def __post_init__(self) -> None:
        if self.first < 0 or self.count < 1 or self.first + self.count > self.of:
            raise ValueError(f"shard: there are no {self.count} slices from {self.first} on of {self.of}")

    @classmethod
    def of_rank(cls, rank: int, size: int, of: int) -> Shard:
        """What a rank holds in a gang of `size`, which divides `of` or is a multiple of it. Then a slice is held by
        several ranks, consecutive ones."""
        if of % size and size % of:
            raise ValueError(f"shard: {size} ranks cannot share {of} slices equally")
        return cls(rank * of // size, max(1, of // size), of)

    @property
    def slices(self) -> range:
        """The numbers of its slices."""
        return range(self.first, self.first + self.count)


def slices_for(sizes: Iterable[int], kv_heads: Iterable[int]) -> int:
    """Into how many slices the KV heads of layers, so many each, have to be cut, so that every rank of gangs of these
    sizes holds whole slices. A gang of more ranks than a layer has heads holds each head several times. Raises
    ValueError where that is impossible."""
    sizes, heads = set(sizes), set(kv_heads)
    least = min(heads)
    for size in sorted(sizes):
        if any(count % size for count in heads) and (heads != {least} or size % least):
            told = " or ".join(map(str, sorted(heads)))
            raise ValueError(f"tensor parallelism: {size} ranks cannot share the {told} KV heads of a layer equally")
    return math.lcm(*(min(size, least) for size in sizes))


@dataclass(frozen=True, slots=True)
class Region:
    """One layer's keys or values inside the pool: where it starts and how many bytes a block has there."""

    offset: int
    block_bytes: int


WHOLE = Shard()
"""All heads, in one slice."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of a pool. `model` identifies the weights, `block_size` is in tokens. `layers` are what the pool holds,
    which is the model's `shard`. Raises ValueError when slices of it would have parts of heads."""

    model: str
    dtype: str
    block_size: int
    layers: tuple[LayerGeometry, ...]
    num_blocks: int
    shard: Shard = WHOLE

    def __post_init__(self) -> None:
        count = self.shard.count
        for number, geometry in enumerate(self.layers):
            if geometry.kv_heads % count:
                raise ValueError(f"layers: {geometry.kv_heads} KV heads of layer {number} are not {count} equal slices")

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token, over all layers."""
        return sum(g.kv_heads * (g.key_size + g.value_size) for g in self.layers) * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of KV per block, over all layers."""
        return self.token_bytes * self.block_size

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.block_bytes * self.num_blocks

    @property
    def whole(self) -> KVLayout:
        """The layout of a pool of as many blocks that holds all of the model's slices."""
        of = self.shard.of
        return self if self.shard.count == of else self._with(self.shard.count, of, Shard(0, of, of))

    def slice(self, index: int) -> KVLayout:
        """The layout of the pool's slice number `index`, by itself."""
        shard = self.shard
        return self if shard.count == 1 else self._with(shard.count, 1, Shard(shard.first + index, 1, shard.of))

    @property
    def fingerprint(self) -> str:
        """Equal for two pools exactly when a block of one means the same in the other; pool sizes, what of the heads
        they hold and how these are cut may differ."""
        text = repr((self.model, self.dtype, self.block_size, self.whole.layers))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def regions(self) -> list[Region]:
        """Keys and values of every layer, in memory order: `2 * len(layers)` regions for each slice."""
        regions, offset = [], 0
        for index in range(self.shard.count):
            for geometry in self.slice(index).layers:
                for size in (geometry.key_size, geometry.value_size):
                    block_bytes = self.block_size * geometry.kv_heads * size * DTYPE_BYTES[self.dtype]
                    regions.append(Region(offset, block_bytes))
                    offset += block_bytes * self.num_blocks
        return regions

    def difference(self, other: KVLayout) -> str | None:
        """The first field in which two layouts are incompatible, with both values; None when they fit, whatever of the
        heads they hold."""
        mine, theirs = self.whole, other.whole
        for name in ("model", "dtype", "block_size", "layers"):
            if getattr(mine, name) != getattr(theirs, name):
                return f"{name}: {getattr(mine, name)} here, {getattr(theirs, name)} there"
        if mine.shard != theirs.shard:
            return f"shard.of: {mine.shard.of} slices of the KV heads here, {theirs.shard.of} there"
        return None

    def to_tuple(self) -> tuple[Any, ...]:
        """Plain values for a message."""
        layers = tuple((g.kv_heads, g.key_size, g.value_size) for g in self.layers)
        shard = (self.shard.first, self.shard.count, self.shard.of)
        return (self.model, self.dtype, self.block_size, layers, self.num_blocks, shard)

    @classmethod
    def from_tuple(cls, values: tuple[Any, ...]) -> KVLayout:
        """The inverse of `to_tuple`."""
        model, dtype, block_size, layers, num_blocks, shard = values
        return cls(model, dtype, block_size, tuple(LayerGeometry(*g) for g in layers), num_blocks, Shard(*shard))

    def _with(self, count: int, wanted: int, shard: Shard) -> KVLayout:
        """With `wanted` instead of `count` slices' heads."""
        layers = tuple(replace(one, kv_heads=one.kv_heads // count * wanted) for one in self.layers)
        return replace(self, layers=layers, shard=shard)
