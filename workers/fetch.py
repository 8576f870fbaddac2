"""Fetch: prefixes that this worker copies from another one's cache, and those that it lends.

It is the hand-over of workers/handover.py and workers/takeover.py with nothing to compute: the borrower keeps blocks
and opens a lease; the lender pins what it has of the prefix, writes it, and its manifest says how much that was.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from transfer.channel import TransportError
from transfer.config import TransferConfig
from transfer.directory import Directory, PeerError, PeerTimeout
from transfer.messages import Outcome, Request, Reservation, Reserve, SamplingParams, Source, unpack_tokens
from workers.engine.engine import Engine
from workers.engine.step import Produced
from workers.front import Front, Job
from workers.handover import HandOver
from workers.takeover import TakeOver
from workers.tracing import Traces

_log = logging.getLogger(__name__)
MIN_S, PATIENCE = 2.0, 4.0
"""A lender may take so many seconds, most of them for a step that it computes, and so many times what is expected."""
LATE_S = 30.0
"""How long nothing is fetched from a worker that did not answer in time."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A prefix on its way to this worker, for the request of this id."""

    part: Request
    request_id: str
    task: asyncio.Task[None]

    def common(self, request: Request, block_size: int) -> int:
        """Tokens, in whole blocks, that it has in common with a prompt."""
        if self.part.salt != request.salt:
            return 0
        mine, its = unpack_tokens(self.part.prompt), unpack_tokens(request.prompt)
        length = min(len(mine), len(its))
        differ = np.flatnonzero(mine[:length] != its[:length])
        return int(differ[0] if len(differ) else length) // block_size * block_size


