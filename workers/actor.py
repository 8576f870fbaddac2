"""The worker: asyncio front, engine thread and transfer thread behind. Its role is data.

Gateways call `generate` and `abort`; other workers call `describe`, `reserve`, `transfer_failed`, `transfer_active`
and `cancel_transfer`. Tokens go to the request's gateway by `deliver`, one message per step and gateway.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from transfer.channel import Accepted, Lease, Receiver, Refused, Sender, SendFailed
from transfer.config import TransferConfig
from transfer.directory import Directory, PeerDead, PeerError
from transfer.messages import Delta, Outcome, Peer, Request, Reservation, Reserve, WorkerStatus
from transfer.nixl_transport import NixlTransport
from workers.config import WorkerConfig
from workers.engine.engine import Engine, Reserved, StepPlan, StepResult
from workers.engine.model import Model
from workers.loop import Loop
from workers.transfer import Event, TransferLoop

_log = logging.getLogger(__name__)
IDLE_RETRY_S = 0.01
"""Pause of an engine whose queued work cannot run yet."""
SWITCH_INTERVAL_S = 0.0005
"""How long one Python thread may keep another waiting: calls and tokens must not wait for the engine's Python."""
SETTLE_RETRY_S = 0.25
SETTLE_RETRY_MAX_S = 10.0
WATCH_INTERVAL_S = 0.5
GATEWAY_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Job:
    """One request on this worker. `outcome` is set by `generate` alone; `decode` names the worker it is handed to."""

    request: Request
    deadline: float
    outcome: asyncio.Future[Outcome] | None = None
    decode: str | None = None
    reserving: bool = False
    refused: Outcome | None = None
    reserved: asyncio.Future[Reserved] | None = None


