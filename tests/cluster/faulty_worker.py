"""A worker that fails as told: its transport raises, delays, loses or spoils, or its process stops or dies.

Blocks that nobody owns hold NaN, so that reading what was freed or never written shows.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray

import workers.actor
import workers.fetch
import workers.takeover
import workers.watch
from cluster.launch import MAX_CONCURRENCY, Cluster
from cluster.models import served_name
from tests.workers.drive import poison
from tests.workers.house import Answer, Gateway
from transfer.channel import Accepted, Layers, Lease, Receiver, Refused, Sent, TransportError
from transfer.directory import PeerDead, RayDirectory
from transfer.layout import Slices
from transfer.messages import (
    Delta,
    Manifest,
    Outcome,
    Peer,
    Request,
    Reservation,
    Reserve,
    TransferStats,
    decode,
)
from transfer.nixl_transport import NixlTransport
from workers.actor import Worker
from workers.kv.memory import KVMemory
from workers.transfer import Event

ANSWERED_S = 0.03
"""After which a reservation has reached who asked for it."""
RESTART_S = 30.0
LISTENER = "listener"
TOP_BIT = 0x40
"""Of a float32's exponent, in its last byte: a value that is as wrong as can be."""


@dataclass(slots=True)
class Fault:
    """One thing that goes wrong: `what` happens `times` times, after the first `skip` chances for it have passed.

    `once` is a file: of all workers that have this fault only the first strikes, and leaves its name there. With a
    `signal`, the worker's process gets that instead. `seconds` is how long writes are delayed and notifications kept
    back at most, `place` which of a lease's blocks and of its regions has the flipped bit.
    """

    what: str = ""
    times: int = 1
    skip: int = 0
    seconds: float = 0.0
    place: int = 0
    signal: int = 0
    once: str = ""
    struck: int = 0
    kept: list[tuple[str, bytes]] = field(default_factory=list)


class Faults:
    """The fault that a worker has at present."""

    def __init__(self, worker: str) -> None:
        self.now = Fault()
        self._worker = worker

    def strikes(self, what: str) -> bool:
        """Whether this is to go wrong now. Where a signal is asked for, the process gets it here instead."""
        fault = self.now
        if fault.what != what:
            return False
        if fault.skip:
            fault.skip -= 1
            return False
        if fault.struck >= fault.times or not self._first(fault.once):
            return False
        fault.struck += 1
        if fault.signal:
            os.kill(os.getpid(), fault.signal)
        return not fault.signal

    def _first(self, once: str) -> bool:
        if not once:
            return True
        try:
            with Path(once).open("x") as file:
                file.write(self._worker)
        except FileExistsError:
            return False
        return True


@dataclass(slots=True)
class Write:
    """A write that begins at `begins` (monotonic) and not while `gate` is the worker's fault, or never; `fails` when it
    has ended."""

    arguments: tuple[Any, ...]
    begins: float = 0.0
    gate: Fault | None = None
    lost: bool = False
    fails: bool = False
    handle: Any = None


