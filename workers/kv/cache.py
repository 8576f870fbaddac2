"""KVCache: blocks for sequences. It ties the pool, the radix tree and the sequences' block tables together."""

from __future__ import annotations

from collections.abc import Iterable

from workers.kv.pool import CACHED, QUARANTINED, BlockPool
from workers.kv.radix import Match, RadixCache
from workers.sequence import Sequence

GROWTH_BLOCKS = 4
"""Blocks a growing sequence takes at a time, so that its table stays in runs."""


class KVCache:
    """Admission, growth, sharing and release of block tables. With `reuse` off nothing is kept or found."""

    def __init__(self, num_blocks: int, block_size: int, reuse: bool = True) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.radix = RadixCache(block_size)
        self._reuse = reuse

    @property
    def available(self) -> int:
        """Blocks that are free or can be freed by eviction."""
        return self.pool.free + self.radix.evictable

    def counts(self) -> dict[str, int]:
        """Blocks: total, free, cached, pinned (of the cached ones), private, quarantined."""
        counts = self.pool.counts()
        return {"total": self.pool.total, **counts, "pinned": self.radix.pinned}

    def admit(self, sequence: Sequence, tokens: int, whole: bool = False) -> bool:
        """Match, pin and allocate in one step, so that the table covers `tokens` tokens; False, and nothing changed,
        when the blocks cannot be found. `whole` allows the match to cover the whole prompt; otherwise at least its
        last token is left to compute."""
        match = self._match(sequence, sequence.length if whole else sequence.length - 1)
        if match:
            self.radix.pin(match.node)
        matched = match.blocks if match else []
        need = self._blocks_for(tokens) - len(matched)
        if need > self.available:
            if match:
                self.radix.unpin(match.node)
            return False
        sequence.node = match.node if match else None
        sequence.shared_blocks = len(matched)
        sequence.blocks = matched + self._take(need, matched[-1] if matched else None)
        sequence.computed = len(matched) * self.block_size
        return True

    def missing(self, sequence: Sequence) -> int:
        """Tokens that would have to be computed if the sequence were admitted now."""
        match = self._match(sequence, sequence.length - 1)
        return sequence.length - (len(match.blocks) * self.block_size if match else 0)

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Extend the table to cover `tokens` tokens; False when there are no blocks to be had."""
        need = self._blocks_for(tokens) - len(sequence.blocks)
        if need <= 0:
            return True
        if need > self.available:
            return False
        ahead = self._blocks_for(sequence.final_length) - len(sequence.blocks)
        count = max(need, min(GROWTH_BLOCKS, ahead, self.pool.free))
        sequence.blocks += self._take(count, sequence.blocks[-1] if sequence.blocks else None)
        return True

    def commit(self, sequence: Sequence) -> None:
        """Share the whole blocks computed so far. Blocks that another sequence has meanwhile shared under other ids
        are replaced in the table before the duplicates are freed."""
        whole = sequence.computed // self.block_size
        if not self._reuse or whole <= sequence.shared_blocks:
            return
        tokens = sequence.packed(whole * self.block_size)
        done = self.radix.insert(sequence.salt, tokens, sequence.blocks[:whole])
        self.pool.adopt(done.adopted)
        self.radix.pin(done.node)
        if sequence.node is not None:
            self.radix.unpin(sequence.node)
        sequence.node = done.node
        sequence.blocks[:whole] = done.blocks
        sequence.shared_blocks = whole
        self.pool.release(done.duplicates)

    def release(self, sequence: Sequence, quarantine: Iterable[int] = ()) -> list[int]:
        """Give up a sequence's table: unpin what it shares, free the rest. Private blocks listed in `quarantine` are
        kept from reuse and returned; free them with `end_quarantine`."""
        kept = set(quarantine)
        private = sequence.blocks[sequence.shared_blocks :]
        held = [block for block in private if block in kept]
        self.pool.quarantine(held)
        self.pool.release([block for block in private if block not in kept])
        if sequence.node is not None:
            self.radix.unpin(sequence.node)
        sequence.node, sequence.blocks, sequence.shared_blocks, sequence.computed = None, [], 0, 0
        return held

    def end_quarantine(self, blocks: list[int]) -> None:
        """No peer can write to these blocks any more."""
        self.pool.release(blocks, QUARANTINED)

    def clear(self) -> None:
        """Forget everything that no pin holds."""
        self.pool.release(self.radix.evict(self.radix.evictable), CACHED)

    def _match(self, sequence: Sequence, tokens: int) -> Match | None:
        """The longest cached prefix within the first `tokens` tokens; None with reuse off."""
        if not self._reuse:
            return None
        return self.radix.match(sequence.salt, sequence.packed(tokens // self.block_size * self.block_size))

    def _take(self, count: int, after: int | None) -> list[int]:
        short = count - self.pool.free
        if short > 0:
            self.pool.release(self.radix.evict(short), CACHED)
        return self.pool.allocate(count, after)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
