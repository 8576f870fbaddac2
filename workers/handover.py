"""HandOver: the sender's side of a hand-over, on the worker that computes the prompt.

It asks the decode worker for blocks, connects the channel to it, and says how the transfer ended. The transfer's
events come from the channel's `Sender`; the receiver's side is workers/takeover.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from transfer.channel import SendFailed, Sent
from transfer.config import TransferConfig
from transfer.directory import Directory, PeerError
from transfer.messages import Outcome, Peer, Reservation, Reserve
from workers.front import Front, Job
from workers.metrics import Metrics
from workers.speeds import SpeedMeter

_log = logging.getLogger(__name__)
STOP_POLL_S = 0.005


class HandOver:
    """Prompts on their way from this worker, which describes itself as `me`, to others."""

    def __init__(
        self,
        me: Peer,
        front: Front,
        directory: Directory,
        config: TransferConfig,
        speeds: SpeedMeter,
        metrics: Metrics,
    ) -> None:
        self._me = me
        self._speeds = speeds
        self._metrics = metrics
        self._front = front
        self._directory = directory
        self._config = config
        self._peers: dict[str, Peer] = {}

    async def begin(self, job: Job) -> bool:
        """The prompt is about to be computed: its chunks are kept until the decode worker has answered. False when a
        transfer of this id is over already."""
        return bool(await self._front.on_transfer(lambda loop: loop.sender.start(job.id, job.deadline)))

    def cancel(self, request_id: str, reason: str) -> None:
        """Send nothing more. The channel says so once nothing is in flight, and `ended` ends the job."""
        self._front.post(lambda loop: loop.sender.cancel(request_id, reason))

    def forgo(self, job: Job) -> None:
        """The request has ended on this worker, so that there is nothing to hand over."""
        assert job.decode is not None
        self.cancel(job.id, "finished")
        self._front.spawn(self._abort(job.decode, job.id))

    def computed(self, request_id: str) -> None:
        """The prompt is computed, and its last blocks are offered."""
        if (job := self._front.jobs.get(request_id)) is not None:
            job.computed_at = time.monotonic()
            self.reserve_once(request_id)

    def reserve_once(self, request_id: str) -> None:
        """Ask for blocks while a long prompt is computed, or behind the first token of a short one: asking takes
        longer than its only step has to spare."""
        job = self._front.jobs.get(request_id)
        if job is not None and not job.reserving:
            job.reserving = time.time_ns()
            self._front.spawn(self._reserve(job))

    async def ended(self, event: Sent | SendFailed) -> None:
        """A transfer has ended: give the blocks free and say how it went."""
        request_id = event.lease_id
        await self._front.on_engine(lambda engine: engine.sent(request_id))
        job = self._front.jobs.pop(request_id, None)
        if job is not None and job.decode is not None:
            if isinstance(event, Sent) and job.computed_at is not None:
                # A decode worker that had no room for a while says nothing about the way to it.
                now = time.monotonic()
                exposed = now - max(job.computed_at, job.connected_at)
                self._speeds.handed_over(exposed)
                self._metrics.transferred(now - job.connected_at, exposed)
            failure = event.reason if isinstance(event, SendFailed) else ""
            if job.trace is not None and job.reserving:
                job.trace.span("transfer", job.reserving, {"headwater.receiver": job.decode}, failure)
            job.leaves(failure)
            job.end(await self._outcome(job, job.decode, event))

    async def active(self, lease_id: str) -> bool:
        """Whether this worker is still at it, so that a manifest may come."""
        return bool(await self._front.on_transfer(lambda loop: loop.sender.active(lease_id)))

    async def stop_writing(self, lease_id: str) -> bool:
        """A receiver wants its blocks back. True once nothing can be in flight; False when something still is after
        half of what a call may take."""
        await self._front.on_transfer(lambda loop: loop.sender.fence(lease_id, time.monotonic()))
        until = time.monotonic() + self._config.call_timeout_s / 2
        while await self._front.on_transfer(lambda loop: loop.sender.may_write(lease_id)):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(STOP_POLL_S)
        return True

    async def connect(self, job: Job, receiver: str, reservation: Reservation) -> None:
        """Let the job's blocks be written to the worker `receiver`, which has kept room. Raises PeerError and
        TransportError."""
        known = self._peers.get(receiver)
        if known is not None and known.incarnation < reservation.incarnation:
            await self.forget(receiver, known.incarnation)
        peer = await self.peer(receiver)
        if peer.incarnation != reservation.incarnation:  # its block ids mean something else by now
            raise PeerError(f"{receiver} has another life than the one that kept the blocks")
        await self._front.on_transfer(lambda loop: loop.open(job.id, reservation, peer))
        job.connected_at = time.monotonic()

    async def peer(self, name: str) -> Peer:
        """How to reach a worker, as far as is known: it may be in another life meanwhile. Raises PeerError."""
        if (known := self._peers.get(name)) is None:
            known = self._peers[name] = await self._directory.call(
                name, "describe", timeout=self._config.call_timeout_s
            )
        return known

    async def forget(self, name: str, incarnation: int) -> None:
        """This life of a worker has ended."""
        known = self._peers.get(name)
        if known is not None and known.incarnation == incarnation:
            del self._peers[name]
            await self._front.on_transfer(lambda loop: loop.transport.disconnect(known.agent))

    async def _reserve(self, job: Job) -> None:
        """Ask the decode worker for blocks and connect the transfer to it."""
        assert job.decode is not None
        request_id, decode = job.id, job.decode
        left = job.deadline - time.monotonic()
        reserve = Reserve(job.request, self._me.name, self._me.agent, self._me.incarnation)
        try:
            answer = await self._directory.call(decode, "reserve", reserve, timeout=left)
            if isinstance(answer, Outcome):
                job.refused = answer if answer.status == "busy" else None
                raise PeerError(answer.error or f"{decode} is {answer.status}")
            await self.connect(job, decode, answer)
        except Exception as error:
            self.cancel(request_id, f"no blocks on {decode}: {error}")
        if request_id not in self._front.jobs:
            # The request ended meanwhile, and the abort may have come before the reservation.
            await self._abort(decode, request_id)

    async def _outcome(self, job: Job, decode: str, event: Sent | SendFailed) -> Outcome:
        if isinstance(event, Sent):
            return Outcome("handed off")
        if job.refused is not None:
            return replace(job.refused, worker=decode)
        if event.reason == "aborted":
            await self._abort(decode, job.id)
            return Outcome("aborted", error=event.reason)
        if event.drained and await self._hand_back(decode, event):
            return Outcome("handed off")
        return Outcome("failed", error=event.reason)

    async def _hand_back(self, decode: str, event: SendFailed) -> bool:
        """Tell the decode worker that the blocks will not come; True when it goes on by computing them."""
        _log.warning("request %s: transfer to %s failed: %s", event.lease_id, decode, event.reason)
        arguments = (event.lease_id, event.reason)
        try:
            return bool(
                await self._directory.call(decode, "transfer_failed", *arguments, timeout=self._config.call_timeout_s)
            )
        except PeerError:
            return False

    async def _abort(self, worker: str, request_id: str) -> None:
        try:
            await self._directory.call(worker, "abort", request_id, timeout=self._config.call_timeout_s)
        except PeerError as error:
            _log.info("request %s: abort: %s", request_id, error)
