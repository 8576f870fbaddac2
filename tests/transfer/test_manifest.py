"""What a receiver makes of manifests: what proves a lease's blocks, and what does not."""

import dataclasses
from collections.abc import Sequence

import pytest

from tests.transfer.pair import ALL, DEADLINE, ENDING, LAYERS, Pair, pair_with_manifest
from transfer.channel import (
    Accepted,
    Chunk,
    Layers,
    Refused,
    Sent,
)
from transfer.messages import Manifest, Reservation, decode, encode


@pytest.mark.parametrize(
    "layers",
    [
        [(0, 2)],
        [(0, 2), (3, LAYERS)],
        [(0, 2), (1, LAYERS)],
        [(2, LAYERS), (0, 2)],
        [(0, LAYERS), (2, LAYERS)],
        [(0, 2), (2, 5), (2, LAYERS)],
    ],
)
def test_a_manifest_that_leaves_layers_out_or_tells_them_twice_is_refused(layers: list[tuple[int, int]]) -> None:
    pair, message = pair_with_manifest()
    digest = pair.on["P"].checksum
    entries = tuple((0, 3, *one, *digest((10, 11, 12), one)) for one in layers)
    (judged,) = [
        pair.receiver.on_notification("P", encode(dataclasses.replace(decode(Manifest, message), checksums=entries)))
    ]
    assert isinstance(judged, Refused)


def test_layers_of_different_blocks_prove_nothing() -> None:
    pair, message = pair_with_manifest()
    digest = pair.on["P"].checksum
    entries = ((0, 3, 0, 2, *digest((10, 11, 12), (0, 2))), (0, 2, 2, LAYERS, *digest((10, 11), (2, LAYERS))))
    judged = pair.receiver.on_notification(
        "P", encode(dataclasses.replace(decode(Manifest, message), checksums=entries))
    )
    assert isinstance(judged, Refused)


@pytest.mark.parametrize("have", [0, 1, 2, 3])
def test_an_open_end_takes_what_the_sender_has(have: int) -> None:
    pair = Pair()
    pair.lease.open_end = True
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10, 11, 12)[:have], ALL), ENDING)
    assert pair.settle() == [Sent("r")]
    (accepted,) = pair.judge()
    assert isinstance(accepted, Accepted)
    assert accepted.count == have
    assert pair.on_d(4, 2, 9) == [b"P10", b"P11", b"P12"][:have] + [b"D4", b"D2", b"D9"][have:]


def test_a_lost_manifest_shows_as_an_overdue_lease() -> None:
    pair = Pair()
    pair.network.lose = True
    pair.reserve()
    pair.offer_all()
    assert pair.settle() == [Sent("r")]
    assert pair.judge() == []
    assert pair.receiver.overdue(DEADLINE) == []
    assert pair.receiver.overdue(DEADLINE + 1) == [pair.lease]
    pair.receiver.extend("r", DEADLINE + 5)
    assert pair.receiver.overdue(DEADLINE + 1) == []
    assert not pair.sender.active("r")
    assert pair.receiver.quarantine("r") is pair.lease
    assert pair.receiver.overdue(DEADLINE + 100) == []


def test_a_doubled_manifest_counts_once() -> None:
    pair, message = pair_with_manifest()
    assert isinstance(pair.receiver.on_notification("P", message), Accepted)
    assert pair.receiver.on_notification("P", message) is None


def test_a_manifest_after_the_request_is_over_is_ignored() -> None:
    pair, message = pair_with_manifest()
    pair.receiver.quarantine("r")
    assert pair.receiver.on_notification("P", message) is None
    assert pair.receiver.waiting
    assert pair.receiver.close("r") is pair.lease
    assert pair.receiver.on_notification("P", message) is None


def test_a_manifest_from_somebody_else_is_ignored() -> None:
    pair, message = pair_with_manifest()
    assert pair.receiver.on_notification("Q", message) is None
    assert isinstance(pair.receiver.on_notification("P", message), Accepted)


@pytest.mark.parametrize("message", [b"", b"\xc1", b"genNotif", encode(Reservation(8, 0, ()))])
def test_what_is_no_manifest_is_ignored(message: bytes) -> None:
    pair, manifest = pair_with_manifest()
    assert pair.receiver.on_notification("P", message) is None
    assert isinstance(pair.receiver.on_notification("P", manifest), Accepted)


