"""The codec: what goes in comes out, and nothing else is let in."""

import dataclasses
import random
import tracemalloc

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given

from transfer.messages import (
    CODEC_VERSION,
    MAX_MESSAGE_BYTES,
    Manifest,
    MessageError,
    Reservation,
    decode,
    encode,
    pack_tokens,
    unpack_tokens,
)

u64 = st.integers(0, 2**64 - 1)
manifests = st.builds(
    Manifest,
    lease_id=st.text(max_size=40),
    incarnation=u64,
    sender_incarnation=u64,
    first_token=st.integers(0, 2**31 - 1),
    cached_tokens=st.integers(0, 2**31 - 1),
    checksums=st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 2**20), u64), max_size=5).map(tuple),
)
ONE = Manifest("lease", 1, 2, 3, 4, ((0, 2, 2**64 - 1),))


@given(manifests)
def test_a_manifest_survives(manifest: Manifest) -> None:
    assert decode(Manifest, encode(manifest)) == manifest


@given(st.builds(Reservation, u64, st.integers(0, 9), st.lists(st.integers(0, 2**31), max_size=9).map(tuple)))
def test_a_reservation_survives(reservation: Reservation) -> None:
    assert decode(Reservation, encode(reservation)) == reservation


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(Manifest, data)


def test_a_damaged_message_is_refused_or_still_has_the_right_types() -> None:
    data, draw = encode(ONE), random.Random(0)
    for _ in range(5000):
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            manifest = decode(Manifest, bytes(damaged[: draw.randint(1, len(damaged))]))
        except MessageError:
            continue
        assert [type(value) for value in dataclasses.astuple(manifest)] == [str, int, int, int, int, tuple]


@pytest.mark.parametrize("cut", range(1, len(encode(ONE))))
def test_a_part_of_a_message_is_refused(cut: int) -> None:
    with pytest.raises(MessageError):
        decode(Manifest, encode(ONE)[:cut])


def test_what_follows_a_message_is_refused() -> None:
    with pytest.raises(MessageError):
        decode(Manifest, encode(ONE) + b"\x00")


FIELDS = ["lease", 1, 2, 3, 4, []]


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([CODEC_VERSION + 1, "Manifest", *FIELDS], "version"),
        ([CODEC_VERSION, "Reservation", *FIELDS], "Reservation"),
        ([CODEC_VERSION, "Manifest", *FIELDS, 5], "number of fields"),
        ([CODEC_VERSION, "Manifest", *FIELDS[:-1]], "number of fields"),
        ([CODEC_VERSION, "Manifest", b"lease", *FIELDS[1:]], "lease_id is a bytes"),
        ([CODEC_VERSION, "Manifest", "lease", True, *FIELDS[2:]], "incarnation is a bool"),
        ([CODEC_VERSION, "Manifest", "lease", 1.0, *FIELDS[2:]], "incarnation is a float"),
        ([CODEC_VERSION, "Manifest", "lease", None, *FIELDS[2:]], "incarnation is a NoneType"),
        ([CODEC_VERSION, "Manifest", *FIELDS[:-1], {}], "checksums is a dict"),
        ([CODEC_VERSION, "Manifest", *FIELDS[:-1], msgpack.ExtType(1, b"x")], "not a message"),
        ([], "number of fields"),
        ({"Manifest": 1}, "number of fields"),
        (7, "number of fields"),
    ],
)
def test_another_message_is_refused_with_its_reason(items: object, says: str) -> None:
    with pytest.raises(MessageError, match=says):
        decode(Manifest, msgpack.packb(items))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(MessageError):
        decode(Manifest, b"\x91" * 100_000 + b"\x00")


def test_size_is_capped_both_ways() -> None:
    large = dataclasses.replace(ONE, lease_id="x" * MAX_MESSAGE_BYTES)
    with pytest.raises(MessageError, match=str(MAX_MESSAGE_BYTES)):
        encode(large)
    with pytest.raises(MessageError, match=str(MAX_MESSAGE_BYTES)):
        decode(Manifest, bytes(MAX_MESSAGE_BYTES + 1))


def test_a_length_that_promises_more_than_is_there_allocates_nothing() -> None:
    for head in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        with pytest.raises(MessageError):
            decode(Manifest, head)


def test_nested_lengths_that_promise_more_than_is_there_allocate_little() -> None:
    """Each array claims as many elements as there are bytes: allocated in full, they would be many times the input."""
    nested = b"\x98\x01\xa8Manifest" + b"\xdd\x00\x00\xff\xff" * 500
    tracemalloc.start()
    try:
        with pytest.raises(MessageError):
            decode(Manifest, nested + bytes(100_000 - len(nested)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_tokens_survive_packing(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert len(packed) == 4 * len(tokens)
    assert unpack_tokens(packed).tolist() == tokens


def test_packed_tokens_are_little_endian() -> None:
    assert pack_tokens([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_a_token_that_does_not_fit_is_an_error(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token])
