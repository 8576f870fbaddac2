"""Random schedules of many transfers at once, with every fault there is, between workers of one rank and of several.

Held, reordered, failing and never-ending writes; lost, doubled and foreign notifications; cancels from either side,
deadlines, and sender's blocks that are reused as soon as the sender may. A receiver's block is handed to the next
request as soon as the channel allows it, so one that is given back too early shows.
"""

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from transfer.channel import Accepted, Chunk, Ending, Lease, Receiver, Refused, Sender, SendFailed, Sent
from transfer.gang import GangTransport, RankEnd
from transfer.layout import Shard
from transfer.loopback import LoopbackPool, LoopbackTransport, Network
from transfer.messages import Reservation, TransferStats

BLOCKS = 24
TRANSFERS = 12
LAYERS = 3
EMPTY = (b"",) * LAYERS
Content = tuple[bytes, ...]
"""Of a slice of a block, by layer."""


@dataclass
class Transfer:
    """One request: its prompt on P, its lease on D, and what became of both."""

    lease_id: str
    blocks: list[int]
    content: list[list[Content]]
    chunks: list[tuple[Chunk, Ending | None]]
    lease: Lease | None = None
    reservation: Reservation | None = None
    sent: Sent | SendFailed | None = None
    outcome: str | None = None
    settling: bool = False
    over: bool = field(default=False)


@dataclass(eq=False)
class Asked:
    """What a rank has been asked to write, and has not heard of yet."""

    rank: int
    arguments: tuple[Any, ...]
    answer: Future[Any] = field(default_factory=Future)

    @property
    def local(self) -> tuple[int, ...]:
        return tuple(self.arguments[1])

    @property
    def remote(self) -> tuple[int, ...]:
        return tuple(self.arguments[2])


class Gang:
    """A worker on a network: its ranks' pools, of which each has `of` slices or some of them, and its transport."""

    def __init__(self, network: Network, name: str, size: int, of: int) -> None:
        self.network = network
        self.of = of
        self.asked: list[Asked] = []
        self.shards = {f"{name}/{rank}" if rank else name: Shard.of_rank(rank, size, of) for rank in range(size)}
        for agent, shard in self.shards.items():
            network.shards[agent] = shard
            network.pools[agent] = dict.fromkeys(range(BLOCKS), (EMPTY,) * shard.count)
        self.own = LoopbackPool(network, name, LAYERS)
        self.ends = [
            RankEnd(LoopbackTransport(network, agent), LoopbackPool(network, agent, LAYERS)) for agent in self.shards
        ]
        self.transport = GangTransport(LoopbackTransport(network, name), name, 1, self, size)

    def call(self, rank: int, method: str, *arguments: Any) -> Future[Any]:
        if method != "write":
            return self.ends[rank].ask(method, *arguments)
        self.asked.append(Asked(rank, arguments))
        return self.asked[-1].answer

    def hear(self, asked: Asked) -> None:
        """The rank hears what it is asked to write."""

        def answered(done: Future[Any]) -> None:
            error = done.exception()
            asked.answer.set_exception(error) if error else asked.answer.set_result(None)

        self.asked.remove(asked)
        self.ends[asked.rank].ask("write", *asked.arguments).add_done_callback(answered)

    def step(self) -> None:
        for end in self.ends[1:]:
            end.step()

    def put(self, block: int, content: Sequence[Content]) -> None:
        """A block's content, by slice, on every rank that holds it."""
        for agent, shard in self.shards.items():
            self.network.pools[agent][block] = tuple(content[number] for number in shard.slices)

    def check(self, block: int, content: Sequence[Content]) -> None:
        for agent, shard in self.shards.items():
            assert self.network.pools[agent][block] == tuple(content[number] for number in shard.slices)