class Worker:
    """One engine with its ends of the KV channel. `name` is unique in the cluster among the living; `model` is a
    directory and `model_name` what clients call it."""

    def __init__(
        self,
        name: str,
        role: str,
        model: Path,
        model_name: str,
        config: WorkerConfig,
        transfer: TransferConfig,
        directory: Directory,
    ) -> None:
        self.name = name
        self.role = role
        self.incarnation = time.time_ns()
        self._model_path = model
        self._model_name = model_name
        self._config = config
        self._transfer_config = transfer
        self._directory = directory
        self._engine_loop = Loop("engine", self._turn)
        self._jobs: dict[str, _Job] = {}
        self._peers: dict[str, Peer] = {}
        self._undrained: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = "starting"

    async def start(self) -> WorkerStatus:
        """Load the model and begin to serve. Raises StartError, ModelUnsupported or ValueError for what cannot work."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        await asyncio.to_thread(self._load)
        gc.freeze()  # what is loaded stays; the collector need not walk through it while tokens wait
        self._loop = asyncio.get_running_loop()
        self._engine_loop.start()
        self._transfer_loop.start()
        self._spawn(self._watch())
        self._state = "ready"
        return await self.status()

    def _load(self) -> None:
        config, transfer = self._config, self._transfer_config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._engine = Engine(Model(self._model_path, config.dtype, config.device), config)
        # The first user's request should not pay for lazy initialisation.
        self._engine.warm_up()
        memory = self._engine.memory
        transport = NixlTransport(f"{self.name}/{self.incarnation}", memory.flat, memory.layout, transfer.backend)
        self._self = transport.describe(self.name, self.incarnation)
        self._transfer_loop = TransferLoop(
            transport,
            Sender(transport, self.incarnation, memory.checksum, transfer.stall_s),
            Receiver(self.incarnation, memory.checksum),
            transfer.poll_interval_s,
            self._on_transfer_event,
        )

    async def stop(self) -> None:
        """Abort what runs and end the threads."""
        self._state = "stopping"
        for request_id in list(self._jobs):
            await self.abort(request_id)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.to_thread(self._engine_loop.stop, 5.0)
        await asyncio.to_thread(self._transfer_loop.stop, 5.0)
        self._transfer_loop.transport.close()

    async def status(self) -> WorkerStatus:
        """This worker's account of itself."""
        engine = self._engine
        return WorkerStatus(
            name=self.name,
            role=self.role,
            node=socket.gethostname(),
            pid=os.getpid(),
            state=self._state,
            model=self._model_name,
            incarnation=self.incarnation,
            running=engine.running,
            waiting=engine.waiting,
            blocks=engine.cache.counts(),
            prompt_tokens=engine.prompt_tokens,
            cached_tokens=engine.cached_tokens,
            resident_bytes=psutil.Process().memory_info().rss,
            block_size=engine.cache.block_size,
            max_model_len=engine.max_model_len,
            vocab_size=engine.model.vocab_size,
            fingerprint=engine.memory.layout.fingerprint,
        )

    # --- what gateways call -------------------------------------------------------------------------------------

    async def generate(self, request: Request, decode: str | None) -> Outcome:
        """Answer a request, or compute its prompt and hand it to the worker `decode`. Returns when this worker's part
        is over; tokens go to the gateway as they come."""
        if self._full:
            return Outcome("busy", queued=self._engine.waiting)
        loop = asyncio.get_running_loop()
        job = _Job(request, time.monotonic() + request.timeout_s, outcome=loop.create_future(), decode=decode)
        assert job.outcome is not None
        self._jobs[request.request_id] = job
        if decode is not None:
            sender = self._transfer_loop.sender
            self._transfer_loop.call(lambda: sender.start(request.request_id, job.deadline))
        try:
            await self._on_engine(lambda engine: engine.add(request, hand_off=decode is not None))
            return await asyncio.wait_for(asyncio.shield(job.outcome), request.timeout_s)
        except ValueError as error:
            return Outcome("failed", error=str(error))
        except asyncio.TimeoutError:
            return Outcome("failed", error=f"no answer within {request.timeout_s:.1f} s")
        finally:
            if not job.outcome.done():
                await self.abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        """Stop working on a request, wherever it stands here; unknown ids are fine."""
        job = self._jobs.get(request_id)
        if job is None:
            return
        if job.decode is not None:
            # The sender's event ends the job, once nothing is in flight.
            self._transfer_loop.call(lambda: self._transfer_loop.sender.cancel(request_id, "aborted"))
            return
        del self._jobs[request_id]
        if job.reserved is not None and not job.reserved.done():
            job.reserved.cancel()
        if job.outcome is not None and not job.outcome.done():
            job.outcome.set_result(Outcome("aborted"))
        await self._release(request_id)

    @property
    def _full(self) -> bool:
        """Whether a request more would be too many. Counts jobs as well as the engine's queue, which hears of them a
        moment later."""
        return self._engine.full or len(self._jobs) >= self._config.max_running + self._config.max_waiting

    # --- what other workers call --------------------------------------------------------------------------------

    async def describe(self) -> Peer:
        """What a peer needs to write into this worker's pool."""
        return self._self

    async def reserve(self, reserve: Reserve) -> Reservation | Outcome:
        """Keep blocks for a prompt that the caller computes. Waits for blocks as long as the request may wait; the
        answer is an Outcome when they are not to be had."""
        request = reserve.request
        if self._full:
            return Outcome("busy", queued=self._engine.waiting)
        job = _Job(request, time.monotonic() + request.timeout_s)
        job.reserved = asyncio.get_running_loop().create_future()
        self._jobs[request.request_id] = job
        try:
            await self._on_engine(lambda engine: engine.reserve(request))
            reserved = await asyncio.wait_for(asyncio.shield(job.reserved), request.timeout_s)
        except (ValueError, asyncio.TimeoutError, asyncio.CancelledError) as error:
            self._jobs.pop(request.request_id, None)
            await self._on_engine(lambda engine: engine.abort(request.request_id))
            return Outcome("failed", error=f"{self.name} cannot reserve: {error or type(error).__name__}")
        if self._jobs.get(request.request_id) is not job:
            # Aborted since the engine answered: the blocks are free again. No await may come between this check and
            # the opening of the lease, so that an abort finds either no reservation or a lease.
            return Outcome("aborted")
        lease = Lease(
            lease_id=request.request_id,
            sender=reserve.sender,
            sender_agent=reserve.sender_agent,
            sender_incarnation=reserve.sender_incarnation,
            first_block=reserved.first_block,
            blocks=reserved.blocks,
            deadline=time.monotonic() + self._transfer_config.lease_s,
        )
        await self._on_transfer(lambda loop: loop.receiver.open(lease))
        return Reservation(self.incarnation, reserved.first_block, reserved.blocks)

    async def transfer_failed(self, lease_id: str, reason: str) -> bool:
        """The sender gives up and has nothing in flight: compute here. False when the request is not wanted here."""
        lease = await self._on_transfer(lambda loop: loop.receiver.quarantine(lease_id))
        if lease is not None:
            await self._recompute(lease, reason)
        return lease_id in self._jobs

    async def transfer_active(self, lease_id: str) -> bool:
        """Whether this worker may still write under a lease it was given."""
        return bool(await self._on_transfer(lambda loop: loop.sender.active(lease_id)))

    async def cancel_transfer(self, lease_id: str) -> bool:
        """Stop writing under a lease. True once nothing can be in flight; False when that cannot be told yet."""
        await self._on_transfer(lambda loop: loop.sender.cancel(lease_id, "cancelled by the receiver"))
        until = time.monotonic() + self._transfer_config.call_timeout_s / 2
        while await self.transfer_active(lease_id):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(self._transfer_config.poll_interval_s)
        return lease_id not in self._undrained

    # --- engine thread ------------------------------------------------------------------------------------------

    def _turn(self) -> float | None:
        """One engine step, and where its results go."""
        if not self._engine.has_work:
            return None
        try:
            plan = self._engine.plan()
            if plan.started or plan.reserved:
                # Before the step runs, so that the decode worker's answer comes while a long prompt is computed.
                self._to_front(self._on_plan, plan)
            result = self._engine.run(plan.works)
        except Exception as error:
            _log.exception("engine step failed")
            failed = [Delta(one, 0, (), 0, error=f"engine: {error}") for one in self._engine.drop_running()]
            plan, result = StepPlan(), StepResult(deltas=failed)
        if result.deltas:
            self._to_front(self._on_deltas, result.deltas)
        for made in result.produced:
            offer = partial(self._transfer_loop.sender.offer, made.request_id, made.chunk, made.ending)
            self._transfer_loop.call(offer)
            if made.ending is not None:
                self._to_front(self._reserve_once, made.request_id)
        return 0 if plan.works else IDLE_RETRY_S

    # --- transfer thread ----------------------------------------------------------------------------------------

    def _on_transfer_event(self, event: Event) -> None:
        self._to_front(self._on_channel, event)

    # --- asyncio thread -----------------------------------------------------------------------------------------

    def _to_front(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s: background task failed", self.name, exc_info=error)

    async def _on_engine(self, function: Callable[[Engine], Any]) -> Any:
        return await asyncio.wrap_future(self._engine_loop.call(lambda: function(self._engine)))

    async def _on_transfer(self, function: Callable[[TransferLoop], Any]) -> Any:
        return await asyncio.wrap_future(self._transfer_loop.call(lambda: function(self._transfer_loop)))

    def _on_plan(self, plan: StepPlan) -> None:
        for request_id in plan.started:
            self._reserve_once(request_id)
        for reserved in plan.reserved:
            job = self._jobs.get(reserved.request_id)
            if job is not None and job.reserved is not None and not job.reserved.done():
                job.reserved.set_result(reserved)

    def _on_deltas(self, deltas: list[Delta]) -> None:
        by_gateway: dict[str, list[Delta]] = defaultdict(list)
        until = 0.0
        for delta in deltas:
            if (job := self._jobs.get(delta.request_id)) is not None:
                by_gateway[job.request.gateway].append(delta)
                until = max(until, job.deadline)
                if delta.finish_reason is not None or delta.error is not None:
                    self._finish(job, delta)
        for gateway, some in by_gateway.items():
            self._spawn(self._deliver(gateway, some, until))

    def _finish(self, job: _Job, delta: Delta) -> None:
        """The engine is done with a request; a hand-off that ended on its first token has nothing to send."""
        request_id = job.request.request_id
        self._jobs.pop(request_id, None)
        if job.outcome is not None and not job.outcome.done():
            job.outcome.set_result(Outcome("failed", error=delta.error) if delta.error else Outcome("done"))
        if job.decode is not None:
            self._transfer_loop.call(lambda: self._transfer_loop.sender.cancel(request_id, "finished"))
            self._spawn(self._abort_remote(job.decode, request_id))

    def _on_channel(self, event: Event) -> None:
        if isinstance(event, Accepted):
            self._spawn(self._accept(event))
        elif isinstance(event, Refused):
            self._spawn(self._recompute(event.lease, event.reason))
        else:
            if isinstance(event, SendFailed) and not event.drained:
                self._undrained.add(event.lease_id)
            self._spawn(self._sent(event))

    # --- handing a prompt over, sender's side -------------------------------------------------------------------

    def _reserve_once(self, request_id: str) -> None:
        """Ask for blocks while a long prompt is computed, or behind the first token of a short one: asking takes
        longer than its only step has to spare."""
        job = self._jobs.get(request_id)
        if job is not None and not job.reserving:
            job.reserving = True
            self._spawn(self._reserve_remote(job))

    async def _reserve_remote(self, job: _Job) -> None:
        """Ask the decode worker for blocks and connect the transfer to it."""
        assert job.decode is not None
        request_id, decode = job.request.request_id, job.decode
        left = job.deadline - time.monotonic()
        reserve = Reserve(job.request, self.name, self._self.agent, self.incarnation)
        try:
            answer = await self._directory.call(decode, "reserve", reserve, timeout=left)
            if isinstance(answer, Outcome):
                job.refused = answer if answer.status == "busy" else None
                raise PeerError(answer.error or f"{decode} is {answer.status}")
            peer = await self._peer(decode, answer.incarnation)
            await self._on_transfer(lambda loop: loop.open(request_id, answer, peer))
        except Exception as error:
            reason = f"no blocks on {decode}: {error}"
            await self._on_transfer(lambda loop: loop.sender.cancel(request_id, reason))
        if request_id not in self._jobs:
            # The request ended meanwhile, and the abort may have come before the reservation.
            await self._abort_remote(decode, request_id)

    async def _peer(self, name: str, incarnation: int) -> Peer:
        known = self._peers.get(name)
        if known is not None and known.incarnation == incarnation:
            return known
        if known is not None:
            agent = known.agent
            await self._on_transfer(lambda loop: loop.transport.disconnect(agent))
        peer: Peer = await self._directory.call(name, "describe", timeout=self._transfer_config.call_timeout_s)
        self._peers[name] = peer
        return peer

    async def _abort_remote(self, worker: str, request_id: str) -> None:
        try:
            await self._directory.call(worker, "abort", request_id, timeout=self._transfer_config.call_timeout_s)
        except PeerError as error:
            _log.info("request %s: abort: %s", request_id, error)

    async def _sent(self, event: Any) -> None:
        """A transfer has ended: give the blocks free and say how it went."""
        request_id = event.lease_id
        await self._on_engine(lambda engine: engine.sent(request_id))
        job = self._jobs.pop(request_id, None)
        if job is None or job.decode is None:
            return
        outcome = Outcome("handed off")
        if isinstance(event, SendFailed) and job.refused is not None:
            outcome = job.refused
        elif isinstance(event, SendFailed):
            outcome = Outcome("aborted" if event.reason == "aborted" else "failed", error=event.reason)
            if outcome.status == "failed" and event.drained and await self._hand_back(job.decode, event):
                outcome = Outcome("handed off")
            elif outcome.status == "aborted":
                await self._abort_remote(job.decode, request_id)
        if job.outcome is not None and not job.outcome.done():
            job.outcome.set_result(outcome)

    async def _hand_back(self, decode: str, event: SendFailed) -> bool:
        """Tell the decode worker that the blocks will not come; True when it goes on by computing them."""
        timeout = self._transfer_config.call_timeout_s
        try:
            _log.warning("request %s: transfer to %s failed: %s", event.lease_id, decode, event.reason)
            return bool(
                await self._directory.call(decode, "transfer_failed", event.lease_id, event.reason, timeout=timeout)
            )
        except PeerError:
            return False

    # --- taking a prompt over, receiver's side ------------------------------------------------------------------

    async def _accept(self, event: Accepted) -> None:
        lease, manifest = event.lease, event.manifest
        await self._on_engine(lambda e: e.accept(lease.lease_id, manifest.first_token, manifest.cached_tokens))

    async def _recompute(self, lease: Lease, reason: str) -> None:
        """The blocks of a lease are not to be trusted: compute the prompt here; they go to quarantine."""
        held = await self._on_engine(lambda engine: engine.recompute(lease.lease_id, lease.blocks))
        if held is not None:
            _log.warning("request %s: %s; computing the prompt here", lease.lease_id, reason)
            self._spawn(self._settle(lease, held))

    async def _release(self, request_id: str) -> None:
        """Take a request out of the engine; blocks that a peer may still write to go to quarantine first."""
        lease = await self._on_transfer(lambda loop: loop.receiver.quarantine(request_id))
        blocks = lease.blocks if lease is not None else ()
        held = await self._on_engine(lambda engine: engine.abort(request_id, blocks))
        if lease is not None:
            self._spawn(self._settle(lease, held))

    async def _settle(self, lease: Lease, held: list[int]) -> None:
        """Ask the sender until it confirms that nothing is in flight, or its life has ended; then free the blocks."""
        timeout, pause = self._transfer_config.call_timeout_s, SETTLE_RETRY_S
        while True:
            try:
                if await self._directory.call(lease.sender, "cancel_transfer", lease.lease_id, timeout=timeout):
                    break
            except PeerDead:
                break
            except PeerError as error:
                _log.warning("request %s: %s", lease.lease_id, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, SETTLE_RETRY_MAX_S)
        await self._on_transfer(lambda loop: loop.receiver.close(lease.lease_id))
        await self._on_engine(lambda engine: engine.cache.end_quarantine(held))

    # --- deadlines, leases, gateways ----------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look after everything that could otherwise wait for ever."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            try:
                await self._look_after()
            except Exception:
                # Whatever went wrong once must not leave everything unwatched from then on.
                _log.exception("%s: watch failed", self.name)

    async def _look_after(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._jobs.values() if job.outcome is None and now > job.deadline]:
            delta = Delta(job.request.request_id, 0, (), 0, error="deadline exceeded")
            self._spawn(self._deliver(job.request.gateway, [delta], now + GATEWAY_TIMEOUT_S))
            await self.abort(job.request.request_id)
        for lease in await self._on_transfer(lambda loop: loop.receiver.overdue(time.monotonic())):
            # The question may take as long as a lease; it is not asked twice meanwhile.
            lease.deadline = now + 2 * self._transfer_config.lease_s
            self._spawn(self._ask_about(lease))
        for gateway in {job.request.gateway for job in self._jobs.values()}:
            self._spawn(self._check_gateway(gateway))

    async def _ask_about(self, lease: Lease) -> None:
        """A lease is overdue: extend it if the sender is still at it, otherwise do without the sender."""
        config = self._transfer_config
        reason = "manifest lost"
        try:
            if await self._directory.call(lease.sender, "transfer_active", lease.lease_id, timeout=config.lease_s):
                deadline = time.monotonic() + config.lease_s
                await self._on_transfer(lambda loop: loop.receiver.extend(lease.lease_id, deadline))
                return
        except PeerError as error:
            reason = str(error)
        if await self._on_transfer(lambda loop: loop.receiver.quarantine(lease.lease_id)) is not None:
            await self._recompute(lease, reason)

    async def _deliver(self, gateway: str, deltas: list[Delta], until: float) -> None:
        """Bring tokens to a gateway, again and again while their requests may live: they say where they belong, so
        that bringing them twice does no harm."""
        while time.monotonic() < until:
            try:
                await self._directory.call(gateway, "deliver", deltas, timeout=GATEWAY_TIMEOUT_S)
                return
            except PeerDead:
                await self._abort_gateway(gateway)
                return
            except PeerError as error:
                _log.warning("%s", error)

    async def _check_gateway(self, gateway: str) -> None:
        try:
            await self._directory.call(gateway, "ping", timeout=GATEWAY_TIMEOUT_S)
        except PeerDead:
            await self._abort_gateway(gateway)
        except PeerError as error:
            _log.warning("%s", error)

    async def _abort_gateway(self, gateway: str) -> None:
        """A gateway is gone, and with it whoever wanted its requests answered."""
        for job in [job for job in self._jobs.values() if job.request.gateway == gateway]:
            await self.abort(job.request.request_id)
