"""What an answer used: prompts are counted once, however many choices they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.gateway.choice import Piece
from router.gateway.jobs import Job


class Usage:
    """Counts the pieces of a request's choices."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._leads = {job.index: job for job in jobs if job.leads}
        self._cached = dict.fromkeys(self._leads, 0)
        self.prompt_tokens = sum(job.prompt_tokens for job in self._leads.values())
        self.completion_tokens = 0
        self.reasoning_tokens = 0

    def add(self, piece: Piece) -> None:
        """Count a piece."""
        self.completion_tokens += len(piece.tokens)
        self.reasoning_tokens += piece.reasoning_tokens
        if piece.index in self._cached:
            self._cached[piece.index] = piece.cached_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in a cache when the first choice of their prompt began."""
        return sum(self._cached.values())

    def openai(self) -> dict[str, Any]:
        """The `usage` object of chat and completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
