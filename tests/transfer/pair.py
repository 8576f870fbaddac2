"""A sender and a receiver over the in-memory transport, for tests of one transfer at a time."""

import dataclasses

from transfer.channel import (
    Accepted,
    Chunk,
    Ending,
    Lease,
    Receiver,
    Refused,
    Sender,
    SendFailed,
    Sent,
)
from transfer.loopback import LoopbackPool, LoopbackTransport, Network
from transfer.messages import Manifest, Reservation, TransferStats, decode, encode

ENDING = Ending(first_token=5, cached_tokens=16)
DEADLINE = 10.0
LAYERS = 9
ALL = (0, LAYERS)


class Pair:
    """P's block i holds b"P<i>". The request's prompt has the blocks 10, 11, … on P."""

    def __init__(self, blocks: tuple[int, ...] = (4, 2, 9), first_block: int = 0) -> None:
        self.network = Network(pools={"P": {i: b"P%d" % i for i in range(20)}, "D": {i: b"D%d" % i for i in range(20)}})
        self.p, self.d = LoopbackTransport(self.network, "P"), LoopbackTransport(self.network, "D")
        self.on = {name: LoopbackPool(self.network, name, LAYERS) for name in "PD"}
        self.stats = {name: TransferStats() for name in "PD"}
        self.sender = Sender(self.p, 7, self.on["P"], stall_s=1000, stats=self.stats["P"])
        self.receiver = Receiver(8, self.on["D"], self.stats["D"])
        self.lease = Lease("r", "p", "P", 7, first_block, blocks, DEADLINE)
        self.reservation = Reservation(8, first_block, blocks)
        self.sender.start("r", DEADLINE)

    def reserve(self) -> None:
        self.receiver.open(self.lease)
        self.sender.connect("r", self.reservation, "D")

    def offer_all(self) -> None:
        """Three blocks in two chunks."""
        self.sender.offer("r", Chunk(0, (10, 11), ALL))
        self.sender.offer("r", Chunk(2, (12,), ALL), ENDING)

    def step(self, now: float = 0.0) -> list[Sent | SendFailed]:
        return self.sender.step(now)

    def settle(self, now: float = 0.0) -> list[Sent | SendFailed]:
        return [event for _ in range(5) for event in self.step(now)]

    def judge(self) -> list[Accepted | Refused]:
        judged = [self.receiver.on_notification(*message) for message in self.d.receive()]
        return [one for one in judged if one is not None]

    def on_d(self, *blocks: int) -> list[bytes]:
        return [self.network.pools["D"][block] for block in blocks]


def pair_with_manifest(**changes: int) -> tuple[Pair, bytes]:
    """A transfer whose manifest has been taken off the network before D saw it, and perhaps changed."""
    pair = Pair()
    pair.reserve()
    pair.offer_all()
    assert pair.settle() == [Sent("r")]
    ((agent, message),) = pair.d.receive()
    assert agent == "P"
    return pair, encode(dataclasses.replace(decode(Manifest, message), **changes))
