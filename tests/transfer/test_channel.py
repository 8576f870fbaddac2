"""Sender and receiver over the in-memory transport: one transfer at a time, every fault by itself."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.transfer.pair import ALL, DEADLINE, ENDING, LAYERS, Pair
from transfer.channel import (
    FENCE_S,
    Accepted,
    Chunk,
    Layers,
    SendFailed,
    Sent,
)
from transfer.loopback import Network
from transfer.messages import Reservation


def test_a_prompt_arrives() -> None:
    pair = Pair()
    pair.reserve()
    pair.offer_all()
    assert pair.settle() == [Sent("r")]
    (accepted,) = pair.judge()
    assert isinstance(accepted, Accepted)
    assert (accepted.lease, accepted.manifest.first_token, accepted.manifest.cached_tokens) == (pair.lease, 5, 16)
    assert pair.on_d(4, 2, 9) == [b"P10", b"P11", b"P12"]
    assert not pair.sender.open
    assert not pair.receiver.waiting
    assert pair.receiver.close("r") is None


def test_writes_do_not_wait_for_the_end_of_the_prompt() -> None:
    pair = Pair()
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10, 11), ALL))
    assert pair.step() == []
    assert pair.on_d(4, 2, 9) == [b"P10", b"P11", b"D9"]
    assert pair.judge() == []


def test_chunks_may_come_before_the_reservation() -> None:
    pair = Pair()
    pair.offer_all()
    assert pair.settle() == []
    assert not pair.network.in_flight
    pair.reserve()
    assert pair.settle() == [Sent("r")]
    assert isinstance(pair.judge()[0], Accepted)


def test_only_what_is_missing_travels() -> None:
    pair = Pair(blocks=(3,), first_block=2)
    pair.reserve()
    pair.offer_all()
    assert pair.settle() == [Sent("r")]
    (accepted,) = pair.judge()
    assert [entry[:2] for entry in accepted.manifest.checksums] == [(2, 1)]
    assert pair.network.pools["D"] == {i: b"D%d" % i for i in range(20)} | {3: b"P12"}


def test_a_fence_holds_before_and_after_the_transfer() -> None:
    pair = Pair()
    pair.sender.fence("late", 0.0)
    assert not pair.sender.start("late", DEADLINE)
    assert not pair.sender.start("r", DEADLINE)
    pair.reserve()
    pair.offer_all()
    assert pair.settle() == [Sent("r")]
    assert not pair.sender.start("r", DEADLINE)
    pair.sender.fence("other", FENCE_S)
    assert not pair.sender.start("late", DEADLINE)
    pair.sender.fence("another", FENCE_S + 1.0)
    assert pair.sender.start("late", FENCE_S + DEADLINE)


def test_a_fence_ends_a_transfer_that_is_under_way() -> None:
    pair = Pair()
    pair.reserve()
    pair.sender.fence("r", 0.0)
    pair.offer_all()
    assert pair.settle() == [SendFailed("r", "cancelled by the receiver", drained=True)]
    assert pair.on_d(4, 2, 9) == [b"D4", b"D2", b"D9"]


def test_layers_of_a_chunk_travel_as_they_become_final() -> None:
    pair = Pair()
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10,), ALL))
    pair.sender.offer("r", Chunk(1, (11, 12), (0, 2)))
    assert pair.step() == []
    assert pair.on_d(4, 2, 9) == [b"P10", b"P1", b"P1"]
    pair.sender.offer("r", Chunk(1, (11, 12), (2, LAYERS)), ENDING)
    assert pair.settle() == [Sent("r")]
    (accepted,) = pair.judge()
    assert isinstance(accepted, Accepted)
    assert [entry[:4] for entry in accepted.manifest.checksums] == [(0, 1, *ALL), (1, 2, 0, 2), (1, 2, 2, LAYERS)]
    assert pair.on_d(4, 2, 9) == [b"P10", b"P11", b"P12"]


def test_a_chunk_that_is_missing_in_part_is_cut() -> None:
    pair = Pair(blocks=(3, 6), first_block=1)
    pair.reserve()
    pair.offer_all()
    assert pair.settle() == [Sent("r")]
    assert isinstance(pair.judge()[0], Accepted)
    assert pair.on_d(3, 6) == [b"P11", b"P12"]


def test_nothing_is_missing() -> None:
    pair = Pair(blocks=(), first_block=3)
    pair.network.hold = True
    pair.reserve()
    pair.offer_all()
    assert pair.settle() == [Sent("r")]
    (accepted,) = pair.judge()
    assert accepted.manifest.checksums == ()
    assert pair.network.pools["D"] == {i: b"D%d" % i for i in range(20)}


def test_the_manifest_waits_for_every_earlier_write() -> None:
    pair = Pair()
    pair.network.hold = True
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10,), ALL))
    pair.sender.offer("r", Chunk(1, (11,), ALL))
    pair.sender.offer("r", Chunk(2, (12,), ALL), ENDING)
    pair.step()
    first, second = pair.network.in_flight
    pair.network.deliver(second)
    pair.step()
    assert pair.network.in_flight == [first]
    pair.network.deliver(first)
    pair.step()
    (last,) = pair.network.in_flight
    assert last.notify
    assert pair.step() == []
    pair.network.deliver(last)
    assert pair.step() == [Sent("r")]
    assert isinstance(pair.judge()[0], Accepted)


def test_a_cancelled_transfer_posts_nothing_more_and_ends_when_drained() -> None:
    pair = Pair()
    pair.network.hold = True
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10,), ALL))
    pair.step()
    (write,) = pair.network.in_flight
    pair.sender.cancel("r", "client left")
    pair.sender.offer("r", Chunk(1, (11, 12), ALL), ENDING)
    assert pair.settle() == []
    assert pair.sender.active("r")
    assert pair.network.in_flight == [write]
    pair.network.deliver(write)
    assert pair.step() == [SendFailed("r", "client left", drained=True)]
    assert not pair.sender.active("r")
    assert pair.judge() == []


def test_cancelled_before_anything_was_posted() -> None:
    pair = Pair()
    pair.sender.cancel("r", "client left")
    pair.reserve()
    pair.offer_all()
    assert pair.step() == [SendFailed("r", "client left", drained=True)]
    assert not pair.sender.open


def test_a_reservation_that_comes_after_the_end_is_ignored() -> None:
    pair = Pair()
    pair.sender.cancel("r", "client left")
    pair.step()
    pair.reserve()
    pair.offer_all()
    assert pair.settle() == []
    assert not pair.sender.open
    assert pair.on_d(4) == [b"D4"]


def test_the_first_reason_stays() -> None:
    pair = Pair()
    pair.sender.cancel("r", "first")
    pair.sender.cancel("r", "second")
    assert pair.step(now=100.0) == [SendFailed("r", "first", drained=True)]


def test_the_deadline_without_a_reservation() -> None:
    pair = Pair()
    pair.offer_all()
    assert pair.step(DEADLINE) == []
    (failed,) = pair.step(DEADLINE + 1)
    assert failed == SendFailed("r", "deadline exceeded", drained=True)


def test_the_deadline_with_a_write_in_flight_is_no_promise() -> None:
    pair = Pair()
    pair.network.hold = True
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10,), ALL))
    assert pair.settle() == []
    assert pair.step(DEADLINE + 1) == [SendFailed("r", "deadline exceeded", drained=False)]
    assert not pair.sender.active("r")


def test_a_cancelled_transfer_whose_write_never_ends() -> None:
    pair = Pair()
    pair.network.hold = True
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10,), ALL))
    pair.step()
    pair.sender.cancel("r", "client left")
    assert pair.step(DEADLINE + 1) == [SendFailed("r", "client left", drained=False)]


@pytest.mark.parametrize("ends", [Network.deliver, Network.fail])
def test_a_write_that_ends_after_its_transfer_is_noticed(ends: Callable[[Network, Any], None]) -> None:
    pair = Pair()
    pair.network.hold = True
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10,), ALL))
    pair.sender.offer("r", Chunk(1, (11,), ALL))
    pair.step()
    pair.network.deliver(pair.network.in_flight[1])
    assert pair.settle(DEADLINE + 1) == [SendFailed("r", "deadline exceeded", drained=False)]
    assert pair.sender.may_write("r")
    assert pair.sender.open, "somebody must go on polling"
    ends(pair.network, pair.network.in_flight[0])
    assert pair.step(DEADLINE + 2) == []
    assert not pair.sender.may_write("r")
    assert not pair.sender.open
    assert pair.judge() == []


@pytest.mark.parametrize("failing", [1, 2])
def test_a_write_that_cannot_be_posted(failing: int) -> None:
    pair = Pair()
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10,), ALL))
    if failing == 2:
        pair.step()
    pair.network.fail_writes = 1
    pair.sender.offer("r", Chunk(1, (11, 12), ALL), ENDING)
    assert pair.settle() == [SendFailed("r", "injected write failure", drained=True)]
    assert pair.judge() == []


def test_a_failed_post_waits_for_the_writes_before_it() -> None:
    pair = Pair()
    pair.network.hold = True
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10,), ALL))
    pair.step()
    pair.network.fail_writes = 1
    pair.sender.offer("r", Chunk(1, (11,), ALL))
    assert pair.settle() == []
    pair.network.deliver(pair.network.in_flight[0])
    assert pair.step() == [SendFailed("r", "injected write failure", drained=True)]


def test_a_posted_write_that_fails() -> None:
    pair = Pair()
    pair.network.hold = True
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10,), ALL))
    pair.sender.offer("r", Chunk(1, (11,), ALL))
    pair.step()
    pair.network.fail(pair.network.in_flight[0])
    assert pair.step() == []
    assert pair.sender.active("r")
    pair.network.deliver(pair.network.in_flight[0])
    assert pair.step() == [SendFailed("r", "injected failure of a posted write", drained=True)]
    assert pair.judge() == []


def test_the_last_write_fails_with_its_manifest() -> None:
    pair = Pair()
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10, 11), ALL))
    pair.step()
    pair.network.hold = True
    pair.sender.offer("r", Chunk(2, (12,), ALL), ENDING)
    pair.step()
    pair.network.fail(pair.network.in_flight[0])
    assert pair.step() == [SendFailed("r", "injected failure of a posted write", drained=True)]
    assert pair.judge() == []
    assert pair.receiver.waiting


def test_a_manifest_alone_that_cannot_be_sent() -> None:
    pair = Pair(blocks=(), first_block=3)
    pair.network.fail_notify = 1
    pair.reserve()
    pair.offer_all()
    assert pair.settle() == [SendFailed("r", "injected notification failure", drained=True)]


def test_an_aborted_request_keeps_its_blocks_until_the_write_in_flight_is_done() -> None:
    """The client leaves while a write is held back. Only after the sender has confirmed are the blocks given to
    another request, whose content then stays."""
    pair = Pair()
    pair.network.hold = True
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10, 11), ALL))
    pair.step()
    (write,) = pair.network.in_flight

    assert pair.receiver.quarantine("r") is pair.lease
    pair.sender.cancel("r", "aborted")
    assert pair.settle() == []
    assert pair.sender.active("r"), "the receiver must go on waiting"

    pair.network.deliver(write)
    assert pair.step() == [SendFailed("r", "aborted", drained=True)]
    assert not pair.sender.active("r")
    assert pair.receiver.close("r") is pair.lease
    for block in pair.lease.blocks:
        pair.network.pools["D"][block] = b"next"
    pair.network.hold = False
    pair.offer_all()
    assert pair.settle() == []
    assert pair.on_d(*pair.lease.blocks) == [b"next"] * 3


def test_transfers_do_not_disturb_each_other() -> None:
    pair = Pair()
    pair.reserve()
    other = dataclasses.replace(pair.lease, lease_id="s", blocks=(1,))
    pair.sender.start("s", DEADLINE)
    pair.receiver.open(other)
    pair.sender.connect("s", Reservation(8, 0, (1,)), "D")
    pair.sender.offer("s", Chunk(0, (15,), ALL), ENDING)
    pair.sender.cancel("r", "client left")
    pair.offer_all()
    assert sorted(pair.settle(), key=str) == [SendFailed("r", "client left", drained=True), Sent("s")]
    (accepted,) = pair.judge()
    assert accepted.lease is other
    assert pair.on_d(4, 2, 9, 1) == [b"D4", b"D2", b"D9", b"P15"]


def break_once(pair: Pair, *blocks: int) -> None:
    """Computing the checksum of these blocks of P's raises, as a bug would."""
    checksum = pair.on["P"].checksum

    def digest(wanted: Sequence[int], layers: Layers) -> tuple[int, ...]:
        if set(wanted) & set(blocks):
            raise RuntimeError("broken")
        return checksum(wanted, layers)

    pair.on["P"].checksum = digest


