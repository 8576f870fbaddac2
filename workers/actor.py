"""The worker: asyncio front, engine thread and transfer thread behind. Its role is data.

Gateways call `generate` and `abort`; other workers call `describe`, `reserve`, `transfer_failed`, `transfer_active`
and `cancel_transfer`. Tokens go to the request's gateway by `deliver`, one message per step and gateway. A prompt that
goes from one worker to another is handed over by workers/handover.py and taken over by workers/takeover.py.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from transfer import ucx
from transfer.channel import Accepted, Receiver, Refused, Sender
from transfer.config import TransferConfig
from transfer.directory import Directory, here
from transfer.gang import GangTransport
from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import WORKER, Address
from transfer.gossip.node import GossipNode
from transfer.gossip.summary import Load, Summary
from transfer.guide import Guide, GuideError, Guides
from transfer.messages import (
    Delta,
    Dispatch,
    Outcome,
    Peer,
    Place,
    Pulse,
    Request,
    Reservation,
    Reserve,
    Source,
    TransferStats,
    WorkerStatus,
)
from transfer.nixl_transport import NixlTransport, agent_name
from transfer.outline import Outline
from transfer.telemetry import SetUp, none
from workers.account import Account
from workers.arrivals import Arrivals
from workers.config import TiersConfig, WorkerConfig
from workers.cores import Cores, shared_cores
from workers.engine.engine import Engine
from workers.engine.model import Model
from workers.engine.step import Produced, StepPlan, StepResult
from workers.fetch import Fetch
from workers.front import Front, Job
from workers.gateways import TIMEOUT_S, Gateways
from workers.handover import HandOver
from workers.kv.tier_io import TierIO
from workers.loop import Loop
from workers.metrics import Metrics
from workers.outlines import Outlines
from workers.speeds import SpeedMeter
from workers.takeover import TakeOver
from workers.tracing import Traces
from workers.transfer import Event, TransferLoop
from workers.watch import Watch

_log = logging.getLogger(__name__)
IDLE_RETRY_S = 0.01
"""Pause of an engine whose queued work cannot run yet."""
SWITCH_INTERVAL_S = 0.0005
"""How long one Python thread may keep another waiting: calls and tokens must not wait for the engine's Python."""
NO_TIERS = TiersConfig()
DRAIN_POLL_S = 0.02
FLUSH_S = 1.0
"""How long what is left of traces may take to be sent when the worker ends."""
LEND_S, LEAVE_S = 1.0, 10.0
"""What others go on with is asked for within the first of these, and copied within the second."""


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
        tiers: TiersConfig = NO_TIERS,
        telemetry: SetUp = none,
    ) -> None:
        self.name = name
        self.role = role
        self.incarnation = time.time_ns()
        self._model_path = model
        self._model_name = model_name
        self._config = config
        self._transfer_config = transfer
        self._directory = directory
        self._tiers_config = tiers
        self._set_up_telemetry = telemetry
        self._tier_io: TierIO | None = None
        self._engine_loop = Loop("engine", self._turn)
        self._state = "starting"
        self._turns = 0
        self._cores: Cores | None = None
        self._transfers = TransferStats()
        self._speeds = SpeedMeter()
        self._arrivals = Arrivals()
        self._traces = Traces(name)
        self._gossip: GossipNode | None = None
        self._gateways = Gateways(directory, self._abort_gateway)

    async def place(self) -> Place:
        """Where this process runs."""
        return here()

    async def start(self, threads: int | None = None) -> WorkerStatus:
        """Load the model, on `threads` CPU threads unless the configuration sets them, and begin to serve. Raises
        StartError, TransportError, ModelUnsupported, OSError or ValueError for what cannot work."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._telemetry = self._set_up_telemetry(self.name)
        # In a thread that ends. OpenMP gives every thread that computes a team of its own, which stays with it. In a
        # process with more of these threads than cores, they sleep after each operator instead of spinning.
        with ThreadPoolExecutor(1, "load") as loader:
            wanted = self._config.threads or threads
            await asyncio.get_running_loop().run_in_executor(loader, self._load, wanted)
        if self._config.threads is None and self._engine.model.device.type == "cpu":
            self._cores = shared_cores()
        gc.freeze()  # what is loaded stays; the collector need not walk through it while tokens wait
        self._front = Front(self.name, self._engine, self._engine_loop, self._transfer_loop, self._guides)
        front, directory, config = self._front, self._directory, self._transfer_config
        engine, stats, speeds, traces = self._engine, self._transfers, self._speeds, self._traces
        self._account = Account(
            self.name, self._model_name, self.incarnation, engine, stats, speeds, self._telemetry.address
        )
        self._metrics = metrics = Metrics(self.name, engine, stats)
        self._handover = HandOver(self._peer, front, directory, config, speeds, metrics)
        self._takeover = TakeOver(self.name, self.incarnation, front, directory, config, stats, metrics, traces)
        self._outlines = Outlines(front)
        block_size = engine.cache.block_size
        self._fetch = Fetch(self.name, front, self._handover, self._takeover, block_size, directory, config, traces)
        self._engine_loop.start()
        self._transfer_loop.start()
        self._front.spawn(Watch(self.name, self._front, self._gateways, self._takeover, self.abort).run())
        self._state = "ready"
        return await self.status()

    def _load(self, threads: int | None) -> None:
        config, transfer = self._config, self._transfer_config
        ucx.configure(transfer)  # before the model, so that a mistake is told at once
        if threads is not None:
            torch.set_num_threads(threads)
        self._engine = Engine(Model(self._model_path, config.dtype, config.device), config)
        # The first user's request should not pay for lazy initialisation.
        self._engine.warm_up()
        self._journal = self._engine.watch()
        if self._tiers_config.host:
            self._tier_io = self._engine.attach(self.name, self._tiers_config, self._journal, self._wake)
        model = self._engine.model
        self._guides = Guides(self._model_path, model.vocab_size, model.eos)
        self._guides.load()
        memory = self._engine.memory
        own = NixlTransport(agent_name(self.name, self.incarnation), memory.flat, memory.layout, transfer)
        transport = GangTransport(own, self.name, self.incarnation, answer_s=transfer.call_timeout_s)
        self._peer = transport.peer
        self._transfer_loop = TransferLoop(
            transport,
            Sender(transport, self.incarnation, transport.sending(memory), transfer.stall_s, self._transfers),
            Receiver(self.incarnation, transport.receiving(memory), self._transfers),
            transfer.poll_interval_s,
            lambda event: self._front.from_thread(self._on_channel, event),
        )

    async def join(self, config: GossipConfig, seeds: Sequence[Address] = ()) -> Address:
        """Tell all routers what is here, from now on; returns where this node can be joined through."""
        summary = Summary(self.name, self.incarnation, config.keys_per_worker)
        self._gossip = await GossipNode.start(
            self.name,
            WORKER,
            incarnation=self.incarnation,
            config=config,
            seeds=seeds,
            summary=summary,
            load=self.load,
            before_tick=lambda: self._journal.read(summary),
        )
        return self._gossip.member.address

    async def gossip_address(self) -> Address:
        """Where gossip can be joined through; once this worker has joined itself."""
        assert self._gossip is not None
        return self._gossip.member.address

    async def pulse(self) -> Pulse:
        """Whether this process lives, and its engine makes steps: it does, when it has to do anything at all."""
        self._wake()
        busy = self._engine.has_work or bool(self._front.jobs)
        return Pulse(self._turns, busy, self._speeds.step_s(self._config.step_tokens), self._state == "ready")

    async def role_is(self, role: str) -> None:
        """What this worker is for from now on. What it has begun it ends."""
        self.role = role

    async def drain(self, seconds: float) -> int:
        """Take nothing new, and let what is here end for so long. Then others go on with the rest of it, from what is
        cached here, which they may still copy for a while. Returns how many requests that were."""
        self._state = "draining"
        until = time.monotonic() + seconds
        while self._asked and time.monotonic() < until:
            await asyncio.sleep(DRAIN_POLL_S)
        moved = self._asked
        await asyncio.gather(*(self._move(job) for job in moved))
        if moved:
            await asyncio.sleep(LEND_S)
        until = time.monotonic() + LEAVE_S
        while self._front.jobs and time.monotonic() < until:
            await asyncio.sleep(DRAIN_POLL_S)
        return len(moved)

    async def _move(self, job: Job) -> None:
        """Say that others are to go on with a request before it ends here, so that nobody takes it for a failure."""
        delta = Delta(job.id, 0, (), 0, error=f"{self.name} leaves", moved=True)
        await self._gateways.deliver(job.request.gateway, [delta], time.monotonic() + TIMEOUT_S)
        await self.abort(job.id)

    async def stop(self) -> None:
        """Abort what runs and end the threads."""
        self._state = "stopping"
        if self._gossip is not None:
            await self._gossip.stop()
        for request_id in list(self._front.jobs):
            await self.abort(request_id)
        for task in list(self._front.tasks):
            task.cancel()
        await asyncio.to_thread(self._engine_loop.stop, 5.0)
        await asyncio.to_thread(self._transfer_loop.stop, 5.0)
        self._transfer_loop.transport.close()
        if self._tier_io is not None:
            await asyncio.to_thread(self._tier_io.stop, 5.0)
        if self._cores is not None:
            self._cores.close()
        await asyncio.to_thread(self._telemetry.close, FLUSH_S)

    async def status(self) -> WorkerStatus:
        """This worker's account of itself."""
        return self._account.status(self.role, self._state, self.queued_tokens)

    async def outline(self, path: tuple[bytes, ...], salts: bytes | None, most: int) -> Outline:
        """What is cached here, for people; see `Outlines.look`."""
        return await self._outlines.look(path, salts, most)

    # --- what gateways call -------------------------------------------------------------------------------------

    async def generate(
        self,
        request: Request,
        decode: str | None,
        fetch: Source | None = None,
        new_tokens: int | None = None,
        dispatch: Dispatch | None = None,
    ) -> Outcome:
        """Answer a request, or compute its prompt and hand it to the worker `decode`. Returns when this worker's part
        is over; tokens go to the gateway as they come. `fetch` is where to copy a beginning of the prompt from. If more
        than `new_tokens` of it would have to be computed, the outcome is "stale"."""
        dispatch = dispatch or Dispatch()
        self._arrivals.arrived(dispatch, time.monotonic())
        queued_tokens = self.queued_tokens
        most = dispatch.most_queued
        if self._full or (most is not None and queued_tokens > most):
            return Outcome("busy", queued=self._engine.waiting, queued_tokens=queued_tokens)
        outcome = asyncio.get_running_loop().create_future()
        job = Job(request, time.monotonic() + request.timeout_s, outcome=outcome)
        job.queued_tokens = max(1, request.prompt_tokens - dispatch.cached)
        job.trace = self._traces.begin(request)
        self._front.jobs[job.id] = job
        try:
            guide = await self._front.guide(request)
            await self._fetch.prepare(request, fetch)
            if outcome.done():  # aborted meanwhile
                return await outcome
            if decode is not None and not await self._handover.begin(job):
                return Outcome("failed", error="a transfer of this request is over already")
            if outcome.done():
                self._handover.cancel(job.id, "aborted")
                return await outcome
            job.decode = decode
            if job.trace is not None:
                job.trace.queued = time.time_ns()
            if not await self._front.on_engine(
                lambda engine: self._add(engine, job, new_tokens, dispatch.cached, guide)
            ):
                return Outcome("stale")
            return await asyncio.wait_for(asyncio.shield(outcome), job.deadline - time.monotonic())
        except GuideError as error:
            return Outcome("refused", error=str(error))
        except ValueError as error:
            return Outcome("failed", error=str(error))
        except asyncio.TimeoutError:
            return Outcome("failed", error=f"no answer within {request.timeout_s:.1f} s")
        finally:
            if not outcome.done():
                await self.abort(job.id)

    @staticmethod
    def _add(engine: Engine, job: Job, new_tokens: int | None, believed: int, guide: Guide | None) -> bool:
        """Queue a request, unless more of its prompt would have to be computed than was expected."""
        if new_tokens is not None and job.request.prompt_tokens - engine.found(job.request) > new_tokens:
            return False
        engine.add(job.request, hand_off=job.decode is not None, believed=believed, guide=guide)
        job.queued_tokens = 0  # the engine counts it from now on
        return True

    async def abort(self, request_id: str) -> None:
        """Stop working on a request, wherever it stands here; unknown ids are fine."""
        job = self._front.jobs.get(request_id)
        if job is None:
            return
        if job.decode is not None:
            self._handover.cancel(request_id, "aborted")
            return
        del self._front.jobs[request_id]
        job.end(Outcome("aborted"))
        job.leaves("aborted")
        self._fetch.cancel(request_id)
        await self._takeover.release(job)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that were accepted and are not computed yet, as far as is known."""
        return self._engine.queued_tokens + sum(job.queued_tokens for job in self._front.jobs.values())

    def load(self) -> Load:
        """How busy this worker is."""
        blocks = self._engine.cache.counts()
        return Load(
            queued_tokens=self.queued_tokens,
            running=self._engine.running,
            prompt_tokens_s=self._speeds.prompt_tokens_s,
            free_blocks=max(0, blocks["free"] + blocks["cached"] - blocks["pinned"]),  # it changes while it is read
            accepted=self._arrivals.latest(time.monotonic()),
        )

    @property
    def _full(self) -> bool:
        """Whether a request more would be too many, as any is for a worker that leaves. Counts jobs as well as the
        engine's queue, which hears of them a moment later."""
        most = self._config.max_running + self._config.max_waiting
        return self._state != "ready" or self._engine.full or len(self._asked) >= most

    @property
    def _asked(self) -> list[Job]:
        """What clients asked for."""
        return [job for job in self._front.jobs.values() if not job.aside]

    # --- what other workers call --------------------------------------------------------------------------------

    async def describe(self) -> Peer:
        """What a peer needs to write into this worker's pool."""
        return self._peer

    async def reserve(self, reserve: Reserve) -> Reservation | Outcome:
        """Keep blocks for a prompt that the caller computes; see `TakeOver.reserve`."""
        if self._full:
            return Outcome("busy", queued=self._engine.waiting)
        return await self._takeover.reserve(reserve)

    async def lend(self, request: Request, reservation: Reservation, borrower: str, incarnation: int) -> Outcome:
        """Write what is cached here of a prompt into a peer's blocks; see `Fetch.lend`. "stale" when the peer knows
        another life of this worker, whose writes it would not accept."""
        if incarnation != self.incarnation:
            return Outcome("stale")
        return await self._fetch.lend(request, reservation, borrower)

    async def transfer_failed(self, lease_id: str, reason: str) -> bool:
        """The sender gives up; see `TakeOver.transfer_failed`."""
        return await self._takeover.transfer_failed(lease_id, reason)

    async def transfer_active(self, lease_id: str) -> bool:
        """Whether this worker is still at a transfer; see `HandOver.active`."""
        return await self._handover.active(lease_id)

    async def cancel_transfer(self, lease_id: str) -> bool:
        """A receiver wants its blocks back; see `HandOver.stop_writing`."""
        return await self._handover.stop_writing(lease_id)

    # --- engine thread ------------------------------------------------------------------------------------------

    def _turn(self) -> float | None:
        """One engine step, and where its results go."""
        self._turns += 1
        if not self._engine.has_work:
            self._leave_cores()
            return None
        try:
            plan = self._engine.plan()
            if plan.started or plan.reserved or plan.promoted:
                # Before the step runs, so that the decode worker's answer comes while a long prompt is computed.
                self._front.from_thread(self._on_plan, plan)
            self._share_cores(plan)
            begun = time.monotonic()
            for sequence in plan.began:
                self._metrics.queued("prompt", begun - sequence.arrived_at)
            traced = self._traces.starting(plan.works)
            result = self._engine.run(plan.works, self._offer)
            took = time.monotonic() - begun
            self._traces.stepped(traced)
            self._speeds.step(plan.works, took)
            self._metrics.step(plan.works, took)
            if (tiers := self._engine.cache.tiers) is not None:
                tiers.speeds.prompt_tokens_s = self._speeds.prompt_tokens_s
        except Exception as error:
            _log.exception("engine step failed")
            failed = [Delta(one, 0, (), 0, error=f"engine: {error}") for one in self._engine.drop_running()]
            plan, result = StepPlan(), StepResult(deltas=failed)
        if result.deltas:
            self._front.from_thread(self._on_deltas, result.deltas)
        for made in result.produced:
            self._offer(made)
            if made.ending is not None:
                self._front.from_thread(self._handover.computed, made.request_id)
        return 0 if plan.works else IDLE_RETRY_S

    def _wake(self) -> None:
        """There is something to do for the engine thread; any thread may call this."""
        self._engine_loop.call(lambda: None)

    def _share_cores(self, plan: StepPlan) -> None:
        """Compute with as many threads as the other workers of this machine leave."""
        if not plan.works:
            self._leave_cores()
        elif self._cores is not None and (share := self._cores.enter()) != torch.get_num_threads():
            torch.set_num_threads(share)

    def _leave_cores(self) -> None:
        if self._cores is not None:
            self._cores.leave()

    def _offer(self, made: Produced) -> None:
        """Let the sender have what became final."""
        self._transfer_loop.call(partial(self._transfer_loop.sender.offer, made.request_id, made.chunk, made.ending))

    # --- asyncio thread -----------------------------------------------------------------------------------------

    def _on_plan(self, plan: StepPlan) -> None:
        for request_id in plan.started:
            self._handover.reserve_once(request_id)
        for reserved in plan.reserved:
            self._takeover.granted(reserved)
        for request_id in plan.promoted:
            self._fetch.promoted(request_id)

    def _on_deltas(self, deltas: list[Delta]) -> None:
        by_gateway: dict[str, list[Delta]] = defaultdict(list)
        until = 0.0
        for delta in deltas:
            if (job := self._front.jobs.get(delta.request_id)) is not None:
                if job.trace is not None:
                    job.trace.cached = delta.cached_tokens
                by_gateway[job.request.gateway].append(delta)
                until = max(until, job.deadline)
                if delta.finish_reason is not None or delta.error is not None:
                    self._finish(job, delta)
        for gateway, some in by_gateway.items():
            self._front.spawn(self._gateways.deliver(gateway, some, until))

    def _finish(self, job: Job, delta: Delta) -> None:
        """The engine is done with a request; a hand-off that ended on its first token has nothing to send."""
        self._front.jobs.pop(job.id, None)
        failed = Outcome("refused" if delta.refused else "failed", error=delta.error)
        job.end(failed if delta.error else Outcome("done"))
        job.leaves("refused" if delta.refused else delta.error or "")
        if job.decode is not None:
            self._handover.forgo(job)

    def _on_channel(self, event: Event) -> None:
        if isinstance(event, Accepted):
            self._front.spawn(self._takeover.accept(event))
        elif isinstance(event, Refused):
            self._front.spawn(self._takeover.refuse(event))
        else:
            self._front.spawn(self._handover.ended(event))

    async def _abort_gateway(self, gateway: str) -> None:
        """A gateway is gone, and with it whoever wanted its requests answered."""
        for job in [job for job in self._front.jobs.values() if job.request.gateway == gateway]:
            await self.abort(job.id)