def test_a_manifest_for_an_unknown_lease_is_ignored() -> None:
    pair, message = pair_with_manifest(lease_id="other")  # type: ignore[arg-type]
    assert pair.receiver.on_notification("P", message) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"incarnation": 9}, "earlier life"),
        ({"sender_incarnation": 9}, "another life of the sender"),
        ({"checksums": ()}, "do not cover"),
        ({"checksums": ((0, 2, *ALL, 1), (2, 1, *ALL, 1))}, "checksum of blocks 0 to 1, layers 0 to 8 differs"),
        ({"checksums": ((2, 1, *ALL, 1), (0, 2, *ALL, 1))}, "in order"),
        ({"checksums": ((0, 0, *ALL, 1),)}, "in order"),
        ({"checksums": ((0, -1, *ALL, 1),)}, "in order"),
        ({"checksums": ((-1, 2, *ALL, 1),)}, "in order"),
        ({"checksums": ((0, 4, *ALL, 1),)}, "in order"),
        ({"checksums": ((0, 2**40, *ALL, 1),)}, "in order"),
        ({"checksums": ((0, 2),)}, "malformed"),
        ({"checksums": ((0, 3, *ALL),)}, "malformed"),
        ({"checksums": ((0, 3, *ALL, 1, 1),)}, "1 slices here and 2 there"),
        ({"checksums": ((0, 3, 1, LAYERS, 1),)}, "in order"),
        ({"checksums": ((0, 3, 0, LAYERS + 1, 1),)}, "in order"),
        ({"checksums": ((0, 3, 4, 4, 1),)}, "in order"),
        ({"checksums": (5,)}, "malformed"),
        ({"checksums": ((0, 2, *ALL, "x"),)}, "malformed"),
        ({"checksums": ((0, 2, *ALL, True),)}, "malformed"),
    ],
)
def test_a_manifest_that_proves_nothing_is_refused(changes: dict[str, object], reason: str) -> None:
    pair, message = pair_with_manifest(**changes)  # type: ignore[arg-type]
    refused = pair.receiver.on_notification("P", message)
    assert isinstance(refused, Refused)
    assert reason in refused.reason
    assert refused.lease.quarantine
    assert pair.receiver.waiting
    assert pair.receiver.on_notification("P", message) is None


def test_one_checksum_of_several_is_missing() -> None:
    pair, message = pair_with_manifest()
    checksums = decode(Manifest, message).checksums
    short = encode(dataclasses.replace(decode(Manifest, message), checksums=checksums[:1]))
    assert isinstance(pair.receiver.on_notification("P", short), Refused)


@pytest.mark.parametrize("block", [4, 2, 9])
def test_a_flipped_byte_is_refused(block: int) -> None:
    pair, message = pair_with_manifest()
    content = bytearray(pair.network.pools["D"][block])
    content[0] ^= 1
    pair.network.pools["D"][block] = bytes(content)
    refused = pair.receiver.on_notification("P", message)
    assert isinstance(refused, Refused)
    assert "differs" in refused.reason


def test_blocks_that_changed_on_the_way_out_are_refused() -> None:
    """P's block is overwritten between its checksum and the write that takes effect late."""
    pair = Pair()
    pair.network.hold = True
    pair.reserve()
    pair.sender.offer("r", Chunk(0, (10, 11, 12), ALL), ENDING)
    pair.step()
    pair.network.pools["P"][11] = b"another prompt"
    pair.network.deliver(pair.network.in_flight[0])
    assert isinstance(pair.judge()[0], Refused)


def test_a_bug_while_a_manifest_is_checked_refuses_it() -> None:
    pair, message = pair_with_manifest()

    def digest(_: Sequence[int], __: Layers) -> tuple[int, ...]:
        raise RuntimeError("broken")

    pair.on["D"].checksum = digest
    refused = pair.receiver.on_notification("P", message)
    assert isinstance(refused, Refused)
    assert refused.reason == "checking the manifest failed: RuntimeError: broken"
    assert refused.lease.quarantine
