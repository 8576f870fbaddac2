"""Gangs for tests of the transfer: ranks with a pool, a NIXL agent and a thread each, in one process and without a
model.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from transfer.channel import Chunk, Ending, Lease, Receiver, Sender
from transfer.config import TransferConfig
from transfer.gang import GangTransport
from transfer.layout import KVLayout, LayerGeometry, Shard
from transfer.messages import Reservation, TransferStats
from transfer.nixl_transport import NixlTransport, agent_name
from workers.data_plane import DataPlane
from workers.kv.memory import KVMemory
from workers.transfer import Event, TransferLoop

HEADS, BLOCKS, BLOCK, LAYERS = (4, 8), 12, 4, 2
POLL_S, TIMEOUT_S, STALL_S = 0.001, 20.0, 30.0
CONFIG = TransferConfig()


class Rank:
    """One rank's pool and agent. Every element of the pool of a gang of `sign` says which block, head, layer and kind
    it belongs to. `handles` of writes have not been released."""

    def __init__(self, name: str, sign: int, shard: Shard, incarnation: int) -> None:
        layers = tuple(LayerGeometry(count // shard.of * shard.count, 8, 6) for count in HEADS)
        self.memory = KVMemory(KVLayout("model", "float32", BLOCK, layers, BLOCKS, shard), torch.device("cpu"))
        for number, piece in zip(shard.slices, self.memory.slices, strict=True):
            for layer, (keys, values) in enumerate(zip(piece.keys, piece.values, strict=True)):
                for kind, part in enumerate((keys, values)):
                    heads = torch.arange(part.shape[1]) + number * part.shape[1]
                    block = torch.arange(BLOCKS).repeat_interleave(BLOCK)
                    whole = sign * (1 + block[:, None] * 1000 + heads[None] * 10 + layer * 2 + kind)
                    part.copy_(whole[:, :, None].expand(part.shape))
        self.transport = NixlTransport(agent_name(name, incarnation), self.memory.flat, self.memory.layout, CONFIG)
        self.handles = 0
        write, release = self.transport.write, self.transport.release

        def counted(*arguments: Any) -> Any:
            handle = write(*arguments)
            self.handles += 1
            return handle

        def released(handle: Any) -> None:
            self.handles -= 1
            release(handle)

        self.transport.write, self.transport.release = counted, released  # type: ignore[method-assign]

    def holds(self, block: int) -> list[int]:
        """What is in a block, an element of each head; they must agree within it."""
        found = []
        for part in (*self.memory.keys, *self.memory.values):
            heads = part[block * BLOCK : (block + 1) * BLOCK].permute(1, 0, 2).flatten(1)
            assert (heads == heads[:, :1]).all()
            found += heads[:, 0].int().tolist()
        return found


class Gang:
    """A worker of `size` ranks, whose first has a `TransferLoop` as a worker has; `events` are what comes out of it."""

    def __init__(self, name: str, sign: int, size: int, of: int, incarnation: int = 7, answer_s: float = 10.0) -> None:
        self.name, self.incarnation = name, incarnation
        self.ranks = [Rank(f"{name}/{rank}", sign, Shard.of_rank(rank, size, of), incarnation) for rank in range(size)]
        self.planes = [DataPlane(one.transport, one.memory, POLL_S) for one in self.ranks[1:]]
        for plane in self.planes:
            plane.start()
        self.events: list[Event] = []
        self.stats = TransferStats()
        own = self.ranks[0]
        self.transport = GangTransport(own.transport, name, incarnation, self, size, answer_s)
        self.sender = Sender(self.transport, incarnation, self.transport.sending(own.memory), STALL_S, self.stats)
        self.receiver = Receiver(incarnation, self.transport.receiving(own.memory), self.stats)
        self.loop = TransferLoop(self.transport, self.sender, self.receiver, POLL_S, self.events.append)
        self.loop.start()

    def call(self, rank: int, method: str, *arguments: Any) -> Future[Any]:
        return self.planes[rank - 1].ask(method, *arguments)

    def do(self, function: Callable[[], Any]) -> Any:
        """In the thread of the transfer loop."""
        return self.loop.call(function).result(TIMEOUT_S)

    def close(self) -> None:
        self.loop.stop(5.0)
        for plane in self.planes:
            plane.close(5.0)
        self.transport.close()


def until(condition: Callable[[], Any]) -> Any:
    """What it returns as soon as that is true."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.001)
    raise AssertionError("timed out")


def begin(p: Gang, d: Gang, local: Sequence[int], remote: Sequence[int], lease_id: str = "r") -> None:
    """A prompt's blocks are computed on P, in two chunks of which the last goes in two groups of layers, and D keeps
    blocks for them."""
    lease = Lease(lease_id, p.name, p.transport.peer.agent, p.incarnation, 0, tuple(remote), time.monotonic() + 60)
    d.do(lambda: d.receiver.open(lease))
    p.do(lambda: p.sender.start(lease_id, time.monotonic() + TIMEOUT_S))
    p.do(lambda: p.loop.open(lease_id, Reservation(d.incarnation, 0, tuple(remote)), d.transport.peer))
    first, rest = tuple(local[:1]), tuple(local[1:])
    p.do(lambda: p.sender.offer(lease_id, Chunk(0, first, (0, LAYERS))))
    p.do(lambda: p.sender.offer(lease_id, Chunk(1, rest, (0, 1))))
    p.do(lambda: p.sender.offer(lease_id, Chunk(1, rest, (1, LAYERS)), Ending(42, 3)))
