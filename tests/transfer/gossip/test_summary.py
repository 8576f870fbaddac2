"""A worker's log: what it says equals what it has, is closed under prefix, and stays within its bounds; and what it
leaves out is not on the device, if something that it says is not."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer.gossip.summary import (
    DEVICE,
    DISK,
    HOST,
    Load,
    Repair,
    Summary,
    Update,
    bucket_digests,
    differing,
    digest,
    in_buckets,
)

LIMIT = 6
RING = 4
IDLE = Load()
tiers = st.sampled_from([DEVICE, HOST, DISK])


def keys_of(packed: bytes) -> list[int]:
    return np.frombuffer(packed, "<u8").tolist()


def replayed(log: list[Update]) -> dict[int, int]:
    """What a reader has that applies a log from its start or from a snapshot."""
    state: dict[int, int] = {}
    for update in log:
        if update.base == 0:
            state = {}
        for key in keys_of(update.removed):
            del state[key]
        state.update(zip(keys_of(update.added), update.tiers, strict=True))
    return state


def digest_of(state: dict[int, int]) -> int:
    return digest(np.array(list(state), np.uint64), np.array(list(state.values()), np.uint8))


def key_of(path: tuple[int, ...]) -> int:
    return int("1" + "".join(str(step) for step in path))


def closed(state: set[int] | dict[int, int]) -> bool:
    """Whether all that are above one are there, too: above 1ab are 1a and 1."""
    return all(key == 1 or key // 10 in state for key in state)


class Machine(RuleBasedStateMachine):
    """A random tree of prefixes, of which the summary may publish only a part. What is on the device is closed, too."""

    def __init__(self) -> None:
        super().__init__()
        self.summary = Summary("w", 3, LIMIT, RING)
        self.held: dict[int, int] = {}
        self.log: list[Update] = []

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=4), tier=tiers)
    def insert(self, path: list[int], tier: int) -> None:
        for depth in range(len(path) + 1):
            key = key_of(tuple(path[:depth]))
            if key not in self.held:
                self.put(key, tier if self.held.get(key // 10, DEVICE) == DEVICE else tier or HOST)

    def put(self, key: int, tier: int) -> None:
        self.held[key] = tier
        self.summary.add(key, tier)
        self.published_is_closed_and_within_the_limit()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        """A prefix comes to the device, and before it all above it."""
        key = str(data.draw(st.sampled_from(sorted(self.held))))
        for above in (int(key[:length]) for length in range(1, len(key) + 1)):
            self.put(above, DEVICE)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tier=st.sampled_from([HOST, DISK]))
    def unload(self, data: st.DataObject, tier: int) -> None:
        """A prefix leaves the device, and before it all that begins with it; or it changes its tier below."""
        top = str(data.draw(st.sampled_from(sorted(self.held))))
        for key in sorted((key for key in self.held if str(key).startswith(top)), reverse=True):
            if self.held[key] == DEVICE or str(key) == top:
                self.put(key, tier)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """A prefix and all that begins with it, the deepest first."""
        top = str(data.draw(st.sampled_from(sorted(self.held))))
        for key in sorted((key for key in self.held if str(key).startswith(top)), reverse=True):
            del self.held[key]
            self.summary.remove(key)
            self.published_is_closed_and_within_the_limit()

    @rule()
    def clear(self) -> None:
        for key in sorted(self.held, reverse=True):
            self.summary.remove(key)
        self.held.clear()

    @rule(queued=st.integers(0, 9))
    def update(self, queued: int) -> None:
        before = replayed(self.log)
        update = self.summary.update(Load(queued))
        assert (update.seq, update.base, update.load.queued_tokens) == (len(self.log) + 1, len(self.log), queued)
        self.log.append(update)
        after = replayed(self.log)
        published = {key: tier for key, tier in self.held.items() if key in self.summary}
        assert after == published
        assert digest_of(after) == update.digest == self.summary.digest
        assert closed(after)
        assert not self.summary.changes
        changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
        assert sorted([*keys_of(update.added), *keys_of(update.removed)]) == sorted(changed)
        there = set(before) - set(keys_of(update.removed))
        for key in keys_of(update.added):
            there.add(key)
            assert closed(there), "a reader may stop within `added`"

    @precondition(lambda self: self.log)
    @rule(seq=st.integers(-1, 60))
    def repair_by_log(self, seq: int) -> None:
        missing = self.summary.since(seq)
        kept = [update.seq for update in self.log[-RING:]]
        if missing is None:
            assert seq + 1 not in kept or seq > len(self.log) or self.crowded(seq)
        else:
            assert missing == self.log[seq:]

    def crowded(self, seq: int) -> bool:
        """Whether the log from there on has more changes than the ring keeps."""
        return sum(len(u.tiers) + len(u.removed) // 8 for u in self.log[seq:]) > 2 * LIMIT

    @precondition(lambda self: self.log)
    @rule()
    def repair_by_snapshot(self) -> None:
        snapshot = self.summary.snapshot(IDLE)
        assert (snapshot.seq, snapshot.base, snapshot.digest) == (len(self.log), 0, self.log[-1].digest)
        assert replayed([snapshot]) == replayed(self.log)
        there: set[int] = set()
        for key in keys_of(snapshot.added):
            there.add(key)
            assert closed(there)

    @precondition(lambda self: self.log)
    @rule(data=st.data())
    def repair_by_bucket(self, data: st.DataObject) -> None:
        behind = replayed(self.log[: data.draw(st.integers(0, len(self.log)))])
        theirs = bucket_digests(*arrays(behind))
        repair = self.summary.repair(theirs, IDLE)
        assert repair.buckets == bytes(
            number for number in range(64) if theirs[number] != self.summary.buckets()[number]
        )
        wrong = in_buckets(arrays(behind)[0], repair.buckets)
        mended = {key: tier for (key, tier), out in zip(behind.items(), wrong, strict=True) if not out}
        mended.update(zip(keys_of(repair.keys), repair.tiers, strict=True))
        assert mended == replayed(self.log)
        assert digest_of(mended) == repair.digest

    @invariant()
    def published_is_closed_and_within_the_limit(self) -> None:
        published = {key for key in self.held if key in self.summary}
        assert closed(published)
        assert len(published) == len(self.summary) == min(LIMIT, len(self.held))
        on_device = {key for key, tier in self.held.items() if tier == DEVICE}
        assert published <= on_device or published >= on_device
        assert sum(self.summary.buckets()) % 2**64 == self.summary.digest


def arrays(state: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(list(state), np.uint64), np.array(list(state.values()), np.uint8)


Machine.TestCase.settings = settings(stateful_step_count=40)
TestSummary = Machine.TestCase


def test_a_summary_that_has_said_nothing_begins_its_log_with_the_snapshot() -> None:
    summary = Summary("w", 1, LIMIT)
    summary.add(5)
    snapshot = summary.snapshot(IDLE)
    assert (snapshot.seq, snapshot.base, keys_of(snapshot.added)) == (1, 0, [5])
    assert summary.since(0) == [snapshot]
    assert summary.update(IDLE).base == 1


def test_what_came_and_went_between_two_updates_is_not_told() -> None:
    summary = Summary("w", 1, LIMIT)
    summary.add(5)
    summary.update(IDLE)
    summary.add(6)
    summary.remove(6)
    summary.remove(5)
    summary.add(5)
    heartbeat = summary.update(IDLE)
    assert not heartbeat.added + heartbeat.tiers + heartbeat.removed


def test_the_ring_is_no_longer_than_a_snapshot() -> None:
    """A log of more changes than twice the limit is worth less than a snapshot, and memory is bounded by it."""
    summary = Summary("w", 1, limit=10, ring=1000)
    for number in range(500):
        summary.add(1000 + number)
        summary.update(IDLE)
        summary.remove(1000 + number)
    kept = [seq for seq in range(500) if summary.since(seq) is not None]
    assert 9 <= len(kept) <= 20
    assert summary.since(500) == []
    assert summary.since(501) is None


def test_heartbeats_fill_the_ring_only() -> None:
    summary = Summary("w", 1, LIMIT, ring=7)
    for _ in range(20):
        summary.update(IDLE)
    assert [update.seq for update in summary.since(13) or []] == list(range(14, 21))
    assert summary.since(12) is None


def test_what_is_new_on_the_device_is_published_though_the_disk_is_full_of_other_things() -> None:
    summary = Summary("w", 1, limit=100)
    for key in range(1, 1000):
        summary.add(key, DISK)
    summary.update(IDLE)
    for key in range(2000, 2010):
        summary.add(key, DEVICE)
    update = summary.update(IDLE)
    assert sorted(keys_of(update.added)) == list(range(2000, 2010))
    assert sorted(keys_of(update.removed)) == list(range(91, 101))
    for key in range(2009, 1999, -1):
        summary.remove(key)
    assert sorted(keys_of(summary.update(IDLE).added)) == list(range(91, 101))


def test_what_leaves_the_device_stays_before_what_had_left_it() -> None:
    """What is above another one is not left out before it."""
    summary = Summary("w", 1, limit=2)
    summary.add(1)
    summary.add(10, HOST)
    summary.add(1, HOST)
    summary.add(2)
    assert (1 in summary, 10 in summary, 2 in summary) == (True, False, True)
    summary.add(2, DISK)
    summary.remove(2)
    assert (1 in summary, 10 in summary) == (True, True)


def test_the_tier_counts_in_the_digest() -> None:
    one = Summary("w", 1, LIMIT)
    one.add(5, DEVICE)
    other = Summary("w", 1, LIMIT)
    other.add(5, HOST)
    assert one.update(IDLE).digest != other.update(IDLE).digest


def test_equal_sets_differ_in_no_bucket() -> None:
    keys, tiers = arrays({key: key % 3 for key in range(1, 500)})
    assert differing(keys, tiers, bucket_digests(keys, tiers)) == (b"", b"", b"")
    assert all(bucket_digests(keys, tiers))


def test_lengths_have_to_fit() -> None:
    for bad in ({"added": bytes(8)}, {"tiers": b"\0"}, {"removed": bytes(7)}, {"added": bytes(9), "tiers": b"\0"}):
        with pytest.raises(ValueError, match="8 bytes"):
            Update("w", 1, 1, 0, IDLE, 0, **bad)
    with pytest.raises(ValueError, match="8 bytes"):
        Repair("w", 1, 1, IDLE, 0, b"", bytes(8), b"")
