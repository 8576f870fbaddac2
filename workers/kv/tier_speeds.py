"""TierSpeeds: how fast blocks come back from each tier, and how many of them are therefore better loaded than computed.
Measured while loading; other threads read the speeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transfer.gossip.summary import DISK, HOST
from workers.kv.tier_index import Entry

HOST_BYTES_S, DISK_BYTES_S = 2e9, 0.5e9
"""What is assumed of a tier while nothing was loaded from it."""
START_S = 0.002
"""Until a load begins, and until it is noticed that it has ended."""
UNTRIED_S, TRIED_BLOCKS = 30.0, 2
"""A tier that seems slower than computing gets so many blocks to load when none were loaded from it for so long: it may
have been slow only once."""
WEIGHT = 0.3
"""Of the newest load in the running mean of a speed."""


class TierSpeeds:
    """Of tiers whose blocks have `record_bytes`, and `block_tokens` tokens each; `clock` gives seconds."""

    def __init__(self, record_bytes: int, block_tokens: int, clock: Callable[[], float]) -> None:
        self.prompt_tokens_s = 0.0
        """How fast prompts are computed; 0 while unknown."""
        self._record_bytes = record_bytes
        self._block_tokens = block_tokens
        self._clock = clock
        self._speeds = {HOST: 0.0, DISK: 0.0}
        self._tried = {HOST: 0.0, DISK: 0.0}

    def measured(self, tier: int, blocks: int, seconds: float) -> None:
        """So many blocks have come from a tier in a time."""
        if blocks and seconds > 0:
            self._tried[tier] = self._clock()
            speed, before = blocks * self._record_bytes / seconds, self._speeds[tier]
            self._speeds[tier] = before + WEIGHT * (speed - before) if before else speed

    def bytes_s(self, tier: int) -> float:
        """Bytes of records a second; 0 while unknown."""
        return self._speeds[tier]

    def seconds(self, entry: Entry) -> float:
        """What loading a block is expected to take."""
        host = self._record_bytes / (self._speeds[HOST] or HOST_BYTES_S)
        return host if entry.ready else host + self._record_bytes / (self._speeds[DISK] or DISK_BYTES_S)

    def worth(self, entries: Sequence[Entry], wanted: int, before_s: float) -> int:
        """How many of these blocks to load, behind loads that take `before_s`, of the `wanted` ones that must be had,
        so that all are had soonest: those behind them are computed."""
        if not self.prompt_tokens_s:
            return len(entries)
        computing = self._block_tokens / self.prompt_tokens_s
        best, soonest, loading = 0, wanted * computing, START_S + before_s
        for number, entry in enumerate(entries, 1):
            loading += self.seconds(entry)
            if loading + (wanted - number) * computing < soonest:
                best, soonest = number, loading + (wanted - number) * computing
        if best < len(entries):
            tier = HOST if entries[best].ready else DISK
            if self._clock() - self._tried[tier] > UNTRIED_S:
                self._tried[tier] = self._clock()
                best = min(best + TRIED_BLOCKS, len(entries))
        return best
