"""What a worker tells of a request that is traced: spans of the time in its queue, of the prompt and of the answer.

The engine's thread notes times, the asyncio thread makes spans of them. Where nothing is traced, nothing is noted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakValueDictionary

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from transfer.messages import Request
from transfer.tracing import parent
from workers.scheduler import Work

_tracer = trace.get_tracer("headwater.worker")
Attribute: TypeAlias = str | int | float


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens of a prompt that a step computed, and when it began and ended, in ns."""

    tokens: int
    begun: int
    ended: int


class Trace:
    """A traced request on the worker of this name. It waits in a queue from `queued` (ns) on, if that is set; `cached`
    tokens of it did not have to be computed."""

    def __init__(self, request: Request, worker: str) -> None:
        self.queued = 0
        self.cached = 0
        self._worker = worker
        self._request_id = request.request_id
        self._context = parent(request.traceparent)
        self._chunks: list[_Chunk] = []
        self._decoding: tuple[int, int] = (0, 0)
        self._steps = 0

    def stepped(self, tokens: int, prompt: bool, begun: int, ended: int) -> None:
        """A step has computed tokens of it, of the prompt or an answer's next one. Called by the engine's thread."""
        if prompt:
            self._chunks.append(_Chunk(tokens, begun, ended))
        else:
            self._decoding = (self._decoding[0] or begun, ended)
            self._steps += 1

    def span(self, name: str, begun: int, attributes: Mapping[str, Attribute], error: str = "") -> None:
        """A span from `begun` (ns) until now."""
        self._span(name, begun, time.time_ns(), error, attributes)

    def over(self, error: str = "") -> None:
        """The request leaves this worker: spans of what it did here. The last of them has the `error`, if any."""
        chunks, now = self._chunks, time.time_ns()
        ends = {"queue": chunks[0].begun if chunks else now} if self.queued else {}
        if chunks:
            ends["prefill"] = chunks[-1].ended
        if self._steps:
            ends["decode"] = self._decoding[1]
        for name, ended in ends.items():
            failed = error if name == list(ends)[-1] else ""
            if name == "queue":
                self._span(name, self.queued, ended, failed, {})
            elif name == "prefill":
                tokens = sum(one.tokens for one in chunks)
                about = {"headwater.tokens": tokens, "headwater.cached_tokens": self.cached}
                self._span(name, chunks[0].begun, ended, failed, about, chunks)
            else:
                self._span(name, self._decoding[0], ended, failed, {"headwater.tokens": self._steps})

    def _span(
        self,
        name: str,
        begun: int,
        ended: int,
        error: str,
        attributes: Mapping[str, Attribute],
        chunks: Sequence[_Chunk] = (),
    ) -> None:
        about = {"headwater.worker": self._worker, "headwater.request_id": self._request_id, **attributes}
        span = _tracer.start_span(name, self._context, attributes=about, start_time=begun)
        for one in chunks:
            taken = {"headwater.tokens": one.tokens, "headwater.seconds": (one.ended - one.begun) / 1e9}
            span.add_event("chunk", taken, one.ended)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(ended)


Started: TypeAlias = tuple[int, list[tuple[Trace, int, bool]]]


class Traces:
    """All of a worker, by request, as long as somebody else holds them."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._open: WeakValueDictionary[str, Trace] = WeakValueDictionary()

    def begin(self, request: Request) -> Trace | None:
        """The trace of a request that comes to this worker; None where it is not traced."""
        if not request.traceparent:
            return None
        made = self._open[request.request_id] = Trace(request, self._worker)
        return made

    def starting(self, works: Sequence[Work]) -> Started | None:
        """A step begins. Called by the engine's thread, as is `stepped`."""
        if not self._open:
            return None
        found = [(one, work.count, _in_prompt(work)) for work in works if (one := self._open.get(work.sequence.id))]
        return (time.time_ns(), found) if found else None

    def stepped(self, started: Started | None) -> None:
        """It has ended."""
        if started is not None:
            begun, found = started
            ended = time.time_ns()
            for one, tokens, prompt in found:
                one.stepped(tokens, prompt, begun, ended)


def _in_prompt(work: Work) -> bool:
    return work.sequence.computed < work.sequence.prompt_length
