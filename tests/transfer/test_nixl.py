"""NIXL itself: blocks arrive, notifications never overtake them, and what does not fit is refused.

Without NIXL's progress thread both ends must be polled for anything to move, as the workers do while a lease is open.
"""

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from transfer.channel import Accepted, Chunk, Ending, Lease, Receiver, Sender, Sent, TransportError
from transfer.config import TransferConfig
from transfer.layout import KVLayout, LayerGeometry
from transfer.messages import Reservation, TransferStats
from transfer.nixl_transport import NixlTransport
from workers.kv.memory import KVMemory

LAYOUT = KVLayout("model", "float32", 4, (LayerGeometry(2, 4, 4), LayerGeometry(1, 8, 6)), 16)
ALL = (0, len(LAYOUT.layers))
DEFAULTS = TransferConfig()
TIMEOUT_S = 20.0


class Worker:
    """A pool whose every element says which worker and which block it is of, and its transport."""

    def __init__(self, name: str, sign: int, layout: KVLayout = LAYOUT, config: TransferConfig = DEFAULTS) -> None:
        self.layout = layout
        self.memory = KVMemory(layout, torch.device("cpu"))
        for part in (*self.memory.keys, *self.memory.values):
            ids = torch.arange(layout.num_blocks).repeat_interleave(layout.block_size)
            part.copy_(((ids + 1) * sign)[:, None, None].expand(part.shape))
        self.transport = NixlTransport(name, self.memory.flat, layout, config)
        self.inbox: list[tuple[str, bytes]] = []

    def blocks(self) -> list[int]:
        """What each block holds; all of its elements must agree."""
        pieces = [part.view(self.layout.num_blocks, -1).float() for part in (*self.memory.keys, *self.memory.values)]
        whole = torch.cat(pieces, dim=1)
        assert (whole == whole[:, :1]).all()
        return whole[:, 0].int().tolist()


