"""KVMemory: the bytes behind the block pool, and views of them by layer.

One flat allocation in the layout of `transfer.layout`, so that it is registered with the transport once and a run of
consecutive blocks is one contiguous piece of every region.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import xxhash

from transfer.channel import Layers
from transfer.layout import KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive ids as (first, count), in order."""
    start = previous = None
    for block in blocks:
        if start is None or previous is None or block != previous + 1:
            if start is not None and previous is not None:
                yield start, previous - start + 1
            start = block
        previous = block
    if start is not None and previous is not None:
        yield start, previous - start + 1


class KVMemory:
    """`keys[layer]` and `values[layer]` are views `[num_blocks * block_size, kv_heads, size]` of one allocation.

    A pool of several slices of the heads is one behind the other of the pools of its `slices`, and `keys` and `values`
    are theirs: the layers of one slice after those of the other. `flat` is the allocation, where there is one already.
    """

    def __init__(self, layout: KVLayout, device: torch.device, flat: torch.Tensor | None = None) -> None:
        self.layout = layout
        self.flat = torch.empty(layout.total_bytes, dtype=torch.uint8, device=device) if flat is None else flat
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.slices: list[KVMemory] = [self]
        if layout.shard.count > 1:
            self._cut()
            return
        self._regions = layout.regions()
        slots = layout.num_blocks * layout.block_size
        regions = iter(self._regions)
        for geometry in layout.layers:
            for views, size in ((self.keys, geometry.key_size), (self.values, geometry.value_size)):
                region = next(regions)
                piece = self.flat[region.offset : region.offset + region.block_bytes * layout.num_blocks]
                views.append(piece.view(DTYPES[layout.dtype]).view(slots, geometry.kv_heads, size))

    def _cut(self) -> None:
        pieces = self.flat.chunk(self.layout.shard.count)
        self.slices = [KVMemory(self.layout.slice(i), self.flat.device, piece) for i, piece in enumerate(pieces)]
        for one in self.slices:
            self.keys += one.keys
            self.values += one.values

    def copy_tokens(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of block `source` to block `target`, all layers."""
        size = self.layout.block_size
        for part in (*self.keys, *self.values):
            part[target * size : target * size + tokens] = part[source * size : source * size + tokens]

    def checksum(self, blocks: Sequence[int], layers: Layers) -> tuple[int, ...]:
        """For each slice xxh3-64 over these layers of the blocks, region by region, in the given order; does not depend
        on how ids run."""
        return tuple(one._digest(blocks, layers) for one in self.slices)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.layout.layers)

    def size(self, blocks: int, layers: Layers) -> int:
        """Bytes of these layers of so many blocks."""
        begin, end = layers
        tokens = replace(self.layout, layers=self.layout.layers[begin:end])
        return blocks * tokens.block_bytes

    def _digest(self, blocks: Sequence[int], layers: Layers) -> int:
        digest = xxhash.xxh3_64()
        pieces = list(runs(blocks))
        begin, end = layers
        for region in self._regions[2 * begin : 2 * end]:
            for first, count in pieces:
                start = region.offset + first * region.block_bytes
                digest.update(self._bytes(start, count * region.block_bytes))
        return digest.intdigest()

    def _bytes(self, start: int, length: int) -> memoryview | bytes:
        if self.flat.is_cuda:
            return self.flat[start : start + length].cpu().numpy().tobytes()
        return memoryview((ctypes.c_char * length).from_address(self.flat.data_ptr() + start))
