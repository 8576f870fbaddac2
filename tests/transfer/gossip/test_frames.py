"""Frames: what comes back is what went in, and nothing else gets through."""

import contextlib
import itertools
import random
import tracemalloc
from dataclasses import replace
from hashlib import blake2b

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.gossip.cluster import KEY, Cluster
from transfer.gossip.frames import (
    ALIVE,
    DEAD,
    MAX_FRAME,
    ROUTER,
    WINDOW,
    WORKER,
    Ack,
    Claim,
    Entry,
    FrameError,
    Have,
    Mend,
    Message,
    Nack,
    News,
    Notice,
    Opener,
    Ping,
    PingFor,
    Refused,
    Sealer,
    State,
    Sync,
    Want,
    _derive,
    pack,
)
from transfer.gossip.summary import Load, Repair, Update

LOAD = Load(70_000, 12, 8123.5, 900, (("r0", 3), ("r1", 2**40)))
UPDATE = Update("w0", 17, 5, 4, LOAD, 2**64 - 1, b"12345678" * 3, b"\0\1\2", b"abcdefgh")
CLAIM = Claim("w0", WORKER, "10.0.0.7", 7001, 2**62, 3, DEAD, "r1")
MESSAGES: list[Message] = [
    Ping(1, "w0"),
    PingFor(2**63, "w0"),
    Ack(0),
    Nack(9),
    CLAIM,
    Sync(bytes(512)),
    State(b"\0\5", True, (CLAIM, replace(CLAIM, host="fe80::1", role=ROUTER, status=ALIVE))),
    News(UPDATE),
    Entry(replace(UPDATE, base=0)),
    Mend(Repair("w0", 17, 5, LOAD, 7, b"\1\77", b"12345678", b"\2")),
    Have(True, (("w0", 17, 5), ("w1", 2, 0))),
    Want("w0", 17, 5, bytes(512)),
    Notice("r0", "w0", 4, 512, 600, "w1", bytes(range(16))),
]


def sealed(*messages: Message, key: bytes = KEY) -> bytes:
    return Sealer("w0", 17, key).seal(pack(message) for message in messages)


def forged(body: bytes) -> bytes:
    """A frame with a right tag and whatever body."""
    return b"HW\x01" + blake2b(body, digest_size=16, key=_derive(KEY)).digest() + body


def reason(data: bytes) -> str:
    with pytest.raises(Refused) as refused:
        Opener(KEY).open(data)
    return refused.value.reason


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_goes_in_comes_out(message: Message) -> None:
    frame = Opener(KEY).open(sealed(message, message))
    assert (frame.sender, frame.incarnation, frame.messages) == ("w0", 17, (message, message))


def test_another_key_and_any_changed_bit_are_refused() -> None:
    data = sealed(*MESSAGES[:5])
    assert reason(sealed(Ack(1), key=b"another key that is long")) == "key"
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        assert reason(bytes(changed)) in ("key", "malformed")
    for length in range(len(data)):
        assert reason(data[:length]) in ("size", "key")


def test_a_short_key_is_an_error() -> None:
    with pytest.raises(ValueError, match="16"):
        Opener(b"short")


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert reason(data) in ("size", "malformed", "key")
    assert reason(b"HW\x01" + data) in ("size", "key")


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=30,
)


@given(
    st.lists(
        st.one_of(
            ANY,
            st.tuples(st.integers(0, 13)).flatmap(lambda kind: st.lists(ANY, max_size=8).map(lambda x: [*kind, *x])),
        )
    )
)
def test_authentic_nonsense_is_refused_or_well_formed(items: list[object]) -> None:
    """Who has the key can still not make a node fall over."""
    with contextlib.suppress(Refused):
        frame = Opener(KEY).open(forged(msgpack.packb(["w0", 17, 1, *items])))
        assert Opener(KEY).open(sealed(*frame.messages)).messages == frame.messages


