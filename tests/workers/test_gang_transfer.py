"""Transfer between workers of different parallelism, through NIXL: every rank has a pool, an agent and a thread."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.workers.gangs import BLOCKS, Gang, begin, until
from transfer.channel import Accepted, Refused, SendFailed, Sent, TransportError
from transfer.gang import RankEnd

LOCAL, REMOTE = (3, 4, 0), (7, 2, 11)
Open = Callable[..., Gang]


@pytest.fixture
def opened() -> Iterator[Open]:
    made: list[Gang] = []

    def gang(*arguments: Any, **more: Any) -> Gang:
        made.append(Gang(*arguments, **more))
        return made[-1]

    yield gang
    for one in made:
        one.close()


SHAPES = [(1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2), (2, 4, 4), (4, 2, 4), (2, 4, 2), (4, 2, 2), (2, 1, 1), (1, 2, 1)]


@pytest.mark.parametrize(("senders", "receivers", "of"), SHAPES)
def test_blocks_arrive_on_every_rank_where_they_should(opened: Open, senders: int, receivers: int, of: int) -> None:
    """With replicated heads where a gang has more ranks than there are slices."""
    p, d = opened("p", 1, senders, of), opened("d", -1, receivers, of)
    before = [[rank.holds(block) for block in range(BLOCKS)] for rank in d.ranks]
    begin(p, d, LOCAL, REMOTE)
    assert until(lambda: p.events) == [Sent("r")]
    (accepted,) = until(lambda: d.events)
    assert isinstance(accepted, Accepted)
    assert (accepted.count, accepted.manifest.first_token, accepted.manifest.cached_tokens) == (3, 42, 3)
    moved = dict(zip(REMOTE, LOCAL, strict=True))
    for rank, was in zip(d.ranks, before, strict=True):
        for block in range(BLOCKS):
            expected = was[block]
            if block in moved:
                expected = [value + 1000 * (block - moved[block]) for value in expected]  # they are below zero
                expected = [-value for value in expected]
            assert rank.holds(block) == expected
    size = len(LOCAL) * p.ranks[0].memory.layout.whole.block_bytes
    assert (p.stats.sent_bytes, d.stats.received_bytes) == (size, size)
    assert [rank.handles for rank in p.ranks] == [0] * senders


def test_between_single_ranks_there_is_one_write_with_its_notification(opened: Open) -> None:
    p, d = opened("p", 1, 1, 2), opened("d", -1, 1, 2)
    posted: list[tuple[Any, ...]] = []
    write = p.ranks[0].transport.write
    p.ranks[0].transport.write = lambda *arguments: (posted.append(arguments), write(*arguments))[1]  # type: ignore
    begin(p, d, LOCAL, REMOTE)
    until(lambda: d.events)
    assert [bool(one[4]) for one in posted] == [False, False, True]


@pytest.mark.parametrize(("receivers", "of", "rank", "part"), [(2, 2, 1, 1), (4, 2, 1, 0), (4, 2, 3, 1), (1, 2, 0, 1)])
def test_a_corrupt_slice_is_refused_on_whatever_rank(
    opened: Open, receivers: int, of: int, rank: int, part: int
) -> None:
    """Of replicated heads every copy counts."""
    p, d = opened("p", 1, 1, of), opened("d", -1, receivers, of)
    verify = d.receiver._verified

    def spoiled(*arguments: Any) -> int:
        d.ranks[rank].memory.slices[-1].values[1][REMOTE[1] * 4 + 1] += 1
        return verify(*arguments)

    d.receiver._verified = spoiled  # type: ignore[method-assign]
    begin(p, d, LOCAL, REMOTE)
    (refused,) = until(lambda: d.events)
    assert isinstance(refused, Refused)
    expected = f"in slices {part}" if receivers <= of else f"have different copies of slice {part}"
    assert expected in refused.reason


class Gate:
    """Holds what a rank writes until it is opened."""

    def __init__(self, gang: Gang, rank: int) -> None:
        self.open = threading.Event()
        self.posted = threading.Event()
        transport = gang.ranks[rank].transport
        write, done = transport.write, transport.done

        def posting(*arguments: Any) -> Any:
            self.posted.set()
            return write(*arguments)

        transport.write = posting  # type: ignore[method-assign]
        transport.done = lambda handle: self.open.is_set() and done(handle)  # type: ignore[method-assign]


def test_no_manifest_leaves_before_every_part_has_arrived(opened: Open) -> None:
    p, d = opened("p", 1, 2, 2), opened("d", -1, 1, 2)
    gate = Gate(p, 1)
    begin(p, d, LOCAL, REMOTE)
    assert gate.posted.wait(10)
    time.sleep(0.1)
    assert (p.events, d.events) == ([], [])
    gate.open.set()
    assert until(lambda: p.events) == [Sent("r")]
    assert isinstance(until(lambda: d.events)[0], Accepted)


def test_a_fence_holds_until_every_part_has_ended(opened: Open) -> None:
    p, d = opened("p", 1, 2, 2), opened("d", -1, 2, 2)
    gate = Gate(p, 1)
    begin(p, d, LOCAL, REMOTE)
    assert gate.posted.wait(10)
    p.do(lambda: p.sender.fence("r", time.monotonic()))
    time.sleep(0.1)
    assert p.do(lambda: p.sender.may_write("r"))
    gate.open.set()
    assert until(lambda: p.events) == [SendFailed("r", "cancelled by the receiver", drained=True)]
    assert not p.do(lambda: p.sender.may_write("r"))
    assert d.events == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_fails_fails_the_transfer_once_nothing_is_in_flight(opened: Open, rank: int) -> None:
    p, d = opened("p", 1, 2, 2), opened("d", -1, 2, 2)
    gate = Gate(p, 1 - rank)
    transport = p.ranks[rank].transport
    write = transport.write

    def failing(*_: Any) -> Any:
        raise TransportError("injected")

    transport.write = failing  # type: ignore[method-assign]
    begin(p, d, LOCAL, REMOTE)
    assert gate.posted.wait(10)
    time.sleep(0.1)
    assert p.events == []
    gate.open.set()
    (failed,) = until(lambda: p.events)
    assert isinstance(failed, SendFailed)
    assert failed.drained
    assert "injected" in failed.reason
    assert d.events == []
    transport.write = write  # type: ignore[method-assign]
    p.events.clear()
    begin(p, d, LOCAL, REMOTE, "again")
    assert until(lambda: p.events) == [Sent("again")]
    assert isinstance(until(lambda: d.events)[0], Accepted)


def test_a_rank_that_does_not_answer_fails_the_transfer_in_time(opened: Open) -> None:
    p, d = opened("p", 1, 2, 2, answer_s=0.2), opened("d", -1, 1, 2)
    p.do(lambda: p.transport.connect(d.transport.peer))
    block = threading.Event()
    p.planes[0].call(block.wait)
    begin(p, d, LOCAL, REMOTE)
    (failed,) = until(lambda: p.events)
    block.set()
    assert isinstance(failed, SendFailed)
    assert failed.drained
    assert "does not answer within 0.2 s" in failed.reason


def test_a_rank_of_the_receiver_that_does_not_answer_refuses(opened: Open) -> None:
    p, d = opened("p", 1, 1, 2), opened("d", -1, 2, 2, answer_s=0.2)
    block = threading.Event()
    checksum = d.ranks[1].memory.checksum
    d.ranks[1].memory.checksum = lambda *some: block.wait() and checksum(*some)  # type: ignore
    begin(p, d, LOCAL, REMOTE)
    (refused,) = until(lambda: d.events)
    block.set()
    assert isinstance(refused, Refused)
    assert "does not answer within 0.2 s" in refused.reason


def test_a_worker_whose_heads_do_not_map_is_refused_by_field(opened: Open) -> None:
    p, d = opened("p", 1, 2, 2), opened("d", -1, 2, 4)
    with pytest.raises(TransportError, match=r"do not fit: shard\.of: 2 slices of the KV heads here, 4 there"):
        p.do(lambda: p.transport.connect(d.transport.peer))
    half = dataclasses.replace(d.transport.peer, others=())
    q = opened("q", 1, 1, 4)
    with pytest.raises(TransportError, match="do not fit: shard: none of 1 ranks holds slice 2 of 4"):
        q.do(lambda: q.transport.connect(half))
    layout = (*d.transport.peer.layout[:5], (3, 2, 4))
    with pytest.raises(TransportError, match="shard: there are no 2 slices from 3 on of 4"):
        q.do(lambda: q.transport.connect(dataclasses.replace(d.transport.peer, layout=layout)))


def test_the_next_life_of_a_worker_is_reached_on_all_ranks(opened: Open) -> None:
    p, d = opened("p", 1, 2, 4), opened("d", -1, 4, 4)
    begin(p, d, LOCAL, REMOTE)
    assert until(lambda: p.events) == [Sent("r")]
    p.do(lambda: p.transport.disconnect(d.transport.peer.agent))
    assert not p.ranks[0].transport._remotes
    until(lambda: not p.ranks[1].transport._remotes)
    with pytest.raises(TransportError, match="not connected"):
        p.do(lambda: p.transport.write(d.transport.peer.agent, [0], [0], (0, 2), b""))
    again = opened("d", -1, 4, 4, incarnation=8)
    begin(p, again, LOCAL, REMOTE, "s")
    assert isinstance(until(lambda: again.events)[0], Accepted)


def test_a_rank_is_only_asked_for_what_it_does(opened: Open) -> None:
    p = opened("p", 1, 2, 2)
    with pytest.raises(ValueError, match="a rank is not asked for close"):
        p.call(1, "close").result(5)
    with pytest.raises(TransportError, match="not connected"):
        p.call(1, "write", "nobody", (0,), (0,), (0, 1), (1, 2)).result(5)


def test_a_rank_looks_after_its_transport_only_while_something_may_come(opened: Open) -> None:
    d = opened("d", -1, 2, 2)
    end = d.planes[0]._end
    assert not end.busy
    d.do(d.transport.expect)
    until(lambda: end.busy)
    until(lambda: not end.busy)


def test_an_answer_cannot_be_taken_back() -> None:
    """Whoever gives up on a write must not make it look as if it had ended."""

    class Never:
        agent = "a"

        def write(self, *_: Any) -> str:
            return "handle"

        def done(self, _: Any) -> bool:
            return False

        def receive(self) -> list[Any]:
            return []

    end = RankEnd(Never(), None)  # type: ignore[arg-type]
    answer: Future[Any] = end.ask("write", "d", (0,), (0,), (0, 1), (0, 1))
    end.step()
    assert not answer.cancel()
    assert not answer.done()
    assert end.busy
