"""Tally: how far a batch is, and what it took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Tally:
    """Rows of `total` lines. `before` of them, of which `failed_before` failed, were there when the batch began; tokens
    are those of the others."""

    total: int
    before: int = 0
    failed_before: int = 0
    rows: int = 0
    failed_now: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    begun: float = field(default_factory=time.monotonic)

    def add(self, row: dict[str, Any]) -> None:
        """Count a row, with what its body says was used."""
        self.rows += 1
        self.failed_now += row["error"] is not None
        usage = ((row["response"] or {}).get("body") or {}).get("usage") or {}
        prompt = "prompt" if "prompt_tokens" in usage else "input"
        self.prompt_tokens += usage.get(f"{prompt}_tokens", 0)
        self.cached_tokens += (usage.get(f"{prompt}_tokens_details") or {}).get("cached_tokens", 0)
        answer = "completion" if "completion_tokens" in usage else "output"
        self.output_tokens += usage.get(f"{answer}_tokens", 0)
        self.reasoning_tokens += (usage.get(f"{answer}_tokens_details") or {}).get("reasoning_tokens", 0)

    @property
    def done(self) -> int:
        """Rows that are there."""
        return self.before + self.rows

    @property
    def failed(self) -> int:
        """Rows that have an error."""
        return self.failed_before + self.failed_now

    @property
    def seconds(self) -> float:
        """Since the batch began."""
        return time.monotonic() - self.begun

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts, cached or not, and of answers."""
        return (self.prompt_tokens + self.output_tokens) / max(self.seconds, 1e-3)

    @property
    def cached_share(self) -> float:
        """Share of the prompts' tokens that nobody had to compute."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    @property
    def left_s(self) -> float | None:
        """Seconds until the end, if it goes on as so far; None where nothing is known yet."""
        return (self.total - self.done) * self.seconds / self.rows if self.rows else None
