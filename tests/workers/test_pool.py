"""Every block has one owner, and allocation prefers runs."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.kv.pool import CACHED, FREE, PRIVATE, QUARANTINED, BlockPool, OwnershipError

TOTAL = 20


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.owner = dict.fromkeys(range(TOTAL), FREE)

    def of(self, owner: int) -> list[int]:
        return [block for block, its in self.owner.items() if its == owner]

    @rule(count=st.integers(0, TOTAL), after=st.none() | st.integers(0, TOTAL - 1))
    def allocate(self, count: int, after: int | None) -> None:
        if count > len(self.of(FREE)):
            with pytest.raises(OwnershipError):
                self.pool.allocate(count, after)
            return
        blocks = self.pool.allocate(count, after)
        assert len(set(blocks)) == len(blocks) == count
        assert all(self.owner[block] == FREE for block in blocks)
        if count and after is not None and self.owner.get(after + 1) == FREE:
            assert blocks[0] == after + 1
        self.owner.update(dict.fromkeys(blocks, PRIVATE))

    @rule(blocks=st.sets(st.integers(0, TOTAL - 1), max_size=6), move=st.integers(0, 4))
    def move(self, blocks: set[int], move: int) -> None:
        """Allowed exactly when all the blocks are the giver's; refused as a whole otherwise."""
        source, target, act = [
            (PRIVATE, FREE, self.pool.release),
            (CACHED, FREE, lambda ids: self.pool.release(ids, CACHED)),
            (QUARANTINED, FREE, lambda ids: self.pool.release(ids, QUARANTINED)),
            (PRIVATE, CACHED, self.pool.adopt),
            (PRIVATE, QUARANTINED, self.pool.quarantine),
        ][move]
        if any(self.owner[block] != source for block in blocks):
            with pytest.raises(OwnershipError):
                act(sorted(blocks))
        else:
            act(sorted(blocks))
            self.owner.update(dict.fromkeys(blocks, target))

    @rule(move=st.integers(0, 2), share=st.integers(1, 3))
    def move_some(self, move: int, share: int) -> None:
        """Like `move`, but with blocks that fit."""
        source = (PRIVATE, CACHED, QUARANTINED)[move]
        blocks = self.of(source)[::share]
        self.pool.release(blocks, source)
        self.owner.update(dict.fromkeys(blocks, FREE))

    @invariant()
    def counts_are_right(self) -> None:
        assert self.pool.owners().tolist() == list(self.owner.values())
        counts = self.pool.counts()
        assert list(counts) == ["free", "private", "cached", "quarantined"]
        assert list(counts.values()) == [len(self.of(owner)) for owner in (FREE, PRIVATE, CACHED, QUARANTINED)]
        assert sum(counts.values()) == self.pool.total == TOTAL
        assert self.pool.free == counts["free"]


TestPool = Machine.TestCase
TestPool.settings = settings(stateful_step_count=30)


def with_free(*free: int, total: int = TOTAL) -> BlockPool:
    pool = BlockPool(total)
    pool.allocate(total)
    pool.release(list(free))
    return pool


def test_a_fresh_pool_gives_runs() -> None:
    pool = BlockPool(10)
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(3) == [4, 5, 6]


def test_the_smallest_run_that_fits() -> None:
    assert with_free(0, 1, 2, 3, 4, 8, 9, 10, 12).allocate(3) == [8, 9, 10]


def test_the_longest_runs_when_none_fits() -> None:
    assert with_free(0, 3, 4, 8, 9, 10).allocate(5) == [8, 9, 10, 3, 4]


def test_behind_the_last_block() -> None:
    assert with_free(0, 1, 6, 7, 8, 9).allocate(2, after=5) == [6, 7]
    assert with_free(0, 1, 2, 6, 7).allocate(4, after=5) == [6, 7, 0, 1]
    assert with_free(0, 1, 6, 7).allocate(2, after=3) == [0, 1]
    assert with_free(0, 1).allocate(2, after=TOTAL - 1) == [0, 1]


def test_nothing_changes_when_nothing_is_asked_for() -> None:
    pool = BlockPool(3)
    assert pool.allocate(0) == []
    pool.release([])
    assert pool.free == 3


@pytest.mark.parametrize("blocks", [[0, 0], [0, 5], [5]], ids=["twice at once", "one not owned", "not owned"])
def test_giving_back_what_is_not_owned_is_an_error_and_changes_nothing(blocks: list[int]) -> None:
    pool = BlockPool(6)
    pool.allocate(2)
    before = pool.owners().tolist()
    with pytest.raises(OwnershipError, match="private"):
        pool.release(blocks)
    assert pool.owners().tolist() == before


def test_giving_back_twice_is_an_error() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(OwnershipError):
        pool.release(blocks)


def test_more_than_there_is() -> None:
    with pytest.raises(OwnershipError, match="7 blocks asked for, 6 free"):
        BlockPool(6).allocate(7)
