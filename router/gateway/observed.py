"""Observed: what is measured of a client's request, once, whatever number of choices and attempts it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar

from opentelemetry import trace

from router.gateway import metrics
from router.gateway.jobs import Job

arrived: ContextVar[float] = ContextVar("arrived", default=0.0)
"""When the request came (monotonic), in every task that it starts; 0 elsewhere."""


class Observed:
    """A request that is being answered: its metrics, and what its span says in the end."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._arrived = arrived.get() or time.monotonic()
        self._span = trace.get_current_span()
        self._open = len(jobs)
        self._reasons = [""] * len(jobs)
        self._begun = False
        self._cached = 0
        self._output = 0

    def begun(self, job: Job, cached_tokens: int) -> None:
        """A choice has its first token; of its prompt so many were cached."""
        if not self._begun:
            self._begun = True
            priority = "low" if job.prompt.priority < 0 else "normal"
            metrics.first_token.record(time.monotonic() - self._arrived, {"priority": priority})
            self._span.add_event("first token")
        metrics.prompt_tokens.add(job.prompt_tokens)
        metrics.cached_tokens.add(cached_tokens)
        self._cached += cached_tokens if job.leads else 0

    def ended(self, job: Job, output_tokens: int, reason: str | None) -> None:
        """A choice has ended, with so many tokens; without a `reason` before its end."""
        metrics.output_tokens.add(output_tokens)
        self._output += output_tokens
        self._reasons[job.index] = reason or "error"
        self._open -= 1
        if self._open:
            return
        if all(one != "error" for one in self._reasons):
            metrics.duration.record(time.monotonic() - self._arrived)
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    "gen_ai.response.finish_reasons": self._reasons,
                    "gen_ai.usage.output_tokens": self._output,
                    "gen_ai.usage.cache_read.input_tokens": self._cached,
                }
            )
