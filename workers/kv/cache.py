"""KVCache: blocks for sequences. It ties the pool, the radix tree and the sequences' block tables together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from transfer.messages import CacheStats
from workers.kv.policies import POLICIES
from workers.kv.pool import CACHED, QUARANTINED, BlockPool
from workers.kv.radix import TOKEN_BYTES, Match, Partial, RadixCache, Watcher
from workers.kv.tiers import Tiers
from workers.sequence import Sequence

GROWTH_BLOCKS = 4
"""Blocks a growing sequence takes at a time, so that its table stays in runs."""
CopyTokens = Callable[[int, int, int], None]


class KVCache:
    """Admission, growth, sharing and release of block tables. With `reuse` off nothing is kept or found.

    `copy(source, target, tokens)` copies the KV of a block's first tokens, so that a block that is equal only in part
    can be used; without it such blocks are not. `policy` names one of `workers.kv.policies.POLICIES`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        reuse: bool = True,
        policy: str = "lru",
        copy: CopyTokens | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.radix = RadixCache(block_size, POLICIES[policy](), clock)
        self.stats = CacheStats()
        self.reuse = reuse
        self.tiers: Tiers | None = None
        self._loading: list[Sequence] = []
        self._copy = copy
        self._clock = clock

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` which prefixes are cached; see `RadixCache.watch`."""
        self.radix.watch(watcher)

    @property
    def available(self) -> int:
        """Blocks that are free or can be freed by eviction."""
        return self.pool.free + self.radix.evictable

    @property
    def moving(self) -> bool:
        """Whether `settled` has something to do now or soon."""
        return self.tiers is not None and (bool(self._loading) or self.tiers.busy)

    def counts(self) -> dict[str, int]:
        """Blocks: total, free, cached, pinned (of the cached ones), private, quarantined."""
        counts = self.pool.counts()
        return {"total": self.pool.total, **counts, "pinned": self.radix.pinned}

    def admit(self, sequence: Sequence, tokens: int, whole: bool = False) -> bool:
        """Match, pin and allocate in one step, so that the table covers `tokens` tokens; False, and nothing changed,
        when the blocks cannot be found. `whole` allows the match to cover the whole prompt; otherwise at least its
        last token is left to compute, and a block that is equal in part is copied."""
        match = self._match(sequence, sequence.length if whole else sequence.length - 1)
        matched = match.blocks if match else []
        need = self._blocks_for(tokens) - len(matched)
        if match:
            self.radix.pin(match.node)
        partial = match.partial if match and self._copy and not whole else None
        if partial:
            self.radix.pin(partial.node)
            if need > self.available:
                self.radix.unpin(partial.node)
                partial = None
        if need > self.available:
            if match:
                self.radix.unpin(match.node)
            return False
        if match and sequence.cached_tokens is None:
            self.radix.touch(match.node)  # once a request, however often it is pushed back
        sequence.node = match.node if match else None
        sequence.shared_blocks = len(matched)
        sequence.blocks = matched + self._take(need, matched[-1] if matched else None)
        sequence.computed = len(matched) * self.block_size
        if match and not whole and self.load(sequence, sequence.length - 1):
            if partial:
                self.radix.unpin(partial.node)
        elif partial:
            self._copy_partial(sequence, partial)
        if match and self.tiers and self.tiers.policy == "selective" and match.node.uses >= self.tiers.hits:
            self.tiers.offer(sequence.id, sequence.salt, sequence.packed(len(matched) * self.block_size))
        return True

    def load(self, sequence: Sequence, tokens: int) -> bool:
        """Begin to load into an admitted sequence's table what a lower tier has of its first `tokens` tokens, and is
        worth it. It waits until `settled` returns it."""
        if self.tiers is None:
            return False
        entries = self.tiers.find(sequence.salt, sequence.packed(tokens), sequence.shared_blocks)
        if not entries:
            return False
        targets = sequence.blocks[sequence.shared_blocks : sequence.shared_blocks + len(entries)]
        sequence.load = self.tiers.load(entries, targets)
        if sequence.load is not None:
            self._loading.append(sequence)
        return sequence.load is not None

    def prefetch(self, sequence: Sequence) -> None:
        """A queued sequence cannot begin yet: let what is far away come nearer meanwhile."""
        if self.tiers is not None and not sequence.prefetched and not sequence.request.sees_all_rows:
            tokens = sequence.packed(sequence.length - 1)
            cached = self.radix.peek(sequence.salt, tokens, partial=False) // self.block_size
            sequence.prefetched = self.tiers.prefetch(sequence.salt, tokens, cached)

    def below(self, salt: bytes, tokens: bytes) -> int:
        """How many blocks of packed `tokens` a lower tier has behind those that the device has."""
        cached = self.radix.peek(salt, tokens, partial=False) // self.block_size
        return self.tiers.found(salt, tokens, cached) if self.tiers is not None else 0

    def settled(self) -> list[Sequence]:
        """Let blocks go up and down, between two steps. Returns sequences whose load is over, however it went: what has
        come is in the cache."""
        if self.tiers is None:
            return []
        self.tiers.pump(self.pool.free * 4 < self.pool.total)
        over = [one for one in self._loading if self.tiers.over(one.load)]
        for sequence in over:
            done, read = self._stop_loading(sequence)
            sequence.computed += done * self.block_size
            if sequence.cached_tokens is None:  # what comes back after a preemption was no hit
                sequence.loaded = ((done - read) * self.block_size, read * self.block_size)
            self.commit(sequence)
        return over

    def _stop_loading(self, sequence: Sequence) -> tuple[int, int]:
        """Nothing is written to the sequence's blocks any more; how many have come, and how many of these from disk."""
        assert self.tiers is not None
        assert sequence.load is not None
        self._loading.remove(sequence)
        load, sequence.load = sequence.load, None
        return self.tiers.stop(load)

    def _copy_partial(self, sequence: Sequence, partial: Partial) -> None:
        """Begin the first private block with what a cached block has of it; the cached one was pinned for that."""
        assert self._copy is not None
        self._copy(partial.block, sequence.blocks[sequence.shared_blocks], partial.tokens)
        sequence.computed += partial.tokens
        self.radix.unpin(partial.node)

    def hold(self, sequence: Sequence) -> None:
        """Pin what is cached of the sequence's tokens, in whole blocks; that is its table."""
        if (match := self._match(sequence, sequence.length)) is None:
            return
        self.radix.pin(match.node)
        self.radix.touch(match.node)
        sequence.node, sequence.blocks, sequence.shared_blocks = match.node, match.blocks, len(match.blocks)
        sequence.computed = len(match.blocks) * self.block_size

    def found(self, sequence: Sequence) -> int:
        """Tokens that would not have to be computed if the sequence were admitted now, unless loading them from a lower
        tier turns out to take longer."""
        if not self.reuse or sequence.request.sees_all_rows:
            return 0
        tokens = sequence.packed(sequence.length - 1)
        cached = self.radix.peek(sequence.salt, tokens, self._copy is not None)
        if self.tiers is None:
            return cached
        whole = cached // self.block_size
        lower = self.tiers.found(sequence.salt, tokens, whole)
        return (whole + lower) * self.block_size if lower else cached

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
        if not self.reuse or whole <= sequence.shared_blocks:
            return
        tokens = sequence.packed(whole * self.block_size)
        done = self.radix.insert(sequence.salt, tokens, sequence.blocks[:whole], sequence.node)
        self.pool.adopt(done.adopted)
        if done.node is not sequence.node:
            self.radix.pin(done.node)
            if sequence.node is not None:
                self.radix.unpin(sequence.node)
            sequence.node = done.node
        sequence.blocks[:whole] = done.blocks
        sequence.shared_blocks = whole
        if sequence.hand_off:
            sequence.spare += done.duplicates
        else:
            self.pool.release(done.duplicates)
        self.pool.release(done.superseded, CACHED)
        if self.tiers is not None and self.tiers.policy == "write-through":
            self.tiers.offer(sequence.id, sequence.salt, tokens)

    def release(self, sequence: Sequence, quarantine: Iterable[int] = ()) -> list[int]:
        """Give up a sequence's table: unpin what it shares, free the rest. Private blocks listed in `quarantine` are
        kept from reuse and returned; free them with `end_quarantine`."""
        kept = set(quarantine)
        priority, keep_s = max(0, sequence.request.priority), sequence.request.keep_s
        keep_until = self._clock() + keep_s if keep_s else 0.0
        if sequence.node is not None and (priority or keep_s):
            self.radix.protect(sequence.node, priority, keep_until)
        if self.tiers is not None and keep_s and sequence.shared_blocks:
            tokens = sequence.packed(sequence.shared_blocks * self.block_size)
            self.tiers.offer(sequence.id, sequence.salt, tokens, keep_until)
        if self._keep_tail(sequence, kept, priority, keep_until):
            sequence.blocks.pop(sequence.shared_blocks)
        if sequence.load is not None:
            self._stop_loading(sequence)
        private = sequence.blocks[sequence.shared_blocks :]
        held = [block for block in private if block in kept]
        self.pool.quarantine(held)
        self.pool.release([block for block in private if block not in kept])
        self.pool.release(sequence.spare)
        if sequence.node is not None:
            self.radix.renew(sequence.node)
            self.radix.unpin(sequence.node)
        sequence.node, sequence.blocks, sequence.shared_blocks, sequence.computed = None, [], 0, 0
        sequence.spare = []
        return held

    def _keep_tail(self, sequence: Sequence, quarantine: set[int], priority: int, keep_until: float) -> bool:
        """Cache the block that is computed in part, if there is one, so that it can be copied."""
        whole = sequence.shared_blocks * self.block_size
        if not self._copy or not self.reuse or not whole < sequence.computed < whole + self.block_size:
            return False
        block = sequence.blocks[sequence.shared_blocks]
        if block in quarantine:
            return False
        tokens = sequence.packed(sequence.computed)[whole * TOKEN_BYTES :]
        superseded = self.radix.keep_tail(sequence.salt, sequence.node, tokens, block, priority, keep_until)
        if superseded is None:
            return False
        self.pool.adopt([block])
        self.pool.release(superseded, CACHED)
        return True

    def end_quarantine(self, blocks: list[int]) -> None:
        """No peer can write to these blocks any more."""
        self.pool.release(blocks, QUARANTINED)

    def clear(self) -> None:
        """Forget everything that no pin holds."""
        self.stats.cleared_blocks += self.radix.evictable
        self.pool.release(self.radix.evict(self.radix.evictable), CACHED)

    def _match(self, sequence: Sequence, tokens: int) -> Match | None:
        """The longest cached prefix within the first `tokens` tokens; None with reuse off, or where all of the prompt
        has to be computed."""
        if not self.reuse or sequence.request.sees_all_rows:
            return None
        return self.radix.match(sequence.salt, sequence.packed(tokens))

    def _take(self, count: int, after: int | None) -> list[int]:
        short = count - self.pool.free
        if short > 0:
            self.stats.evicted_blocks += short
            self.pool.release(self.radix.evict(short), CACHED)
        return self.pool.allocate(count, after)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