def test_a_bug_fails_the_transfer_that_meets_it_and_no_other() -> None:
    pair = Pair()
    pair.network.hold = True
    pair.reserve()
    pair.sender.start("s", DEADLINE)
    pair.receiver.open(dataclasses.replace(pair.lease, lease_id="s", blocks=(1,)))
    pair.sender.connect("s", Reservation(8, 0, (1,)), "D")
    break_once(pair, 11)
    pair.sender.offer("r", Chunk(0, (10,), ALL))
    pair.sender.offer("r", Chunk(1, (11, 12), ALL), ENDING)
    pair.sender.offer("s", Chunk(0, (15,), ALL), ENDING)
    assert pair.settle() == []
    first, second = pair.network.in_flight
    assert second.notify
    pair.network.deliver(second)
    assert pair.settle() == [Sent("s")], "the first one's write is still in flight"
    pair.network.deliver(first)
    assert pair.settle() == [SendFailed("r", "RuntimeError: broken", drained=True)]
    (accepted,) = pair.judge()
    assert accepted.lease.lease_id == "s"
    assert pair.on_d(4, 2, 9, 1) == [b"P10", b"D2", b"D9", b"P15"]


def test_a_write_of_which_nothing_can_be_learned_may_be_in_flight() -> None:
    pair = Pair()
    pair.network.hold = True
    pair.reserve()
    pair.sender.start("s", DEADLINE)
    pair.sender.connect("s", Reservation(8, 0, ()), "D")
    pair.sender.offer("r", Chunk(0, (10,), ALL))
    pair.step()

    def done(_: object) -> bool:
        raise RuntimeError("broken")

    pair.p.done = done  # type: ignore[method-assign]
    pair.sender.offer("s", Chunk(0, (), ALL), ENDING)
    assert pair.settle() == [Sent("s")]
    assert pair.settle(DEADLINE + 1) == [SendFailed("r", "RuntimeError: broken", drained=False)]
    assert pair.sender.may_write("r")
    del pair.p.done
    pair.network.deliver(pair.network.in_flight[0])
    pair.step(DEADLINE + 1)
    assert not pair.sender.may_write("r")


def test_unknown_leases_are_nobodys_business() -> None:
    pair = Pair()
    pair.sender.cancel("x", "reason")
    pair.sender.offer("x", Chunk(0, (1,), ALL), ENDING)
    pair.receiver.extend("x", 5.0)
    assert pair.receiver.quarantine("x") is None
    assert pair.receiver.close("x") is None
    assert not pair.sender.active("x")