def until(condition: Callable[[], Any], *polled: Worker) -> Any:
    """What `condition` returns as soon as it is true, while these workers are polled."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for worker in polled:
            worker.inbox.extend(worker.transport.receive())
        if value := condition():
            return value
    raise AssertionError("timed out")


def write(source: Worker, target: Worker, local: list[int], remote: list[int], notify: bytes = b"") -> None:
    """Write, and wait until it is done and `target` has been told."""
    handle = source.transport.write(target.transport.agent, local, remote, ALL, notify)
    until(lambda: source.transport.done(handle), source, target)
    source.transport.release(handle)
    if notify:
        until(lambda: target.inbox, source, target)


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker]]:
    p, d = Worker("p/1", 1), Worker("d/1", -1)
    p.transport.connect(d.transport.describe("d", 1))
    yield p, d
    p.transport.close()
    d.transport.close()


UNTOUCHED = [-(i + 1) for i in range(16)]


def test_blocks_arrive_where_they_should_and_nowhere_else(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    write(p, d, [3, 4, 0], [7, 2, 15])
    expected = list(UNTOUCHED)
    expected[7], expected[2], expected[15] = 4, 5, 1
    assert d.blocks() == expected
    assert p.blocks() == [i + 1 for i in range(16)]
    assert d.inbox == []


def test_layers_arrive_by_themselves(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    handle = p.transport.write("d/1", [3], [7], (1, 2), b"")
    until(lambda: p.transport.done(handle), p, d)
    p.transport.release(handle)
    at = [part.view(LAYOUT.num_blocks, -1)[7] for part in (*d.memory.keys, *d.memory.values)]
    (keys0, keys1, values0, values1) = [set(part.tolist()) for part in at]
    assert (keys0, values0, keys1, values1) == ({-8.0}, {-8.0}, {4.0}, {4.0})


def test_a_notification_comes_behind_its_data(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    for turn in range(50):
        blocks = [(turn + i) % 16 for i in range(5)]
        handle = p.transport.write("d/1", blocks, blocks, ALL, b"turn %d" % turn)
        # D looks at its memory the moment it is told.
        until(lambda handle=handle: (p.transport.done(handle), d.inbox)[1], d)
        assert d.inbox == [("p/1", b"turn %d" % turn)]
        assert [d.blocks()[block] for block in blocks] == [block + 1 for block in blocks]
        until(lambda handle=handle: p.transport.done(handle), p, d)
        p.transport.release(handle)
        d.inbox.clear()
        for part in (*d.memory.keys, *d.memory.values):
            part.fill_(-1)


def test_a_notification_alone(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    p.transport.notify("d/1", b"\x00\xff binary")
    assert until(lambda: d.inbox, p, d) == [("p/1", b"\x00\xff binary")]
    assert d.blocks() == UNTOUCHED


def test_pools_of_different_sizes(pair: tuple[Worker, Worker]) -> None:
    p, _ = pair
    large = Worker("large/1", -1, dataclasses.replace(LAYOUT, num_blocks=40))
    p.transport.connect(large.transport.describe("large", 1))
    write(p, large, [15], [39])
    assert large.blocks()[38:] == [-39, 16]
    large.transport.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "other"), ("dtype", "bfloat16"), ("block_size", 8), ("layers", (LayerGeometry(2, 4, 4),))],
)
def test_a_layout_that_does_not_fit_is_refused_by_name(pair: tuple[Worker, Worker], field: str, value: object) -> None:
    p, d = pair
    layout = dataclasses.replace(LAYOUT, **{field: value})  # type: ignore[arg-type]
    other = dataclasses.replace(d.transport.describe("o", 1), agent="o/1", layout=layout.to_tuple())
    with pytest.raises(TransportError, match=f"o/1.*{field}: "):
        p.transport.connect(other)
    with pytest.raises(TransportError, match="not connected to o/1"):
        p.transport.write("o/1", [0], [0], ALL, b"")


def test_a_peer_that_sends_nonsense_is_refused(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    with pytest.raises(TransportError, match="cannot connect to x/1"):
        p.transport.connect(dataclasses.replace(d.transport.describe("x", 1), agent="x/1", metadata=b"nonsense"))


def test_a_second_peer_of_the_same_agent_name_is_refused(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    twin = Worker("d/1", -1)
    with pytest.raises(TransportError, match="two peers have the agent name d/1: d and twin"):
        p.transport.connect(twin.transport.describe("twin", 1))
    with pytest.raises(TransportError, match="twin has this worker's own agent name d/1"):
        d.transport.connect(twin.transport.describe("twin", 1))
    write(p, d, [0], [0])
    assert (d.blocks()[0], twin.blocks()[0]) == (1, -1)
    twin.transport.close()


def test_a_peer_that_announces_another_s_address_is_refused(pair: tuple[Worker, Worker]) -> None:
    """Whether the other one is known already or not."""
    p, d = pair
    other = Worker("other/1", -1)
    for address in (d, other):
        wrong = dataclasses.replace(
            d.transport.describe("x", 1), agent="x/1", metadata=address.transport.describe("", 1).metadata
        )
        with pytest.raises(TransportError, match="cannot connect to x/1"):
            p.transport.connect(wrong)
    assert other.blocks() == d.blocks() == UNTOUCHED
    other.transport.close()


def test_nothing_is_written_to_strangers(pair: tuple[Worker, Worker]) -> None:
    _, d = pair
    with pytest.raises(TransportError, match="not connected to p/1"):
        d.transport.write("p/1", [0], [0], ALL, b"")
    with pytest.raises(TransportError, match="not connected to p/1"):
        d.transport.notify("p/1", b"")


def test_a_disconnected_peer_is_a_stranger_and_may_come_back(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    write(p, d, [0], [0])
    p.transport.disconnect("d/1")
    p.transport.disconnect("d/1")
    with pytest.raises(TransportError, match="not connected"):
        p.transport.write("d/1", [0], [1], ALL, b"")
    p.transport.connect(d.transport.describe("d", 1))
    p.transport.connect(d.transport.describe("d", 1))
    write(p, d, [5], [1], b"again")
    assert d.inbox == [("p/1", b"again")]
    assert d.blocks()[:3] == [1, 6, -3]


def test_the_next_life_of_a_peer_is_another_agent(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    write(p, d, [5], [1])
    p.transport.disconnect("d/1")
    again = Worker("d/2", -1)
    p.transport.connect(again.transport.describe("d", 2))
    write(p, again, [5], [1])
    assert again.blocks()[1] == 6
    again.transport.close()


def test_one_agent_serves_several_peers(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    q = Worker("q/1", 100)
    q.transport.connect(d.transport.describe("d", 1))
    write(p, d, [1], [1], b"p")
    write(q, d, [2], [2], b"q")
    until(lambda: len(d.inbox) == 2, p, q, d)
    assert d.inbox == [("p/1", b"p"), ("q/1", b"q")]
    assert d.blocks()[:3] == [-1, 2, 300]
    q.transport.close()


def decode_side(pipe: Connection) -> None:
    """The other process: reserve, wait for the manifest, say what was judged and what the blocks hold."""
    d = Worker("d/8", -1)
    pipe.send(d.transport.describe("d", 8))
    receiver = Receiver(8, d.memory, TransferStats())
    receiver.open(Lease("r", "p", "p/7", 7, 1, (9, 3, 4), 60.0))
    judged: list[Any] = []
    while not judged:
        until(lambda: d.inbox, d)
        judged.append(receiver.on_notification(*d.inbox.pop()))
    pipe.send((judged, d.blocks()))
    pipe.recv()
    d.transport.close()


def test_a_whole_transfer_between_two_processes() -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=decode_side, args=(theirs,), daemon=True)
    process.start()
    p = Worker("p/7", 1)
    peer = mine.recv()
    p.transport.connect(peer)
    sender = Sender(p.transport, 7, p.memory, stall_s=10, stats=TransferStats())
    sender.start("r", time.monotonic() + TIMEOUT_S)
    sender.connect("r", Reservation(8, 1, (9, 3, 4)), peer.agent)
    sender.offer("r", Chunk(0, (10, 11), ALL))
    sender.offer("r", Chunk(2, (2, 3), ALL), Ending(42, 0))
    assert until(lambda: sender.step(time.monotonic()), p) == [Sent("r")]
    assert mine.poll(TIMEOUT_S)
    (accepted,), blocks = mine.recv()
    assert isinstance(accepted, Accepted)
    assert accepted.manifest.first_token == 42
    expected = list(UNTOUCHED)
    expected[9], expected[3], expected[4] = 12, 3, 4
    assert blocks == expected
    mine.send("done")
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    p.transport.close()
