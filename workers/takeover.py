"""TakeOver: the receiver's side of a hand-over, on the worker that goes on with a prompt that another one computes.

It keeps blocks under a lease, goes on when they are verified, computes the prompt when they never come, and gets every
block back that the sender may have written to. The sender's side is workers/handover.py.
"""

from __future__ import annotations

import asyncio
import logging
import time

from transfer.channel import Accepted, Lease, Refused
from transfer.config import TransferConfig
from transfer.directory import Directory, PeerDead, PeerError
from transfer.messages import Outcome, Reservation, Reserve, TransferStats
from workers.engine.step import Reserved
from workers.front import Front, Job
from workers.metrics import Metrics
from workers.tracing import Traces

_log = logging.getLogger(__name__)
SETTLE_RETRY_S = 0.25
SETTLE_RETRY_MAX_S = 10.0
SETTLE_S = 600.0
"""How long a sender that lives is asked whether it still writes. Afterwards the blocks are given up for good."""


class TakeOver:
    """Prompts on their way from others to this worker, whose present life is `incarnation`."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        front: Front,
        directory: Directory,
        config: TransferConfig,
        stats: TransferStats,
        metrics: Metrics,
        traces: Traces,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._front = front
        self._directory = directory
        self._config = config
        self._stats = stats
        self._metrics = metrics
        self._traces = traces

    async def reserve(self, reserve: Reserve) -> Reservation | Outcome:
        """Keep blocks for a prompt and open a lease on them. Waits for blocks as long as the request may wait; the
        answer is an Outcome when they are not to be had."""
        request, asked_at = reserve.request, time.monotonic()
        job = Job(request, asked_at + request.timeout_s)
        job.reserved = asyncio.get_running_loop().create_future()
        job.trace, begun = self._traces.begin(request), time.time_ns()
        self._front.jobs[job.id] = job
        try:
            guide = await self._front.guide(request)
            if self._front.jobs.get(job.id) is not job:
                return Outcome("aborted")
            await self._front.on_engine(lambda engine: engine.reserve(request, guide))
            reserved = await asyncio.wait_for(asyncio.shield(job.reserved), request.timeout_s)
        except (ValueError, asyncio.TimeoutError) as error:
            self._front.jobs.pop(job.id, None)
            await self._front.on_engine(lambda engine: engine.abort(job.id))
            return Outcome("failed", error=f"{self._name} cannot reserve: {error or type(error).__name__}")
        if reserved is None or self._front.jobs.get(job.id) is not job:
            # Aborted, perhaps since the engine answered: the blocks are free again. No await may come between this
            # check and the opening of the lease, so that an abort finds either no reservation or a lease.
            return Outcome("aborted")
        job.reserved = None
        self._metrics.queued("reservation", time.monotonic() - asked_at)
        if job.trace is not None:
            job.trace.span("reserve", begun, {"headwater.blocks": len(reserved.blocks)})
        return await self._open(reserve, reserved)

    async def borrow(self, job: Job, reserve: Reserve) -> Reservation | None:
        """Keep blocks for a prefix that another worker has, and open a lease on them; `job.borrowed` is set when it has
        ended. None when there is nothing to fetch, or no room at once. Raises ValueError."""
        self._front.jobs[job.id] = job  # before anything is kept, so that it is given back whatever happens
        reserved = await self._front.on_engine(lambda engine: engine.borrow(job.request))
        if reserved is None or self._front.jobs.get(job.id) is not job:  # aborted meanwhile: the blocks are free again
            return None
        return await self._open(reserve, reserved, open_end=True)

    async def _open(self, reserve: Reserve, reserved: Reserved, open_end: bool = False) -> Reservation:
        lease = Lease(
            lease_id=reserved.request_id,
            sender=reserve.sender,
            sender_agent=reserve.sender_agent,
            sender_incarnation=reserve.sender_incarnation,
            first_block=reserved.first_block,
            blocks=reserved.blocks,
            deadline=time.monotonic() + self._config.lease_s,
            open_end=open_end,
        )
        await self._front.on_transfer(lambda loop: loop.receiver.open(lease))
        return Reservation(self._incarnation, reserved.first_block, reserved.blocks)

    def granted(self, reserved: Reserved) -> None:
        """The engine has kept blocks for a prompt."""
        job = self._front.jobs.get(reserved.request_id)
        if job is not None and job.reserved is not None and not job.reserved.done():
            job.reserved.set_result(reserved)

    async def accept(self, event: Accepted) -> None:
        """Every block is there and verified: decode."""
        lease, manifest = event.lease, event.manifest
        if (borrowing := self._end_borrowing(lease.lease_id)) is None:
            await self._front.on_engine(
                lambda e: e.accept(lease.lease_id, manifest.first_token, manifest.cached_tokens)
            )
            return
        await self._front.on_engine(lambda engine: engine.borrowed(lease.lease_id, event.count))
        self._stats.fetched_blocks += event.count
        if not borrowing.done():
            borrowing.set_result(None)

    async def refuse(self, event: Refused) -> None:
        """What came is not to be trusted."""
        await self._recompute(event.lease, event.reason)

    async def transfer_failed(self, lease_id: str, reason: str) -> bool:
        """The sender gives up and has nothing in flight: compute here. False when the request is not wanted here, or
        still waits for blocks that nobody will write."""
        lease = await self._front.on_transfer(lambda loop: loop.receiver.quarantine(lease_id))
        if lease is not None:
            await self._recompute(lease, reason)
        job = self._front.jobs.get(lease_id)
        return job is not None and job.reserved is None

    async def release(self, job: Job) -> None:
        """Take a request out of the engine; blocks that a peer may still write to go to quarantine first."""
        for waits in (job.reserved, job.borrowed):
            if waits is not None and not waits.done():
                waits.set_result(None)
        lease = await self._front.on_transfer(lambda loop: loop.receiver.quarantine(job.id))
        blocks = lease.blocks if lease is not None else ()
        held = await self._front.on_engine(lambda engine: engine.abort(job.id, blocks))
        if lease is not None:
            self._front.spawn(self._settle(lease, held))

    async def check_leases(self) -> None:
        """Ask after every manifest that should have come by now."""
        now = time.monotonic()
        for lease in await self._front.on_transfer(lambda loop: loop.receiver.overdue(now)):
            # The question may take as long as a lease; it is not asked twice meanwhile.
            lease.deadline = now + 2 * self._config.lease_s
            self._stats.expired += 1
            self._front.spawn(self._ask_about(lease))

    async def _ask_about(self, lease: Lease) -> None:
        """A lease is overdue: extend it if the sender is still at it, otherwise do without the sender."""
        lease_s = self._config.lease_s
        reason = "manifest lost"
        try:
            if await self._directory.call(lease.sender, "transfer_active", lease.lease_id, timeout=lease_s):
                deadline = time.monotonic() + lease_s
                await self._front.on_transfer(lambda loop: loop.receiver.extend(lease.lease_id, deadline))
                return
        except PeerError as error:
            reason = str(error)
        if await self._front.on_transfer(lambda loop: loop.receiver.quarantine(lease.lease_id)) is not None:
            await self._recompute(lease, reason)

    async def _recompute(self, lease: Lease, reason: str) -> None:
        """The blocks of a lease are not to be trusted: compute the prompt here, or do without what was to be borrowed;
        they go to quarantine."""
        if (borrowing := self._end_borrowing(lease.lease_id)) is not None:
            held = await self._front.on_engine(lambda engine: engine.abort(lease.lease_id, lease.blocks))
            if not borrowing.done():
                borrowing.set_result(None)
        else:
            held = await self._front.on_engine(lambda engine: engine.recompute(lease.lease_id, lease.blocks))
        if held is not None:
            _log.warning("request %s: %s; computing instead", lease.lease_id, reason)
            self._front.spawn(self._settle(lease, held))

    def _end_borrowing(self, lease_id: str) -> asyncio.Future[None] | None:
        """If this lease is on blocks for a prefix that is fetched: end its job; who waits for that."""
        job = self._front.jobs.get(lease_id)
        if job is None or job.borrowed is None:
            return None
        del self._front.jobs[lease_id]
        return job.borrowed

    async def _settle(self, lease: Lease, held: list[int]) -> None:
        """Ask the sender until it confirms that nothing is in flight, or its life has ended; then free the blocks. If
        neither comes they are never free again: a block too few is better than a block that somebody else writes to.
        """
        pause, until = SETTLE_RETRY_S, time.monotonic() + SETTLE_S
        while not (over := await self._writes_are_over(lease)) and time.monotonic() < until:
            await asyncio.sleep(pause)
            pause = min(2 * pause, SETTLE_RETRY_MAX_S)
        await self._front.on_transfer(lambda loop: loop.receiver.close(lease.lease_id))
        if over:
            await self._front.on_engine(lambda engine: engine.cache.end_quarantine(held))
        elif held:
            self._stats.lost_blocks += len(held)
            message = (
                "request %s: %s lives but does not confirm that it writes no more; %d blocks are lost until restart"
            )
            _log.error(message, lease.lease_id, lease.sender, len(held))

    async def _writes_are_over(self, lease: Lease) -> bool:
        timeout = self._config.call_timeout_s
        try:
            return bool(await self._directory.call(lease.sender, "cancel_transfer", lease.lease_id, timeout=timeout))
        except PeerDead:
            return True
        except PeerError as error:
            _log.info("request %s: %s", lease.lease_id, error)
            return False
