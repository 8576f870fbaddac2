"""The model of a worker: its queue by hand, its cache against a plain LRU."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.simulate.engine import Engine, Job, Loan
from cluster.simulate.loop import Loop
from cluster.simulate.trace import BLOCK_TOKENS, Request
from tests.cluster.simulate.conftest import request


def engine(capacity: int = 100, rate: float = 512.0, loop: Loop | None = None) -> Engine:
    return Engine("w0", rate, capacity, (loop or Loop()).clock)


def served(one: Engine, asked: Request, loan: Loan | None = None) -> Job:
    """A job that is over at once, so that nothing stays pinned."""
    job = one.accept(asked, loan)
    one.release(job)
    return job


def test_jobs_are_served_in_order_at_the_rate() -> None:
    loop = Loop()
    one = engine(loop=loop)
    assert served(one, request(0, 0, 1, 2)).end == 2
    assert served(one, request(1, 0, 3)).end == 3
    assert one.wait == 3
    loop.now = 2.5
    assert one.wait == 0.5
    assert served(one, request(2, 2.5, 1, 2, 4)).end == 4  # two of its blocks are here
    loop.now = 10.0
    assert one.wait == 0
    job = served(one, request(3, 10, 5))
    assert (job.start, job.end, job.service) == (10, 11, 1)
    assert one.busy == 5


def test_at_least_one_token_is_computed() -> None:
    one = engine()
    served(one, request(0, 0, 1, 2))
    job = served(one, request(1, 0, 1, 2))
    assert (job.cached, job.missing_tokens, job.service) == (2, 1, pytest.approx(1 / 512))


def test_a_loan_costs_time_and_counts_as_far_as_the_lender_still_has_it() -> None:
    lender, one = engine(), engine()
    served(lender, request(0, 0, 1, 2, 3))
    served(one, request(0, 0, 1))
    job = served(one, request(1, 0, 1, 2, 3, 4), Loan(lender, 4, 0.1))
    assert (job.cached, job.missing_tokens) == (3, BLOCK_TOKENS)
    assert job.service == pytest.approx(2 * 0.1 + 1)
    assert one.cached(request(2, 0, 1, 2, 3, 4)) == 4


def test_a_loan_of_less_than_is_here_is_not_used() -> None:
    lender, one = engine(), engine()
    served(lender, request(0, 0, 1))
    served(one, request(0, 0, 1, 2))
    assert served(one, request(1, 0, 1, 2, 3), Loan(lender, 1, 5.0)).service == 1


def test_what_is_pinned_stays_and_what_does_not_fit_is_not_cached() -> None:
    one = engine(capacity=4)
    first = one.accept(request(0, 0, 1, 2, 3))
    second = one.accept(request(1, 0, 7, 8, 9))
    assert (second.added, second.removed) == ((7,), ())
    assert one.cached(request(2, 0, 1, 2, 3)) == 3
    assert one.running == 2
    one.release(first)
    third = one.accept(request(2, 0, 4, 5))
    assert set(third.removed) == {2, 3}  # of the one that is over, leaves first
    one.release(second)
    one.release(third)
    assert one.free_blocks == 4
    assert one.running == 0


class PlainLRU:
    """Blocks by last use; a request uses its own from the last to the first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[int, int] = {}
        self.time = 0

    def accept(self, asked: Request) -> tuple[int, set[int], set[int]]:
        before = set(self.used)
        cached = 0
        while cached < len(asked.blocks) and asked.blocks[cached] in self.used:
            cached += 1
        kept = asked.blocks[: self.capacity]
        for block in reversed(kept):
            self.time += 1
            self.used[block] = self.time
        while len(self.used) > self.capacity:
            del self.used[min(self.used, key=lambda block: self.used[block])]
        return cached, set(self.used) - before, before - set(self.used)


def prefixes(draw: Callable[[st.SearchStrategy[list[int]]], list[int]]) -> tuple[int, ...]:
    """Blocks that are numbered by prefix: children of block n are 3n + 1, 3n + 2 and 3n + 3."""
    at, blocks = 0, []
    for child in draw(st.lists(st.integers(1, 3), min_size=1, max_size=6)):
        at = 3 * at + child
        blocks.append(at)
    return tuple(blocks)


@given(st.data(), st.integers(1, 12))
def test_the_cache_is_a_leaf_first_lru(data: st.DataObject, capacity: int) -> None:
    one, plain = engine(capacity), PlainLRU(capacity)
    for number in range(data.draw(st.integers(1, 25))):
        asked = request(number, 0, *prefixes(data.draw))
        cached, added, removed = plain.accept(asked)
        job = served(one, asked)
        assert job.cached == cached
        assert set(job.added) == added
        assert set(job.removed) == removed
    assert one.free_blocks == capacity