class World:
    """P is a worker of `sizes[0]` ranks and D one of `sizes[1]`, of a model whose heads are cut into `of` slices."""

    def __init__(self, seed: int, sizes: tuple[int, int] = (1, 1), of: int = 1) -> None:
        self.draw = random.Random(seed)
        self.network = Network(hold=True)
        self.of = of
        self.p, self.d = (Gang(self.network, name, size, of) for name, size in zip("PD", sizes, strict=True))
        self.p.transport.connect(self.d.transport.peer)
        self.gangs = {"P": self.p, "D": self.d}
        stats = TransferStats()
        self.sender = Sender(self.p.transport, 1, self.p.transport.sending(self.p.own), stall_s=1000, stats=stats)
        self.receiver = Receiver(2, self.d.transport.receiving(self.d.own), TransferStats())
        self.free = {"P": set(range(BLOCKS)), "D": set(range(BLOCKS))}
        self.transfers: dict[str, Transfer] = {}
        self.old_messages: list[tuple[str, bytes]] = []
        self.stuck: set[int] = set()
        self.outlived: list[object] = []  # writes in flight of transfers that have ended, and whose blocks are reused
        self.now = 0.0
        self.faults = self.draw.random() < 0.8
        self.counts = dict.fromkeys(("accepted", "refused", "undrained", "failed", "open"), 0)

    def take(self, agent: str, count: int) -> list[int]:
        blocks = self.draw.sample(sorted(self.free[agent]), count)
        self.free[agent] -= set(blocks)
        return blocks

    def give_back(self, agent: str, blocks: Sequence[int]) -> None:
        """The next owner overwrites at once."""
        assert not self.free[agent] & set(blocks)
        self.free[agent] |= set(blocks)
        for block in blocks:
            content = (b"reused %d" % self.draw.getrandbits(32),) * LAYERS
            self.gangs[agent].put(block, [content] * self.of)

    def writes(self) -> list[Any]:
        """All that are in flight or about to be posted."""
        return [*self.network.in_flight, *self.p.asked]

    def check_no_write_in_flight_to(self, blocks: Sequence[int]) -> None:
        assert not {block for write in self.writes() for block in write.remote} & set(blocks)

    # --- what can happen ----------------------------------------------------------------------------------------

    def start(self) -> None:
        count = self.draw.randint(1, 6)
        if len(self.transfers) >= TRANSFERS or len(self.free["P"]) < count:
            return
        lease_id = f"t{len(self.transfers)}"
        blocks = self.take("P", count)
        content = [
            [tuple(f"{lease_id} {i} {part} {layer}".encode() for layer in range(LAYERS)) for part in range(self.of)]
            for i in range(count)
        ]
        for block, its in zip(blocks, content, strict=True):
            self.p.put(block, its)
        cuts = sorted({0, count, *(self.draw.randint(0, count) for _ in range(2))})
        chunks: list[tuple[Chunk, Ending | None]] = [
            (Chunk(a, tuple(blocks[a:b]), layers), None)
            for a, b in itertools.pairwise(cuts)
            for layers in self.draw.choice([[(0, 3)], [(0, 1), (1, 3)], [(0, 1), (1, 2), (2, 3)]])
        ]
        chunks[-1] = (chunks[-1][0], Ending(len(self.transfers), 0))
        self.transfers[lease_id] = Transfer(lease_id, blocks, content, chunks)
        self.sender.start(lease_id, self.now + (self.draw.uniform(50, 500) if self.faults else 1e9))

    def offer(self) -> None:
        if waiting := [one for one in self.transfers.values() if one.chunks]:
            one = self.draw.choice(waiting)
            self.sender.offer(one.lease_id, *one.chunks.pop(0))

    def reserve(self) -> None:
        """D may have a beginning of the prompt already. Or it wants more than P has, as when it fetches a prefix."""
        waiting = [one for one in self.transfers.values() if one.lease is None and not one.over]
        if not waiting:
            return
        one = self.draw.choice(waiting)
        first = self.draw.choice([0, 0, self.draw.randint(0, len(one.blocks))])
        if len(self.free["D"]) < len(one.blocks) - first:
            return
        more = min(self.draw.choice([0, 0, 1, 2]), len(self.free["D"]) - len(one.blocks) + first)
        blocks = tuple(self.take("D", len(one.blocks) - first + more))
        deadline = self.now + (self.draw.uniform(20, 100) if self.faults else 1e9)
        one.lease = Lease(one.lease_id, "p", "P", 1, first, blocks, deadline, open_end=more > 0)
        one.reservation = Reservation(2, first, blocks)
        self.receiver.open(one.lease)

    def answer(self) -> None:
        """The reservation reaches P, perhaps long after."""
        if waiting := [one for one in self.transfers.values() if one.reservation is not None]:
            one = self.draw.choice(waiting)
            assert one.reservation is not None
            self.sender.connect(one.lease_id, one.reservation, "D")
            one.reservation = None

    def deliver(self) -> None:
        if moving := [write for write in self.network.in_flight if id(write) not in self.stuck]:
            self.network.deliver(self.draw.choice(moving))

    def hear(self) -> None:
        """A rank of P's gets to what it is asked to write, or answers for what it has written."""
        if self.p.asked and self.draw.random() < 0.7:
            asked, posted = self.draw.choice(self.p.asked), len(self.network.in_flight)
            self.p.hear(asked)
            if asked in self.outlived:
                self.outlived += self.network.in_flight[posted:]
        self.p.step()

    def stall(self) -> None:
        """A write gets stuck, or all that are stuck move again."""
        if self.network.in_flight and self.draw.random() < 0.7:
            self.stuck.add(id(self.draw.choice(self.network.in_flight)))
        else:
            self.stuck.clear()

    def fail(self) -> None:
        if self.network.in_flight:
            self.network.fail(self.draw.choice(self.network.in_flight))

    def refuse_next(self) -> None:
        self.network.fail_writes = self.draw.randint(0, 1)
        self.network.fail_notify = self.draw.randint(0, 1)

    def toggle_loss(self) -> None:
        self.network.lose = not self.network.lose

    def corrupt(self) -> None:
        """A bit flips in a block of D that is waited for."""
        if waiting := [one.lease for one in self.transfers.values() if one.lease and one.outcome is None]:
            blocks = self.draw.choice(waiting).blocks
            if blocks:
                agent, shard = self.draw.choice(list(self.d.shards.items()))
                block, part, layer = (
                    self.draw.choice(blocks),
                    self.draw.randrange(shard.count),
                    self.draw.randrange(LAYERS),
                )
                content = [list(its) for its in self.network.pools[agent][block]]
                content[part][layer] += b"!"
                self.network.pools[agent][block] = tuple(map(tuple, content))

    def repeat(self) -> None:
        if self.old_messages:
            agent, message = self.draw.choice(self.old_messages)
            self.judge(self.draw.choice([agent, "Q"]), message)

    def start_again(self) -> None:
        """The call that wants a transfer comes twice, or after its lease was given up."""
        over = [one for one in self.transfers.values() if one.over or (one.outcome and not one.settling)]
        if over:
            assert not self.sender.start(self.draw.choice(over).lease_id, self.now + 100)

    def cancel(self) -> None:
        if self.transfers:
            self.sender.cancel(self.draw.choice(list(self.transfers)), "cancelled")

    def leave(self) -> None:
        """The client leaves while D waits."""
        if waiting := [one for one in self.transfers.values() if one.lease and one.outcome is None]:
            self.quarantine(self.draw.choice(waiting), "left")

    def tick(self) -> None:
        self.now += self.draw.uniform(0, 10)
        for lease in self.receiver.overdue(self.now):
            if self.sender.active(lease.lease_id):
                self.receiver.extend(lease.lease_id, self.now + 10)
            else:
                self.quarantine(self.transfers[lease.lease_id], "manifest lost")

    def step_sender(self) -> None:
        for event in self.sender.step(self.now):
            one = self.transfers[event.lease_id]
            assert one.sent is None
            one.sent, one.over = event, True
            if isinstance(event, SendFailed):
                self.counts["failed"] += 1
                self.counts["undrained"] += not event.drained
            drained = isinstance(event, Sent) or event.drained
            reading = [write for write in self.writes() if set(write.local) & set(one.blocks)]
            if drained:
                assert all(write in self.outlived for write in reading)
            else:
                self.outlived += reading
            self.give_back("P", one.blocks)

    def step_receiver(self) -> None:
        for agent, message in self.d.transport.receive():
            self.old_messages.append((agent, message))
            self.judge(agent, message)

    # --- what the receiver does ---------------------------------------------------------------------------------

    def judge(self, agent: str, message: bytes) -> None:
        judged = self.receiver.on_notification(agent, message)
        if judged is None:
            return
        assert agent == "P"
        one = self.transfers[judged.lease.lease_id]
        assert one.outcome is None
        assert judged.lease is one.lease
        if isinstance(judged, Refused):
            self.counts["refused"] += 1
            self.quarantine(one, "refused")
            return
        assert isinstance(judged, Accepted)
        self.counts["accepted"] += 1
        lease = judged.lease
        one.outcome = "accepted"
        assert judged.manifest.first_token == int(one.lease_id[1:])
        assert judged.count == len(one.content) - lease.first_block
        for block, content in zip(lease.blocks[: judged.count], one.content[lease.first_block :], strict=True):
            self.d.check(block, content)
        self.counts["open"] += lease.open_end
        self.check_no_write_in_flight_to(lease.blocks)
        assert self.receiver.close(lease.lease_id) is None
        self.give_back("D", lease.blocks)

    def quarantine(self, one: Transfer, outcome: str) -> None:
        assert self.receiver.quarantine(one.lease_id) is one.lease
        one.outcome, one.settling = outcome, True

    def settle(self) -> None:
        """Ask the sender about one lease in quarantine, as the worker does until it gets a clear answer."""
        waiting = [one for one in self.transfers.values() if one.settling]
        if not waiting:
            return
        one = self.draw.choice(waiting)
        self.sender.fence(one.lease_id, self.now)
        if not self.sender.may_write(one.lease_id):
            self.end(one)

    def end(self, one: Transfer) -> None:
        assert one.lease is not None
        assert self.receiver.close(one.lease_id) is one.lease
        self.check_no_write_in_flight_to(one.lease.blocks)
        self.give_back("D", one.lease.blocks)
        one.settling = False

    # --- the whole ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        useful = [self.start, self.offer, self.offer, self.reserve, self.answer, self.deliver, self.deliver]
        useful += [self.hear, self.hear, self.deliver] * (len(self.p.shards) > 1)
        useful += [self.step_sender, self.step_sender, self.step_receiver, self.settle]
        faults = [self.fail, self.refuse_next, self.toggle_loss, self.corrupt, self.repeat, self.cancel, self.leave]
        faults += [self.stall, self.stall, self.start_again]
        for _ in range(400):
            happens = faults if self.faults and self.draw.random() < 0.08 else [*useful, self.tick]
            self.draw.choice(happens)()
        self.finish()

    def finish(self) -> None:
        """No more faults and no more requests: everything must come to its end, in bounded time."""
        self.network.lose, self.network.fail_writes, self.network.fail_notify = False, 0, 0
        useful = [self.offer, self.reserve, self.answer, self.hear, self.hear, self.deliver, self.deliver]
        useful += [self.step_sender, self.step_receiver]
        for _ in range(400):
            for act in (*useful, self.settle, self.tick):
                act()
        # Some writes are stuck for good; their blocks come free with the end of P's life.
        left = {id(write) for write in self.network.in_flight}
        assert left <= self.stuck
        assert self.sender.open == bool(left)
        self.network.in_flight.clear()
        for one in self.transfers.values():
            if one.settling:
                assert isinstance(one.sent, SendFailed)
                assert not one.sent.drained
                self.end(one)
        assert not self.receiver.waiting
        for one in self.transfers.values():
            assert one.sent is not None
            assert one.lease is None or one.outcome is not None
        assert self.free == {"P": set(range(BLOCKS)), "D": set(range(BLOCKS))}


ONE = (1, 1), 1
GANGS = [((1, 1), 2), ((1, 2), 2), ((2, 1), 2), ((2, 2), 2), ((2, 4), 4), ((4, 2), 4), ((4, 2), 2), ((2, 4), 2)]
GANGS += [((2, 1), 1), ((3, 2), 6)]


@pytest.mark.parametrize(("shapes", "rounds"), [([ONE], 500), (GANGS, 30)], ids=["one rank each", "gangs"])
def test_random_schedules(shapes: list[tuple[tuple[int, int], int]], rounds: int) -> None:
    totals = dict.fromkeys(("accepted", "refused", "undrained", "failed", "open"), 0)
    for (sizes, of), seed in itertools.product(shapes, range(rounds)):
        world = World(seed, sizes, of)
        world.run()
        if not world.faults:
            right = {"accepted": len(world.transfers), "refused": 0, "undrained": 0, "failed": 0}
            assert world.counts | {"open": 0} == {**right, "open": 0}
        for name, count in world.counts.items():
            totals[name] += count
    # Without this the schedules could be too tame to prove anything.
    assert totals["accepted"] > 4 * rounds * len(shapes), totals
    assert min(totals.values()) > 20, totals
