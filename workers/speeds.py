"""SpeedMeter: what a worker measures of itself while it works, for routers to plan with."""

from __future__ import annotations

from collections.abc import Iterable

from transfer.messages import Speeds, TransferStats
from workers.kv.tiers import Tiers
from workers.scheduler import Work

MIN_TOKENS = 64
"""Prompt tokens of a step from which its speed is that of prompts, and not of a step as such."""
MIN_MEASURED = 4096
"""Prompt tokens from which on a speed is claimed: the first steps are slower, and one of them proves nothing."""
MIN_SENDING_S = 0.005
"""Time with a write under way from which its speed is taken."""
WEIGHT = 0.2
"""Of the newest measurement in the running mean."""


class SpeedMeter:
    """Running means. Steps are told by the engine thread, hand-overs by the asyncio thread."""

    def __init__(self) -> None:
        self._prompts = 0.0, 0.0
        self._measured = 0
        self._row_s = 0.0
        self._answers = 0, 0.0
        self._handover_s = 0.0
        self._bytes_s = 0.0
        self._sent = (0, 0.0)

    def step(self, works: Iterable[Work], seconds: float) -> None:
        """A step has been computed. Called by the engine thread."""
        counts = [work.count for work in works]
        if rows := sum(counts):
            self._row_s = _mean(self._row_s, seconds / rows)
        if (answers := counts.count(1)) > 0:
            self._answers = answers, seconds
        tokens = sum(count for count in counts if count > 1)
        if tokens >= MIN_TOKENS:
            before, took = self._prompts
            self._prompts = before * (1 - WEIGHT) + tokens, took * (1 - WEIGHT) + seconds
            self._measured += tokens  # last: others read this thread's figures

    @property
    def prompt_tokens_s(self) -> float:
        """Prompt tokens a second lately: by tokens, not by steps, because short steps are slower."""
        tokens, seconds = self._prompts
        return tokens / seconds if self._measured >= MIN_MEASURED else 0.0

    def step_s(self, tokens: int) -> float:
        """About the seconds that a step of so many tokens takes, at most if only smaller ones are known; 0 while
        nothing is."""
        speed = self.prompt_tokens_s
        return tokens / speed if speed else tokens * self._row_s

    def handed_over(self, seconds: float) -> None:
        """A hand-over was complete, so long after its first token."""
        self._handover_s = _mean(self._handover_s, seconds)

    def now(self, transfers: TransferStats, tiers: Tiers | None = None) -> Speeds:
        """All that is known; what was sent since the last time is taken in."""
        sent, seconds = transfers.sent_bytes - self._sent[0], transfers.sending_s - self._sent[1]
        if seconds >= MIN_SENDING_S:
            self._bytes_s = _mean(self._bytes_s, sent / seconds)
            self._sent = transfers.sent_bytes, transfers.sending_s
        host, disk = (tiers.host_bytes_s, tiers.disk_bytes_s) if tiers is not None else (0.0, 0.0)
        answers, gap_s = self._answers
        return Speeds(self.prompt_tokens_s, self._handover_s, self._bytes_s, host, disk, gap_s, answers)


def _mean(before: float, now: float) -> float:
    return before + WEIGHT * (now - before) if before else now