@pytest.mark.parametrize(
    "message",
    [
        [4, "w0", 7, "10.0.0.7", 7001, 1, 0, ALIVE, "w0"],  # role
        [4, "w0", WORKER, "example.org", 7001, 1, 0, ALIVE, "w0"],  # would be looked up
        [4, "w0", WORKER, "10.0.0.7", 0, 1, 0, ALIVE, "w0"],
        [4, "w0", WORKER, "10.0.0.7", 70_000, 1, 0, ALIVE, "w0"],
        [4, "w0", WORKER, "10.0.0.7", 7001, 1, 0, 4, "w0"],
        [4, "w" * 129, WORKER, "10.0.0.7", 7001, 1, 0, ALIVE, "w0"],
        [4, "\N{SNOWMAN}" * 43, WORKER, "10.0.0.7", 7001, 1, 0, ALIVE, "w0"],  # 129 bytes
        [0, -1, "w0"],
        [0, True, "w0"],
        [10, True, [["w0", 1]]],
        [11, "w0", 1, 1, b"short"],
        [7, ["w0", 1, 5, 0], [5, b"", b"", b""], [0, 0, 0.0, 0, []]],  # base is not before seq
        [7, ["w0", 1, 5, 0], [4, b"1234567", b"\0", b""], [0, 0, 0.0, 0, []]],
        [7, ["w0", 1, 5, 0], [4, b"12345678", b"\3", b""], [0, 0, 0.0, 0, []]],  # tier
        [7, ["w0", 1, 5, 0], [4, b"", b"", b"1"], [0, 0, 0.0, 0, []]],
        [7, ["w0", 1, 5, 0], [4, b"", b"", b""], [0, 0, float("nan"), 0, []]],
        [7, ["w0", 1, 5, 0], [4, b"", b"", b""], [0, 0, 0.0, 0, [["r0", -1]]]],
        [9, ["w0", 1, 5, 0], [b"\x40", b"", b""], [0, 0, 0.0, 0, []]],  # bucket 64
        [13],
        [],
    ],
)
def test_what_contradicts_itself_is_refused(message: object) -> None:
    assert reason(forged(msgpack.packb(["w0", 17, 1, message]))) == "malformed"


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
        b"\x94\xa2w0\x11\x01\xdd\x7f\xff\xff\xff" + b"\x00" * 100,
        b"\x94\xa2w0\x11\x01\xc6\xff\xff\xff\xff1234",  # bytes
        b"\x94\xa2w0\x11\x01\xdb\xff\xff\xff\xff1234",  # text
        b"\x94\xa2w0\x11\x01\xdf\xff\xff\xff\xff1234",  # a map
        b"\x94\xa2w0\x11\x01\xc9\xff\xff\xff\xff\x01",  # an extension
        b"\x94\xa2w0\x11\x01" + b"\x91" * 100_000,  # depth
        b"\x94\xa2w0\x11\x01" + b"\xdc\xff\xff" * 300_000,
        b"\xdd\x00\x0d\xbb\xa0" + bytes(900_000),  # all there, and no message
        b"\xdd\x00\x06\xdd\xd0" + b"\x91\x00" * 450_000,
        b"\xdd\x00\x0f\x42\x40" + b"\x80" * 1_000_000,  # empty maps
        b"\xdd\x00\x04\x93\xe0" + b"\xc7\x00\x01" * 300_000,  # empty extensions
    ],
)
def test_lies_about_lengths_cost_nothing(body: bytes) -> None:
    data = forged(body)
    opener = Opener(KEY)
    tracemalloc.start()
    with pytest.raises(Refused, match="malformed"):
        opener.open(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 * len(data) + 100_000


def test_a_frame_over_the_cap_is_not_looked_at() -> None:
    assert reason(b"HW\x01" + bytes(MAX_FRAME)) == "size"
    with pytest.raises(FrameError, match="larger"):
        pack(News(replace(UPDATE, added=bytes(8 * 130_000), tiers=bytes(130_000))))


def test_replays_are_refused_and_reordering_is_not() -> None:
    sealer, opener = Sealer("w0", 17, KEY), Opener(KEY)
    frames = [sealer.seal([pack(Ack(number))]) for number in range(WINDOW + 2000)]
    order = list(range(1000))
    random.Random(1).shuffle(order)
    for number in order:  # reordered by up to a thousand
        opener.open(frames[number])
    for number in order:
        with pytest.raises(Refused, match="replay"):
            opener.open(frames[number])
    opener.open(frames[-1])
    with pytest.raises(Refused, match="replay"):  # too old to tell
        opener.open(frames[1500])
    opener.open(frames[-WINDOW])
    opener.open(Sealer("w0", 18, KEY).seal([]))
    with pytest.raises(Refused, match="old"):
        opener.open(frames[-2])


def test_a_frame_that_is_five_seconds_on_its_way_is_taken() -> None:
    """Over TCP, while a router of a thousand workers sends its datagrams to seven others."""
    sealer, opener = Sealer("r0", 1, KEY), Opener(KEY)
    slow = sealer.seal([pack(Ack(1))])
    for _ in range(5 * 20 * 100):
        opener.open(sealer.seal([]))
    assert opener.open(slow).messages == (Ack(1),)


def test_batches_keep_order_and_size() -> None:
    sealer = Sealer("w0", 17, KEY)
    messages = [pack(Notice("r0", "w" * (number % 100), number, 5, 7, "", b"")) for number in range(200)]
    messages[50] = bytes(5000)
    batches = sealer.batches(messages, 1400)
    assert list(itertools.chain(*batches)) == messages
    for batch in batches:
        assert len(sealer.seal(batch)) <= 1400 or batch == [messages[50]]
    assert len(batches) < 12


def test_mutated_and_forged_frames_do_not_harm_a_running_cluster() -> None:
    """Fuzzed frames, some with the right key, into every node; then all must still agree."""
    cluster = Cluster(11)
    names = ["r0", "r1", "w0", "w1"]
    for name in names:
        cluster.start(name)
    cluster.run(3.0)
    draw = random.Random(2)
    messages = [msgpack.unpackb(pack(message)) for message in MESSAGES]
    taken = 0
    for round_ in range(3000):
        body = bytearray(msgpack.packb(["w0", 3, 10**6 + round_, draw.choice(messages)]))
        for _ in range(draw.randrange(4)):
            body[draw.randrange(10, len(body))] = draw.randrange(256)  # behind sender and counter
        node = cluster.nodes[draw.choice(names)]
        data = forged(bytes(body)) if round_ % 2 else bytes(body)
        for send in node.gossip.receive(cluster.now, data, ("10.0.0.1", 10_000)):
            assert len(send.data) <= MAX_FRAME
        node.gossip.take_events()
        taken = round_ + 1 - sum(sum(node.gossip.refused.values()) for node in cluster.nodes.values())
    assert taken > 300  # most of those that were not changed, and some that were
    for name in names:  # whoever was made to believe in a later life is started in a still later one
        cluster.lives = 2**64 - 10
        del cluster.nodes[name]
    for name in names:
        cluster.start(name)
    cluster.run(5.0)
    assert not [line for line in cluster.differences() if "holds" not in line]


def test_without_the_key_nobody_speaks_for_a_worker() -> None:
    cluster = Cluster(12)
    for name in ("r0", "r1", "w0"):
        cluster.start(name)
    cluster.run(3.0)
    worker = cluster.workers["w0"]
    lie = News(worker.summary.snapshot(Load()))
    lie = News(replace(lie.update, seq=lie.update.seq + 100, added=bytes(8), tiers=b"\0"))
    for key in (b"a key that was guessed", b"the key of this test cluster!"):
        data = Sealer("w0", worker.gossip.me.incarnation, key).seal([pack(lie)])
        for router in cluster.routers.values():
            before = router.replicas.state("w0")
            assert router.gossip.receive(cluster.now, data, cluster.address("w0")) == []
            assert router.replicas.state("w0") == before
            assert router.gossip.refused["key"] >= 1