class FaultyTransport:
    """A `NixlTransport` in which things go wrong. Faults: "connect", "write", "last write" (which has the manifest) and
    "notify" raise; "done" raises when the write has ended, "lost" without a write; "delay" lets a write begin later,
    "gate" when the fault is over; "drop", "double" and "hold" are for notifications that arrive. "written" and "last
    written" are for signals."""

    def __init__(self, faults: Faults, *arguments: Any) -> None:
        self._faults = faults
        self._inner = NixlTransport(*arguments)
        self._kept_since = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def connect(self, peer: Peer) -> None:
        self._raise("connect")
        self._inner.connect(peer)

    def write(
        self,
        agent: str,
        local: Sequence[int],
        remote: Sequence[int],
        layers: Layers,
        notify: bytes,
        slices: Slices | None = None,
    ) -> Write:
        last = "last " if notify else ""
        self._raise(f"{last}write")
        write = Write((agent, local, remote, layers, notify, slices), fails=self._faults.strikes("done"))
        if self._faults.strikes("delay"):
            write.begins = time.monotonic() + self._faults.now.seconds
        elif self._faults.strikes("gate"):
            write.gate = self._faults.now
        elif self._faults.strikes("lost"):
            write.lost = True
        else:
            write.handle = self._inner.write(*write.arguments)
        self._faults.strikes(f"{last}written")
        return write

    def done(self, write: Write) -> bool:
        if write.lost:
            raise TransportError("injected: lost")
        if write.handle is None:
            if time.monotonic() < write.begins or write.gate is self._faults.now:
                return False
            write.handle = self._inner.write(*write.arguments)
        ended = self._inner.done(write.handle)
        if ended and write.fails:
            raise TransportError("injected: done")
        return ended

    def release(self, write: Write) -> None:
        if write.handle is not None:
            self._inner.release(write.handle)

    def notify(self, agent: str, message: bytes) -> None:
        self._raise("notify")
        self._inner.notify(agent, message)

    def receive(self) -> list[tuple[str, bytes]]:
        fault, now = self._faults.now, time.monotonic()
        found: list[tuple[str, bytes]] = []
        if fault.what == "double":  # once more with whatever comes later
            found += fault.kept
        for one in self._inner.receive():
            if self._faults.strikes("drop"):
                continue
            if self._faults.strikes("double"):
                fault.kept.append(one)
                found += [one, one]
                continue
            if self._faults.strikes("hold"):
                self._kept_since = self._kept_since if fault.kept else now
                fault.kept.append(one)
                continue
            found.append(one)
        if fault.what == "hold" and (len(fault.kept) == fault.times or now > self._kept_since + fault.seconds):
            found += reversed(fault.kept)
            fault.kept.clear()
        return found

    def _raise(self, what: str) -> None:
        if self._faults.strikes(what):
            raise TransportError(f"injected: {what}")


class FaultyReceiver(Receiver):
    """A receiver whose memory is not what was written: "flip" is for the moment before a manifest is judged. "manifest"
    and "judged" are for signals before and after."""

    def __init__(self, faults: Faults, incarnation: int, memory: KVMemory, stats: TransferStats) -> None:
        super().__init__(incarnation, memory, stats)
        self._faults = faults
        self._memory = memory
        self._blocks: dict[str, tuple[int, ...]] = {}

    def open(self, lease: Lease) -> None:
        self._blocks[lease.lease_id] = lease.blocks
        super().open(lease)

    def on_notification(self, agent: str, data: bytes) -> Accepted | Refused | None:
        self._faults.strikes("manifest")
        blocks = self._blocks.get(decode(Manifest, data).lease_id)
        if blocks and self._faults.strikes("flip"):
            self._flip(blocks[self._faults.now.place])
        judged = super().on_notification(agent, data)
        self._faults.strikes("judged")
        return judged

    def _flip(self, block: int) -> None:
        """A bit of the block's first token, which is always there."""
        region = self._memory.layout.regions()[self._faults.now.place]
        self._memory.flat[region.offset + block * region.block_bytes + 3] ^= TOP_BIT


