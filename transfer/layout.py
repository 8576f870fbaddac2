"""KVLayout: the geometry of a KV pool and its fingerprint.

The pool is layer-major: for each layer a region of keys `[num_blocks, block_size, kv_heads, key_size]`, then one of
values `[num_blocks, block_size, kv_heads, value_size]`, all in one allocation, so that a run of consecutive blocks is
one contiguous piece of each region.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer's keys and values: `kv_heads` heads of `key_size` and `value_size` elements."""

    kv_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class Region:
    """One layer's keys or values inside the pool: where it starts and how many bytes a block has there."""

    offset: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of a pool. `model` identifies the weights, `block_size` is in tokens."""

    model: str
    dtype: str
    block_size: int
    layers: tuple[LayerGeometry, ...]
    num_blocks: int

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
    def fingerprint(self) -> str:
        """Equal for two pools exactly when a block of one means the same in the other; pool sizes may differ."""
        text = repr((self.model, self.dtype, self.block_size, self.layers))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def regions(self) -> list[Region]:
        """Keys and values of every layer, in memory order: `2 * len(layers)` regions."""
        regions, offset = [], 0
        for geometry in self.layers:
            for size in (geometry.key_size, geometry.value_size):
                block_bytes = self.block_size * geometry.kv_heads * size * DTYPE_BYTES[self.dtype]
                regions.append(Region(offset, block_bytes))
                offset += block_bytes * self.num_blocks
        return regions

    def difference(self, other: KVLayout) -> str | None:
        """The first field in which two layouts are incompatible, with both values; None when they fit."""
        for name in ("model", "dtype", "block_size", "layers"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine} here, {theirs} there"
        return None

    def to_tuple(self) -> tuple[Any, ...]:
        """Plain values for a message."""
        layers = tuple((g.kv_heads, g.key_size, g.value_size) for g in self.layers)
        return (self.model, self.dtype, self.block_size, layers, self.num_blocks)

    @classmethod
    def from_tuple(cls, values: tuple[Any, ...]) -> KVLayout:
        """The inverse of `to_tuple`."""
        model, dtype, block_size, layers, num_blocks = values
        return cls(model, dtype, block_size, tuple(LayerGeometry(*g) for g in layers), num_blocks)
