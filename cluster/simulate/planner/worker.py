"""The model of a worker: with the role prefill a queue, with the role decode a batch whose steps grow with it."""

from __future__ import annotations

import heapq

from cluster.planner import Role

PROMPT_TOKENS_S = 4000.0
"""Prompt tokens that a worker computes a second, one prompt after another."""
ALONE_S, ANSWER_S = 0.02, 0.001
"""A step takes the first of these, and the second for each answer that runs."""


class Worker:
    """A worker of the simulation. While it is not `ready` it starts, or finishes what it has; it takes nothing new."""

    def __init__(self, name: str, role: Role, ready: bool, now: float) -> None:
        self.name = name
        self.role = role
        self.ready = ready
        self.gone = False
        self.leaving = False
        self.next_role: Role | None = None
        self.since = now
        self.prompts = 0
        self.version = 0
        """Of the batch: it grows with each change."""
        self._free_at = 0.0
        # All answers of a batch advance alike: one ends when the batch has made as many more steps as it has tokens.
        self._batch: list[tuple[float, int]] = []
        self._steps = 0.0
        self._steps_at = now

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self.prompts and not self._batch

    @property
    def running(self) -> int:
        """Answers in its batch."""
        return len(self._batch)

    @property
    def gap_s(self) -> float:
        """Seconds that a step takes now."""
        return ALONE_S + ANSWER_S * len(self._batch)

    @property
    def next_end(self) -> float:
        """When the first of its answers ends, if nothing changes before."""
        return self._steps_at + (self._batch[0][0] - self._steps) * self.gap_s

    def wait(self, now: float) -> float:
        """Seconds until its prompts are computed."""
        return max(0.0, self._free_at - now)

    def compute(self, tokens: int, now: float) -> float:
        """Queue a prompt; the moment at which it is computed."""
        self.prompts += 1
        self._free_at = now + self.wait(now) + tokens / PROMPT_TOKENS_S
        return self._free_at

    def generate(self, number: int, tokens: int, now: float) -> None:
        """Add an answer to the batch."""
        self._advance(now)
        heapq.heappush(self._batch, (self._steps + tokens, number))

    def end_first(self, now: float) -> int:
        """The first of its answers has ended; its number."""
        self._advance(now)
        return heapq.heappop(self._batch)[1]

    def _advance(self, now: float) -> None:
        self.version += 1
        self._steps += (now - self._steps_at) / self.gap_s
        self._steps_at = now
