"""What an answer used: prompts are counted once, however many choices they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.gateway.choice import Piece
from router.gateway.jobs import Job
from transfer.messages import EXACT


class Usage:
    """Counts the pieces of a request's choices. `tier_format` is that of blocks below the devices."""

    def __init__(self, jobs: Sequence[Job], tier_format: str = EXACT) -> None:
        self._tier_format = tier_format
        self._leads = {job.index: job for job in jobs if job.leads}
        self._cached = dict.fromkeys(self._leads, (0, (0, 0)))
        self.prompt_tokens = sum(job.prompt_tokens for job in self._leads.values())
        self.completion_tokens = 0
        self.reasoning_tokens = 0

    def add(self, piece: Piece) -> None:
        """Count a piece."""
        self.completion_tokens += len(piece.tokens)
        self.reasoning_tokens += piece.reasoning_tokens
        if piece.index in self._cached:
            self._cached[piece.index] = piece.cached_tokens, piece.loaded

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in a cache when the first choice of their prompt began."""
        return sum(cached for cached, _ in self._cached.values())

    @property
    def cached_tokens_by_tier(self) -> dict[str, int]:
        """The same by where they were when a worker began with the prompt."""
        host, disk = (sum(loaded[tier] for _, loaded in self._cached.values()) for tier in (0, 1))
        return {"device": self.cached_tokens - host - disk, "host": host, "disk": disk}

    def openai(self) -> dict[str, Any]:
        """The `usage` object of chat and completions. What was cached may have come from a tier at any time, and by way
        of another worker: so with a lossy format all of it is said to be in that."""
        details: dict[str, Any] = {
            "cached_tokens": self.cached_tokens,
            "cached_tokens_by_tier": self.cached_tokens_by_tier,
        }
        if self.cached_tokens and self._tier_format != EXACT:
            details["cached_tokens_format"] = self._tier_format
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": details,
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