class Fetch:
    """Both sides, of the worker `name`."""

    def __init__(
        self,
        name: str,
        front: Front,
        handover: HandOver,
        takeover: TakeOver,
        block_size: int,
        directory: Directory,
        config: TransferConfig,
        traces: Traces,
    ) -> None:
        self._name = name
        self._front = front
        self._handover = handover
        self._takeover = takeover
        self._block_size = block_size
        self._directory = directory
        self._config = config
        self._traces = traces
        self._under_way: list[_UnderWay] = []
        self._late: dict[str, float] = {}
        self._promoting: dict[str, asyncio.Event] = {}

    async def prepare(self, request: Request, source: Source | None) -> None:
        """Before a prompt is queued: wait for what is being fetched of it for others, or fetch what `source` has.
        Raises nothing: what does not come will be computed."""
        if request.sees_all_rows:
            return
        while (one := await self._awaited(request)) is not None:
            await asyncio.wait({one.task}, timeout=one.part.timeout_s)
            if not _came(one.task):
                return
        if source is None or request.request_id not in self._front.jobs:  # aborted meanwhile
            return
        if time.monotonic() > self._late.get(source.worker, 0.0):
            await self._fetch(request, source)

    def cancel(self, request_id: str) -> None:
        """The request that a prefix is fetched for is over."""
        for one in self._under_way:
            if one.request_id == request_id:
                one.task.cancel()

    async def _awaited(self, request: Request) -> _UnderWay | None:
        """The fetch under way that brings most of a prompt, if it brings more than is cached."""
        size = self._block_size
        best = max(self._under_way, key=lambda one: one.common(request, size), default=None)
        if best is None or not (common := best.common(request, size)):
            return None
        found = await self._front.on_engine(lambda engine: engine.found(request))
        return best if found < min(common, request.prompt_tokens - 1) and best in self._under_way else None

    async def _fetch(self, request: Request, source: Source) -> None:
        patience = min(self._config.call_timeout_s, MIN_S + PATIENCE * source.seconds)
        part = replace(
            request,
            # A second fetch for the same request must not be taken for the first, on any worker.
            request_id=f"{request.request_id}/{self._name}/{uuid.uuid4().hex[:8]}",
            prompt=request.prompt[: 4 * source.tokens],
            sampling=SamplingParams(max_tokens=1),
            timeout_s=min(request.timeout_s, patience),
        )
        begun, why = time.time_ns(), ""
        one = _UnderWay(part, request.request_id, asyncio.create_task(self._bring(part, source.worker)))
        self._under_way.append(one)
        try:
            # Its own steps and the lender's answer together.
            await asyncio.wait({one.task}, timeout=min(request.timeout_s, 2 * self._config.call_timeout_s))
        finally:
            self._under_way.remove(one)
            one.task.cancel()
            if (job := self._front.jobs.pop(part.request_id, None)) is not None:
                await self._takeover.release(job)
        if not _came(one.task):
            why = str("too late" if not one.task.done() or one.task.cancelled() else one.task.exception())
            _log.warning("request %s: nothing fetched from %s: %s", request.request_id, source.worker, why)
        if (asker := self._front.jobs.get(request.request_id)) is not None and asker.trace is not None:
            asker.trace.span(
                "fetch", begun, {"headwater.source": source.worker, "headwater.tokens": source.tokens}, why
            )

    async def lend(self, request: Request, reservation: Reservation, borrower: str) -> Outcome:
        """Write what is cached here of a prompt into the blocks that the worker `borrower` keeps for it. Returns when
        nothing is in flight any more."""
        outcome = asyncio.get_running_loop().create_future()
        deadline = time.monotonic() + request.timeout_s
        job = Job(request, deadline, outcome=outcome, decode=borrower, aside=True)
        traced, begun = self._traces.begin(request), time.time_ns()
        if not await self._front.on_transfer(lambda loop: loop.sender.start(job.id, job.deadline)):
            return Outcome("failed", error=f"{self._name} cannot lend: the lease is over")
        self._front.jobs[job.id] = job
        try:
            made = await self._lent(request, reservation.first_block)
            await self._handover.connect(job, borrower, reservation)
            self._front.post(lambda loop: loop.sender.offer(job.id, made.chunk, made.ending))
            return await asyncio.wait_for(asyncio.shield(outcome), request.timeout_s)
        except (PeerError, TransportError, ValueError, asyncio.TimeoutError) as error:
            return Outcome("failed", error=f"{self._name} cannot lend: {error or type(error).__name__}")
        finally:
            if not outcome.done():
                self._handover.cancel(job.id, "aborted")
            if traced is not None:
                lent = outcome.done() and outcome.result().status == "handed off"
                traced.span("lend", begun, {"headwater.receiver": borrower}, "" if lent else "not lent")

    def promoted(self, request_id: str) -> None:
        """What a lower tier has of a prefix is on the device now, as far as it comes there."""
        if (over := self._promoting.get(request_id)) is not None:
            over.set()

    async def _lent(self, request: Request, first_block: int) -> Produced:
        """What is cached of a prompt, after what a lower tier has of it has come to the device. If that is over before
        the request, it holds nothing."""
        part = replace(request, request_id=f"{request.request_id}/up")
        over = self._promoting[part.request_id] = asyncio.Event()

        def begin(engine: Engine) -> Produced | None:
            return None if engine.promote(part) else engine.lend(request, first_block)

        try:
            if (made := await self._front.on_engine(begin)) is not None:
                return cast(Produced, made)
            await asyncio.wait_for(over.wait(), request.timeout_s)
        finally:
            del self._promoting[part.request_id]
        if request.request_id not in self._front.jobs:
            raise PeerError("cancelled meanwhile")
        return cast(Produced, await self._front.on_engine(lambda engine: engine.lend(request, first_block)))

    async def _bring(self, part: Request, source: str) -> None:
        """Raises PeerError, and ValueError where the prompt cannot be here."""
        peer = await self._handover.peer(source)
        borrowed = asyncio.get_running_loop().create_future()
        job = Job(part, time.monotonic() + part.timeout_s, borrowed=borrowed, aside=True)
        reserve = Reserve(part, source, peer.agent, peer.incarnation)
        reservation = await self._takeover.borrow(job, reserve)
        if reservation is None:
            return
        arguments = (part, reservation, self._name, peer.incarnation)
        try:
            outcome: Outcome = await self._directory.call(source, "lend", *arguments, timeout=part.timeout_s)
        except PeerTimeout:
            self._late[source] = time.monotonic() + LATE_S
            raise
        if outcome.status == "stale":
            await self._handover.forget(source, peer.incarnation)
        if outcome.status != "handed off":
            raise PeerError(outcome.error or outcome.status)
        await borrowed


def _came(task: asyncio.Task[None]) -> bool:
    """Whether a fetch has ended well."""
    return task.done() and not task.cancelled() and task.exception() is None