class FaultyWorker(Worker):
    """A worker with a fault. For signals there are, besides those of transport and receiver: "generate", "reserve",
    "reserved" (nobody has been told), "answered", "tokens" (nobody has been told), "sent", "lend" and "cancel"."""

    def __init__(self, name: str, *arguments: Any) -> None:
        super().__init__(name, *arguments)
        self._faults = Faults(name)

    def _load(self, threads: int | None) -> None:
        workers.actor.NixlTransport = partial(FaultyTransport, self._faults)  # type: ignore[misc,assignment]
        workers.actor.Receiver = partial(FaultyReceiver, self._faults)  # type: ignore[misc,assignment]
        workers.watch.INTERVAL_S = 0.1
        workers.takeover.SETTLE_RETRY_MAX_S = 0.5
        workers.fetch.LATE_S = 0.0  # one fault after the other is to strike
        super()._load(threads)
        self._engine.memory.flat.fill_(0xFF)

    async def inject(self, fault: Fault) -> None:
        """From now on this goes wrong, and nothing else."""
        self._faults.now = fault

    async def struck(self) -> int:
        """How often the present fault has struck."""
        return self._faults.now.struck

    async def meet(self, name: str) -> None:
        """Call another worker. If what is known of it is a former life, that is found out now."""
        with contextlib.suppress(PeerDead):
            await self._directory.call(name, "place", timeout=5.0)

    async def open_ends(self) -> list[str]:
        """What is under way: jobs, leases, transfers."""
        ends = list(self._front.jobs)
        if await self._front.on_transfer(lambda loop: loop.receiver.waiting):
            ends.append("a lease")
        if await self._front.on_transfer(lambda loop: loop.sender.open):
            ends.append("a transfer")
        return ends

    async def generate(self, *arguments: Any) -> Outcome:
        self._faults.strikes("generate")
        return await super().generate(*arguments)

    async def reserve(self, reserve: Reserve) -> Reservation | Outcome:
        self._faults.strikes("reserve")
        answer = await super().reserve(reserve)
        self._faults.strikes("reserved")
        asyncio.get_running_loop().call_later(ANSWERED_S, self._faults.strikes, "answered")
        return answer

    async def lend(self, request: Request, reservation: Reservation, borrower: str, incarnation: int) -> Outcome:
        self._faults.strikes("lend")
        return await super().lend(request, reservation, borrower, incarnation)

    async def cancel_transfer(self, lease_id: str) -> bool:
        self._faults.strikes("cancel")
        return await super().cancel_transfer(lease_id)

    def _turn(self) -> float | None:
        wait = super()._turn()
        poison(self._engine)
        return wait

    def _on_deltas(self, deltas: list[Delta]) -> None:
        self._faults.strikes("tokens")
        super()._on_deltas(deltas)

    def _on_channel(self, event: Event) -> None:
        if isinstance(event, Sent):
            self._faults.strikes("sent")
        super()._on_channel(event)


class Listener(Gateway):
    """A gateway for requests that a test gives to workers of its choice."""

    async def answer(self, request_id: str, tokens: int, within_s: float) -> tuple[list[int | None], str | None]:
        """The tokens and the error of a request that is over. Raises TimeoutError."""
        answer = self.answers.setdefault(request_id, Answer())
        await asyncio.wait_for(answer.over.wait(), within_s)
        return [answer.tokens.get(index) for index in range(tokens)], answer.error

    async def finished(self, request_id: str) -> bool:
        """Whether a worker has said that this answer is complete."""
        return self.answers.setdefault(request_id, Answer()).length is not None


def listener(cluster: Cluster) -> Any:
    """A `Listener` in this cluster."""
    options = {"name": LISTENER, "namespace": cluster._name, "num_cpus": 0, "max_concurrency": MAX_CONCURRENCY}
    return ray.remote(Listener).options(**options).remote()


def restart(cluster: Cluster, names: Sequence[str], kind: type[Worker] = FaultyWorker) -> None:
    """Start the next lives of workers whose processes have been killed, under their names."""
    config, ready = cluster.config, []
    for name in names:
        until = time.monotonic() + RESTART_S
        ray.kill(cluster._actors[name])  # Ray keeps the name of an actor that has died by itself
        while _known(cluster, name):
            assert time.monotonic() < until, f"{name} is still there"
            time.sleep(0.02)
        actor = ray.remote(kind).options(
            name=name,
            namespace=cluster._name,
            num_cpus=0,
            max_concurrency=MAX_CONCURRENCY,
            runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "false"}},
        )
        settings = (cluster._model, served_name(config.model.name), config.worker, config.transfer)
        made = actor.remote(name, dict(config.workers)[name], *settings, RayDirectory(cluster._name))
        cluster._actors[name] = made
        ready.append(made.start.remote(1))
    ray.get(ready, timeout=RESTART_S)
    seeds = cluster.seeds()
    ray.get([cluster._actors[name].join.remote(cluster.gossip, seeds) for name in names], timeout=RESTART_S)


def _known(cluster: Cluster, name: str) -> bool:
    try:
        ray.get_actor(name, cluster._name)
    except ValueError:
        return False
    return True
