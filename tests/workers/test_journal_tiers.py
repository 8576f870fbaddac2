"""What a worker publishes of prefixes that lie in several tiers: of each the best tier that has it, closed under prefix
after every entry of the journal, however the device's tree and the trie below it change beside each other."""

from collections.abc import Iterable

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from transfer.gossip.summary import DEVICE, DISK, HOST, Load, Summary
from workers.kv.journal import Journal

LIMIT = 4
Path = tuple[int, ...]
paths = st.lists(st.integers(1, 2), min_size=1, max_size=4).map(tuple)
lower = st.sampled_from([HOST, DISK])


def key_of(path: Path) -> int:
    return int("".join(map(str, path)))


def ways_to(path: Path) -> list[Path]:
    """The prefixes of a path, the shortest first."""
    return [path[:depth] for depth in range(1, len(path) + 1)]


class Machine(RuleBasedStateMachine):
    """`device` is a tree closed under prefix, and so is `below`: which of the lower tiers have a prefix, one at least.
    Each of these for itself need not be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal("model")
        self.summary, self.small = Summary("w", 1, 1000), Summary("w", 1, LIMIT)
        self.device: set[Path] = set()
        self.below: dict[Path, set[int]] = {}

    def beginning(self, path: Path, device: bool = False) -> list[Path]:
        """What begins with a path, below the device or on it, the deepest first."""
        held: Iterable[Path] = self.device if device else self.below
        return sorted((one for one in held if one[: len(path)] == path), reverse=True)

    @rule(path=paths)
    def compute(self, path: Path) -> None:
        new = [one for one in ways_to(path) if one not in self.device]
        self.device.update(new)
        self.journal.came([key_of(one) for one in new])
        self.check()

    @precondition(lambda self: self.device)
    @rule(data=st.data(), demote=st.booleans())
    def evict(self, data: st.DataObject, demote: bool) -> None:
        path = data.draw(st.sampled_from(sorted(self.device)))
        if demote:
            self.store(path, HOST)
        gone = self.beginning(path, device=True)
        self.device.difference_update(gone)
        self.journal.went([key_of(one) for one in gone])
        self.check()

    @precondition(lambda self: self.device or self.below)
    @rule(data=st.data(), tier=lower)
    def store_something(self, data: st.DataObject, tier: int) -> None:
        self.store(data.draw(st.sampled_from(sorted({*self.device, *self.below}))), tier)

    def store(self, path: Path, tier: int) -> None:
        """And all above it, those that are in no lower tier at least."""
        above = [one for one in ways_to(path)[:-1] if one not in self.below]
        new = above + [path] * (tier not in self.below.get(path, ()))
        for one in new:
            self.below.setdefault(one, set()).add(tier)
        self.journal.stored([key_of(one) for one in new], tier)
        self.check()

    @precondition(lambda self: self.below)
    @rule(data=st.data(), tier=lower)
    def leave(self, data: st.DataObject, tier: int) -> None:
        """A lower tier gives up a prefix; what is then in none goes, and before it all that begins with it."""
        path = data.draw(st.sampled_from(sorted(self.below)))
        if self.below[path] == {tier}:
            gone = self.beginning(path)
            for one in gone:
                del self.below[one]
            self.journal.lost([key_of(one) for one in gone])
            self.check()
        elif tier in self.below[path]:
            self.below[path].remove(tier)
            self.journal.dropped([key_of(path)], tier)
            self.check()

    @rule()
    def publish(self) -> None:
        self.summary.update(Load())
        self.small.update(Load())

    def expected(self) -> dict[Path, int]:
        best = {path: min(tiers) for path, tiers in self.below.items()}
        return {**best, **dict.fromkeys(self.device, DEVICE)}

    def check(self) -> None:
        """After every entry, for the reader may stop there."""
        entries = list(self.journal._entries)
        self.journal.read(self.summary)
        expected = self.expected()
        assert self.summary._keys.tiers == {key_of(path): tier for path, tier in expected.items()}
        tiers = dict(self.journal._tiers)
        self.journal._entries.extend(entries)  # each of them changes nothing when it comes once more
        self.journal.read(self.small)
        assert self.journal._tiers == tiers
        published = {path for path in expected if key_of(path) in self.small}
        assert len(published) == len(self.small) == min(LIMIT, len(expected))
        assert all(above in published for path in published for above in ways_to(path))
        assert published <= self.device or published >= self.device


Machine.TestCase.settings = settings(stateful_step_count=30)
TestPublished = Machine.TestCase


def test_the_best_tier_that_is_left_is_told() -> None:
    journal, summary = Journal("model"), Summary("w", 1, 10)
    journal.came([5])
    journal.stored([5], DISK)
    journal.stored([5], HOST)
    for change, tier in (
        (lambda: None, DEVICE),
        (lambda: journal.went([5]), HOST),
        (lambda: journal.dropped([5], HOST), DISK),
        (lambda: journal.came([5]), DEVICE),
        (lambda: journal.dropped([5], DISK), DEVICE),
    ):
        change()
        journal.read(summary)
        assert list(summary.update(Load()).tiers) in ([tier], [])
        assert list(summary.snapshot(Load()).tiers) == [tier]
    journal.went([5])
    journal.read(summary)
    assert 5 not in summary
