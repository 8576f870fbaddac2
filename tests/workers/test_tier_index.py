"""The index of what lies below the device, beside a model that is as simple as can be."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.kv.blockfile import Block, child_digest, root_digest
from workers.kv.tier_index import NO_SLOT, Dropped, Entry, TierIndex

STEP = 4
NOW = 1.0
SALTS = (b"", b"other")
paths = st.lists(st.sampled_from([b"aaaa", b"bbbb"]), min_size=1, max_size=5).map(b"".join)


class Machine(RuleBasedStateMachine):
    """Blocks come to host memory and to files, in order or by their names, are pinned, and go again."""

    def __init__(self) -> None:
        super().__init__()
        self.index = TierIndex("model", "model", "me", STEP)
        self.slots = 0
        self.pinned: list[Entry] = []
        self.held: list[list[Entry]] = []
        self.used_slots: set[int] = set()
        self.own_files: set[bytes] = set()

    def gone(self, dropped: Dropped) -> None:
        assert len(set(dropped.slots)) == len(dropped.slots)
        assert set(dropped.slots) <= self.used_slots
        self.used_slots -= set(dropped.slots)
        self.own_files -= set(dropped.files)
        depths = [one.depth for one in dropped.entries]
        assert depths == sorted(depths, reverse=True)

    @rule(salt=st.sampled_from(SALTS), tokens=paths, done=st.booleans())
    def store(self, salt: bytes, tokens: bytes, done: bool) -> None:
        known = self.index.walk(salt, tokens)
        above = known[-1] if known else None
        if above and above.slot == NO_SLOT and not above.there:
            return
        entries: list[Entry] = []
        for start in range(len(known) * STEP, len(tokens), STEP):
            above = self.index.grow(above, salt, tokens[start : start + STEP])
            self.slots += 1
            self.used_slots.add(self.slots)
            above.slot = self.slots
            entries.append(above)
        if entries:
            self.index.pin(entries[-1])
            if done:
                self.index.stored(entries)
            self.gone(self.index.unpin(entries[-1]))

    @rule(salt=st.sampled_from(SALTS), tokens=paths, owner=st.sampled_from(["me", "you"]), count=st.integers(1, 5))
    def write(self, salt: bytes, tokens: bytes, owner: str, count: int) -> None:
        known = [one for one in self.index.walk(salt, tokens) if not one.owner and one.ready]
        if known:
            self.index.written(known, [owner] * min(count, len(known)))
            if owner == "me":
                self.own_files.update(one.digest for one in known[:count])

    @rule(salt=st.sampled_from(SALTS), tokens=paths, owner=st.sampled_from(["me", "you"]))
    def find(self, salt: bytes, tokens: bytes, owner: str) -> None:
        """A file is found by its name."""
        parent, digest = b"", root_digest("model", salt)
        for start in range(0, len(tokens), STEP):
            parent, digest = digest, child_digest(digest, tokens[start : start + STEP])
        known = self.index.walk(salt, tokens)
        block = Block(digest, parent, len(tokens) // STEP - 1, salt, tokens[-STEP:])
        entry = self.index.link(block)
        assert (entry is not None) == (len(known) >= block.depth)
        if entry is not None:
            assert self.index.walk(salt, tokens)[-1] is entry
            assert entry.block == block
            if not entry.owner:
                self.index.written([entry], [owner])
                if owner == "me":
                    self.own_files.add(digest)

    @rule(salt=st.sampled_from(SALTS), tokens=paths)
    def touch(self, salt: bytes, tokens: bytes) -> None:
        if known := self.index.walk(salt, tokens):
            self.index.touch(known[-1])

    @rule(salt=st.sampled_from(SALTS), tokens=paths)
    def pin(self, salt: bytes, tokens: bytes) -> None:
        if known := self.index.walk(salt, tokens):
            self.index.pin(known[-1])
            self.pinned.append(known[-1])

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        assert not entry.gone
        self.gone(self.index.unpin(entry))

    @rule(salt=st.sampled_from(SALTS), tokens=paths, first=st.integers(0, 4))
    def hold(self, salt: bytes, tokens: bytes, first: int) -> None:
        if known := self.index.walk(salt, tokens)[first:]:
            self.index.hold(known)
            self.held.append(known)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        entries = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.gone(self.index.let_go(entries))

    @rule(salt=st.none() | st.sampled_from(SALTS))
    def evict_from_host(self, salt: bytes | None) -> None:
        if (entry := next(self.index.host.oldest(NOW, salt), None)) is not None:
            self.gone(self.index.leave_host(entry))

    @rule(salt=st.none() | st.sampled_from(SALTS))
    def evict_from_disk(self, salt: bytes | None) -> None:
        if (entry := next(self.index.disk.oldest(NOW, salt), None)) is not None:
            self.gone(self.index.leave_disk(entry))

    @rule(salt=st.sampled_from(SALTS), tokens=paths)
    def a_file_is_bad(self, salt: bytes, tokens: bytes) -> None:
        known = self.index.walk(salt, tokens)
        if known and known[-1].owner:
            self.gone(self.index.leave_disk(known[-1]))

    @invariant()
    def everything_is_found_and_closed(self) -> None:
        entries = list(self.index.entries())
        assert len(self.index) == len(entries)
        pins: dict[Entry, int] = {}
        for entry in [*self.pinned, *(some[-1] for some in self.held)]:
            for one in entry.path():
                pins[one] = pins.get(one, 0) + 1
        for entry in entries:
            path = entry.path()[::-1]
            assert self.index.walk(entry.salt, b"".join(one.tokens for one in path)) == path
            assert entry.there or entry.pins
            assert entry.pins == pins.get(entry, 0)
            assert self.index.by_digest(entry.digest) is entry
            assert not entry.gone
        assert {one.slot for one in entries if one.slot != NO_SLOT} == self.used_slots
        assert {one.digest for one in entries if one.owner == "me"} == self.own_files

    @invariant()
    def no_tier_gives_up_what_leads_to_others(self) -> None:
        for tier, there in ((self.index.host, "ready"), (self.index.disk, "owner")):
            order = list(tier.oldest(NOW))
            may = "may_leave_host" if tier is self.index.host else "may_leave_disk"
            assert {one for one in self.index.entries() if one in tier and getattr(one, may)} == set(order)
            for number, one in enumerate(order):
                assert getattr(one, there)
                assert not set(one.path()[1:]) & set(order[:number])
                assert not one.held
        assert len(self.index.host) == sum(one.ready for one in self.index.entries())
        assert len(self.index.disk) == sum(one.owner == "me" for one in self.index.entries())


TestMachine = Machine.TestCase


def test_the_oldest_of_a_salt_is_found_among_many() -> None:
    index = TierIndex("model", "model", "me", STEP)
    entries = [index.grow(None, salt, tokens) for tokens in (b"aaaa", b"bbbb", b"cccc") for salt in SALTS]
    for slot, entry in enumerate(entries):
        entry.slot = slot
        index.stored([entry])
    index.touch(entries[0])
    assert list(index.host.oldest(NOW)) == [*entries[1:], entries[0]]
    assert list(index.host.oldest(NOW, b"")) == [entries[2], entries[4], entries[0]]
    assert index.host.count(b"other") == 3


def test_what_is_kept_goes_last() -> None:
    index = TierIndex("model", "model", "me", STEP)
    first, second, third = (index.grow(None, b"", tokens) for tokens in (b"aaaa", b"bbbb", b"cccc"))
    for slot, entry in enumerate((first, second, third)):
        entry.slot = slot
        index.stored([entry])
    index.keep(first, NOW + 1)
    index.keep(first, NOW - 1)
    assert list(index.host.oldest(NOW)) == [second, third, first]
    assert list(index.host.oldest(NOW + 1)) == [first, second, third]


@pytest.mark.parametrize("field", ["depth", "salt", "parent"])
def test_a_name_links_nothing_that_does_not_belong_there(field: str) -> None:
    index = TierIndex("model", "model", "me", STEP)
    first = index.grow(None, b"", b"aaaa")
    index.written([first], ["me"])
    right = {"depth": 1, "salt": b"", "parent": first.digest}
    wrong = {"depth": 2, "salt": b"other", "parent": root_digest("model", b"")}
    about = {**right, field: wrong[field]}
    assert index.link(Block(child_digest(first.digest, b"bbbb"), tokens=b"bbbb", **about)) is None  # type: ignore[arg-type]
    assert index.link(Block(child_digest(first.digest, b"bbbb"), tokens=b"bbbb", **right)) is not None  # type: ignore[arg-type]
