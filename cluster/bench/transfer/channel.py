"""The KV channel between two processes, beside NIXL itself and beside the channel without checks, in turns.

No engine runs: the sender has everything at once, or at the pace of a prompt that is computed. Both ends poll without a
pause.
"""

from __future__ import annotations

import multiprocessing
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from cluster.bench.report import Figures, medians
from cluster.errors import UserError
from transfer.channel import Accepted, Chunk, Ending, Layers, Lease, Receiver, Sender
from transfer.config import TransferConfig
from transfer.layout import KVLayout
from transfer.messages import Peer, Reservation, TransferStats
from transfer.nixl_transport import NixlTransport, agent_name
from workers.kv.memory import KVMemory

RAW, CHANNEL, UNCHECKED = "NIXL alone", "channel", "channel without checks"
MBYTES_S, MS = "at once: MB/s", "at once: ms"
PACED_MS, TAIL_MS = "behind computation: ms", "behind computation: ms after its end"
TIMEOUT_S = 30.0
STALL_S = 10.0
"""Of the sender; longer than any write here may take."""
PACE_S = 0.25
"""In which a chunk of 512 tokens is computed at 2,000 tokens a second."""
CHUNKS = 4
"""A prompt's chunks; the last one travels in as many groups of layers."""


class _Unchecked:
    """A pool whose blocks are taken on trust."""

    def __init__(self, memory: KVMemory) -> None:
        self.layers = memory.layers
        self.size = memory.size

    def checksum(self, blocks: Sequence[int], layers: Layers) -> tuple[int, ...]:
        """Always the same."""
        return (0,)


@dataclass(frozen=True, slots=True)
class _Expect:
    """What the other process is to wait for: a lease's manifest or, without one, a bare notification."""

    lease: Lease | None
    checked: bool = True


class _End:
    """One process's pool, transport and ends of the channel, which poll by turns."""

    def __init__(self, name: str, layout: KVLayout, incarnation: int) -> None:
        self.incarnation = incarnation
        self.memory = KVMemory(layout, torch.device("cpu"))
        self.memory.flat.fill_(incarnation)  # memory that was never written to would first have to be found
        self.transport = NixlTransport(agent_name(name, incarnation), self.memory.flat, layout, TransferConfig())
        self.peer = self.transport.describe(name, incarnation)

    def pool(self, checked: bool) -> Any:
        """The blocks, with or without checksums."""
        return self.memory if checked else _Unchecked(self.memory)


def measure(layout: KVLayout, prompt_blocks: int, rounds: int) -> dict[str, Figures]:
    """Each way to send `prompt_blocks` blocks: all at once, and through the channel at the pace of a prompt that is
    computed. Raises UserError when they do not arrive."""
    sender = _End("sender", layout, 1)
    sides: dict[str, list[Figures]] = {RAW: [], CHANNEL: [], UNCHECKED: []}
    blocks = tuple(range(prompt_blocks))
    size = sender.memory.size(prompt_blocks, (0, sender.memory.layers))
    with _receiving(layout, sender.peer) as (line, peer):
        sender.transport.connect(peer)
        for number in range(rounds + 1):
            for side, some in sides.items():
                if side == RAW:
                    seconds, paced = _raw(sender, peer, line, size), {}
                else:
                    seconds, _ = _through(sender, peer, line, blocks, side == CHANNEL, 0.0)
                    whole, tail = _through(sender, peer, line, blocks, side == CHANNEL, PACE_S)
                    paced = {PACED_MS: whole * 1000, TAIL_MS: tail * 1000}
                if number:  # the first ones open connections
                    some.append({MBYTES_S: size / seconds / 1e6, MS: seconds * 1000, **paced})
    sender.transport.close()
    return {side: medians(some) for side, some in sides.items()}


def _through(
    end: _End, peer: Peer, line: Connection, blocks: tuple[int, ...], checked: bool, pace_s: float
) -> tuple[float, float]:
    """Send blocks as a worker does, of which a chunk is computed every `pace_s` seconds. Seconds until the receiver has
    accepted them, from the first one's and from the last one's being offered on."""
    lease_id = uuid.uuid4().hex
    lease = Lease(lease_id, "sender", end.transport.agent, end.incarnation, 0, blocks, float("inf"))
    line.send(_Expect(lease, checked))
    _answer(line)
    sender = Sender(end.transport, end.incarnation, end.pool(checked), STALL_S, TransferStats())
    offers = list(_offers(blocks, end.memory.layers))
    begun = offered = time.monotonic()
    sender.start(lease_id, begun + TIMEOUT_S)
    sender.connect(lease_id, Reservation(peer.incarnation, 0, blocks), peer.agent)
    while sender.open:
        now = time.monotonic()
        while offers and now >= begun + offers[0][0] * pace_s:
            _, chunk = offers.pop(0)
            sender.offer(lease_id, chunk, None if offers else Ending(0, 0))
            offered = now
        sender.step(now)
    accepted = float(_answer(line))
    return accepted - begun, accepted - offered


def _offers(blocks: tuple[int, ...], layers: int) -> Iterator[tuple[float, Chunk]]:
    """What a prompt's computation makes final, and when, in chunks behind its first one."""
    *early, last = (tuple(piece.tolist()) for piece in np.array_split(blocks, CHUNKS))
    for number, chunk in enumerate(early):
        yield number, Chunk(chunk[0], chunk, (0, layers))
    parts = min(CHUNKS, layers)
    cuts = [layers * part // parts for part in range(parts + 1)]
    for number, (begin, stop) in enumerate(pairwise(cuts), 1):
        yield CHUNKS - 2 + number / parts, Chunk(last[0], last, (begin, stop))


def _raw(end: _End, peer: Peer, line: Connection, size: int) -> float:
    """Write as many bytes as one piece, by NIXL alone; seconds until the receiver has been told."""
    line.send(_Expect(None))
    _answer(line)
    agent: Any = end.transport._agent
    begun = time.monotonic()
    ends = (end.peer.base, end.peer.device), (peer.base, peer.device)
    mine, theirs = (agent.get_xfer_descs([(base, size, device)], "DRAM") for base, device in ends)
    handle = agent.initialize_xfer("WRITE", mine, theirs, peer.agent, b"raw")
    agent.transfer(handle)
    while agent.check_xfer_state(handle) == "PROC":
        pass
    handle.release()
    return float(_answer(line)) - begun


@contextmanager
def _receiving(layout: KVLayout, sender: Peer) -> Iterator[tuple[Connection, Peer]]:
    """The other process: the line to it, and what is needed to write to it. It ends with the block."""
    line, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_receive, args=(layout, sender, its), daemon=True)
    process.start()
    its.close()
    try:
        yield line, _answer(line)
    finally:
        line.close()  # which the other process takes for the end
        process.join(TIMEOUT_S)
        process.kill()
        process.join()


def _receive(layout: KVLayout, sender: Peer, line: Connection) -> None:
    """What the other process does: answers each `_Expect` when it is ready, and with the time when it was fulfilled."""
    end = _End("receiver", layout, 2)
    end.transport.connect(sender)
    line.send(end.peer)
    try:
        while True:
            wanted: _Expect = line.recv()
            receiver = Receiver(end.incarnation, end.pool(wanted.checked), TransferStats())
            if wanted.lease is not None:
                receiver.open(wanted.lease)
            line.send("ready")
            _await(end, receiver, wanted)
            line.send(time.monotonic())
    except EOFError:
        end.transport.close()


def _await(end: _End, receiver: Receiver, wanted: _Expect) -> None:
    """Poll until what is wanted has come. Raises UserError."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        for agent, message in end.transport.receive():
            if wanted.lease is None:
                return
            judged = receiver.on_notification(agent, message)
            if isinstance(judged, Accepted):
                return
            if judged is not None:
                raise UserError(f"a manifest was refused: {judged.reason}")
    raise UserError("no notification came")


def _answer(line: Connection) -> Any:
    if not line.poll(TIMEOUT_S):
        raise UserError("the receiving process does not answer")
    try:
        return line.recv()
    except EOFError:
        raise UserError("the receiving process has ended") from None
