"""KVCache with real sequences: admit, grow, commit, release, quarantine."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.workers.drive import request
from transfer.messages import CacheStats
from workers.kv.cache import KVCache
from workers.kv.policies import POLICIES
from workers.kv.pool import CACHED, PRIVATE, QUARANTINED
from workers.kv.radix import Node
from workers.sequence import Sequence

SIZE = 4
TOTAL = 16


def sequence(length: int, max_tokens: int = 8, salt: bytes = b"", token: int = 1) -> Sequence:
    return Sequence(request([token] * length, max_tokens, salt))


def compute(cache: KVCache, one: Sequence, until: int | None = None) -> None:
    one.computed = one.length if until is None else until
    cache.commit(one)


def serve(cache: KVCache, one: Sequence) -> int:
    """Admit, compute and release; the tokens that were found."""
    assert cache.admit(one, one.length)
    found = one.computed
    compute(cache, one)
    cache.release(one)
    return found


class Machine(RuleBasedStateMachine):
    """Blocks have a content here: the tokens up to each of their ends. Whatever a table shares must be right."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Sequence] = []
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @initialize(policy=st.sampled_from(sorted(POLICIES)), partial=st.booleans())
    def begin(self, policy: str, partial: bool) -> None:
        self.cache = KVCache(TOTAL, SIZE, policy=policy, copy=self.copy if partial else None)

    def copy(self, source: int, target: int, tokens: int) -> None:
        owners = self.cache.pool.owners()
        assert (owners[source], owners[target]) == (CACHED, PRIVATE)
        whole = self.content[source]
        start = (len(whole) - 1) // (SIZE * 4) * SIZE * 4
        assert start + tokens * 4 <= len(whole)
        self.content[target] = whole[: start + tokens * 4]

    def pick(self, which: int) -> Sequence | None:
        return self.live[which % len(self.live)] if self.live else None

    def write(self, one: Sequence, start: int, stop: int) -> None:
        for position in range(start, stop):
            block = one.blocks[position // SIZE]
            assert self.cache.pool.owners()[block] == PRIVATE
            self.content[block] = one.packed(position + 1)

    @rule(
        prompt=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5),
        cut=st.integers(0, 3),
        salt=st.sampled_from([b"", b"a"]),
        whole=st.booleans(),
    )
    def admit(self, prompt: list[int], cut: int, salt: bytes, whole: bool) -> None:
        tokens = [kind for kind in prompt for _ in range(SIZE)][: max(1, len(prompt) * SIZE - cut)]
        one = Sequence(request(tokens, 6, salt))
        before = self.cache.counts()
        expected = self.cache.found(one)
        if self.cache.admit(one, one.length, whole):
            self.live.append(one)
            inside = one.computed - one.shared_blocks * SIZE
            assert 0 <= inside < SIZE
            assert whole or one.computed in (expected, expected // SIZE * SIZE)
            assert one.computed <= one.length - (not whole)
            if inside:
                assert self.content[one.blocks[one.shared_blocks]] == one.packed(one.computed)
            assert len(one.blocks) == -(-one.length // SIZE)
            if whole:  # a peer writes the rest
                self.write(one, one.computed, one.length)
                one.computed = one.length
        else:
            assert before == self.cache.counts()
            assert (one.blocks, one.node) == ([], None)

    @rule(which=st.integers(0, 100), count=st.integers(1, 9))
    def advance(self, which: int, count: int) -> None:
        if one := self.pick(which):
            stop = min(one.length, one.computed + count)
            self.write(one, one.computed, stop)
            one.computed = stop
            self.cache.commit(one)

    @rule(which=st.integers(0, 100), token=st.sampled_from([1, 2]))
    def append(self, which: int, token: int) -> None:
        one = self.pick(which)
        if one and one.length < one.final_length and self.cache.grow(one, one.length + 1):
            one.append(token)

    @rule(which=st.integers(0, 100), share=st.integers(0, 2))
    def release(self, which: int, share: int) -> None:
        if one := self.pick(which):
            self.live.remove(one)
            wanted = one.blocks[::share] if share else []
            private = set(one.blocks[one.shared_blocks :])
            held = self.cache.release(one, wanted)
            assert set(held) == private & set(wanted)
            assert (one.blocks, one.node, one.shared_blocks, one.computed) == ([], None, 0, 0)
            self.held.append(held)

    @rule()
    def end_quarantine(self) -> None:
        if self.held:
            self.cache.end_quarantine(self.held.pop())

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.counts()["cached"] == self.cache.counts()["pinned"]

    @invariant()
    def everything_adds_up(self) -> None:
        counts = self.cache.counts()
        assert counts["free"] + counts["private"] + counts["cached"] + counts["quarantined"] == counts["total"] == TOTAL
        assert self.cache.available == counts["free"] + counts["cached"] - counts["pinned"]
        assert counts["private"] == sum(len(one.blocks) - one.shared_blocks for one in self.live)
        assert counts["quarantined"] == sum(map(len, self.held))
        assert counts["pinned"] == len({block for one in self.live for block in one.blocks[: one.shared_blocks]})

    @invariant()
    def a_block_in_two_tables_is_cached(self) -> None:
        owners = self.cache.pool.owners()
        private = [block for one in self.live for block in one.blocks[one.shared_blocks :]]
        held = [block for blocks in self.held for block in blocks]
        assert len(set(private + held)) == len(private + held)
        assert all(owners[block] == PRIVATE for block in private)
        assert all(owners[block] == QUARANTINED for block in held)
        assert all(owners[block] == CACHED for one in self.live for block in one.blocks[: one.shared_blocks])

    @invariant()
    def tables_and_tree_hold_what_they_say(self) -> None:
        for one in self.live:
            for index in range(one.computed // SIZE):
                assert self.content[one.blocks[index]] == one.packed((index + 1) * SIZE)
        for node in self.cache.radix.nodes():
            prefix = self.prefix(node.parent)
            for index, block in enumerate(node.blocks):
                assert self.content[block].startswith(prefix + node.tokens[: (index + 1) * SIZE * 4])

    def prefix(self, node: Node | None) -> bytes:
        if node is None or node.parent is None:
            return b""
        return self.prefix(node.parent) + node.tokens

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        while self.live:
            self.release(0, 0)
        while self.held:
            self.end_quarantine()
        self.cache.clear()
        assert self.cache.pool.free == TOTAL


TestCache = Machine.TestCase
TestCache.settings = settings(stateful_step_count=40)


def test_two_equal_prompts_in_flight_end_up_in_one_set_of_blocks() -> None:
    cache = KVCache(16, SIZE)
    first, second = sequence(11), sequence(11)
    assert cache.admit(first, 11)
    assert cache.admit(second, 11)
    assert not set(first.blocks) & set(second.blocks)
    compute(cache, first)
    own = list(second.blocks)
    compute(cache, second)
    assert second.blocks == [*first.blocks[:2], own[2]]
    assert cache.counts()["cached"] == 2
    assert not set(own[:2]) & set(second.blocks)
    third = sequence(16, token=2)
    assert cache.admit(third, 16)
    assert not set(third.blocks) & {*first.blocks, *second.blocks}
    for one in (first, second, third):
        cache.release(one)
    assert cache.counts() == {"total": 16, "free": 14, "private": 0, "cached": 2, "quarantined": 0, "pinned": 0}


def test_duplicates_of_a_hand_off_stay_until_it_is_over() -> None:
    """A peer's copy of them may be under way."""
    cache = KVCache(16, SIZE)
    first, second = sequence(11), Sequence(request([1] * 11), hand_off=True)
    assert cache.admit(first, 11)
    assert cache.admit(second, 11)
    own = list(second.blocks)
    compute(cache, first)
    compute(cache, second)
    assert second.blocks[:2] == first.blocks[:2]
    assert cache.pool.owners()[own].tolist() == [PRIVATE] * 3
    third = sequence(40, token=2)
    assert cache.admit(third, 40)
    assert not set(third.blocks) & set(own)
    for one in (first, second, third):
        cache.release(one)
    assert cache.counts() == {"total": 16, "free": 14, "private": 0, "cached": 2, "quarantined": 0, "pinned": 0}


def test_what_is_held_is_pinned_and_nothing_is_allocated() -> None:
    cache = KVCache(4, SIZE)
    serve(cache, sequence(9))
    held = sequence(15)
    cache.hold(held)
    assert (len(held.blocks), held.shared_blocks, held.computed) == (2, 2, 2 * SIZE)
    assert not cache.admit(sequence(12, token=2), 12)
    cache.release(held)
    assert cache.admit(sequence(12, token=2), 12)
    nothing = sequence(15, token=3)
    cache.hold(nothing)
    assert nothing.blocks == []


@pytest.mark.parametrize("length", [SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 4 * SIZE])
def test_a_token_is_always_left_to_compute(length: int) -> None:
    cache = KVCache(16, SIZE)
    assert serve(cache, sequence(length)) == 0
    assert serve(cache, sequence(length)) == (length - 1) // SIZE * SIZE < length


def test_a_prompt_that_a_peer_computes_may_match_whole() -> None:
    cache = KVCache(16, SIZE)
    serve(cache, sequence(2 * SIZE))
    one = sequence(2 * SIZE)
    assert cache.admit(one, one.length, whole=True)
    assert (one.shared_blocks, len(one.blocks)) == (2, 2)


def test_generated_tokens_are_reused() -> None:
    cache = KVCache(64, 16)
    one = sequence(100, 50)
    assert cache.admit(one, one.length)
    compute(cache, one)
    for _ in range(50):
        one.append(1)
        if one.generated < 50:  # the last token's KV is never computed
            assert cache.grow(one, one.length)
            compute(cache, one)
    cache.release(one)
    after = sequence(160)
    assert cache.admit(after, 160)
    assert after.computed == 149 // 16 * 16


def test_without_reuse_nothing_is_kept_or_found() -> None:
    cache = KVCache(16, SIZE, reuse=False)
    for _ in range(2):
        one = sequence(3 * SIZE)
        assert cache.admit(one, one.length)
        assert (one.computed, one.shared_blocks) == (0, 0)
        compute(cache, one)
        assert cache.counts()["private"] == 3
        cache.release(one)
        assert cache.counts() == {"total": 16, "free": 16, "private": 0, "cached": 0, "quarantined": 0, "pinned": 0}


def test_refused_admission_changes_nothing() -> None:
    cache = KVCache(8, SIZE)
    serve(cache, sequence(2 * SIZE))
    holder = sequence(4 * SIZE, token=2)
    assert cache.admit(holder, holder.length)
    before = cache.counts()
    assert not cache.admit(sequence(7 * SIZE), 7 * SIZE)
    assert cache.counts() == before
    assert cache.admit(sequence(4 * SIZE), 4 * SIZE)


def test_the_match_itself_is_not_evicted_to_make_room() -> None:
    cache = KVCache(4, SIZE)
    serve(cache, sequence(2 * SIZE))
    serve(cache, sequence(2 * SIZE, token=2))
    one = sequence(4 * SIZE)
    assert cache.admit(one, one.length)
    assert one.computed == 2 * SIZE
    assert len(set(one.blocks)) == 4


def test_growth_is_in_runs_and_never_beyond_the_end() -> None:
    cache = KVCache(16, SIZE)
    one = sequence(SIZE, max_tokens=2 * SIZE)
    assert cache.admit(one, one.length)
    assert cache.grow(one, SIZE + 1)
    assert one.blocks == [0, 1, 2]
    assert cache.grow(one, 3 * SIZE)
    assert one.blocks == [0, 1, 2]


def test_growth_evicts_and_then_fails() -> None:
    cache = KVCache(4, SIZE)
    serve(cache, sequence(SIZE, token=2))
    one = sequence(2 * SIZE, max_tokens=100)
    assert cache.admit(one, one.length)
    assert cache.grow(one, 4 * SIZE)
    assert not cache.grow(one, 4 * SIZE + 1)
    assert len(one.blocks) == 4


def test_quarantined_blocks_are_not_handed_out() -> None:
    cache = KVCache(4, SIZE)
    one = sequence(3 * SIZE)
    assert cache.admit(one, one.length)
    held = cache.release(one, one.blocks)
    assert cache.counts()["quarantined"] == 3
    other = sequence(2 * SIZE)
    assert not cache.admit(other, other.length)
    cache.end_quarantine(held)
    assert cache.admit(other, other.length)


def test_salts_never_share() -> None:
    cache = KVCache(16, SIZE)
    serve(cache, sequence(2 * SIZE + 1, salt=b"a"))
    assert serve(cache, sequence(2 * SIZE + 1, salt=b"b")) == 0
    assert serve(cache, sequence(2 * SIZE + 1, salt=b"a")) == 2 * SIZE


@pytest.mark.parametrize("policy", ["lru-k", "lfu", "slru"])
def test_what_was_asked_for_once_never_displaces_what_comes_again(policy: str) -> None:
    cache = KVCache(24, SIZE, policy=policy)
    for _ in range(3):
        serve(cache, sequence(8 * SIZE))
    long = sequence(16 * SIZE, token=2)
    for stop in range(SIZE, 16 * SIZE + 1, SIZE):  # computed in many chunks, and refused at first
        if stop == SIZE:
            for _ in range(20):
                assert not cache.admit(sequence(100 * SIZE, token=2), 100 * SIZE)
            assert cache.admit(long, long.length)
        compute(cache, long, stop)
    cache.release(long)
    serve(cache, sequence(8 * SIZE, token=3))
    assert cache.found(sequence(8 * SIZE)) == 8 * SIZE - SIZE


# --- copy on write ------------------------------------------------------------------------------------------------


def copying(blocks: int) -> tuple[KVCache, list[tuple[int, int, int]]]:
    copies: list[tuple[int, int, int]] = []
    return KVCache(blocks, SIZE, copy=lambda *one: copies.append(one)), copies


def prompt(*tokens: int) -> Sequence:
    return Sequence(request(tokens, 8))


def test_a_block_that_is_equal_in_part_is_copied() -> None:
    cache, copies = copying(16)
    serve(cache, prompt(1, 2, 3, 4, 5, 6, 7, 8, 9))
    one = prompt(1, 2, 3, 4, 5, 6, 9, 9, 9)
    assert cache.found(one) == 6
    assert cache.admit(one, one.length)
    assert (one.computed, one.shared_blocks) == (6, 1)
    assert copies == [(1, one.blocks[1], 2)]
    assert one.blocks[1] != 1
    assert cache.counts()["pinned"] == 1


def test_of_several_candidates_the_one_that_agrees_longest_is_copied() -> None:
    cache, copies = copying(32)
    for number in (10, 20, 30, 40):
        serve(cache, prompt(1, 2, 3, number, 0))
        serve(cache, prompt(1, 2, number, number, 0))
    before = cache.counts()
    one = prompt(1, 2, 20, 5, 6)
    assert cache.admit(one, one.length)
    assert one.computed == 3
    assert copies[-1][2] == 3
    cache.release(one)
    assert cache.counts() == before


def test_the_copied_block_is_not_evicted_to_make_room_for_its_copy() -> None:
    cache, copies = copying(4)
    serve(cache, prompt(1, 2, 3, 4, 5))
    serve(cache, prompt(9, 9, 9, 9, 9, 9, 9, 9, 9))
    one = prompt(1, 2, 3, 7, 7, 7, 7, 7, 7)
    assert cache.admit(one, one.length)
    assert copies == [(0, one.blocks[0], 3)]
    assert 0 not in one.blocks
    assert cache.counts()["cached"] == 1


def test_without_room_for_both_the_copy_is_done_without() -> None:
    cache, copies = copying(2)
    serve(cache, prompt(1, 2, 3, 4, 5))
    one = prompt(1, 2, 3, 7, 7, 7)
    assert cache.admit(one, one.length)
    assert (one.computed, copies) == (0, [])


def test_eighteen_shared_tokens_are_not_lost() -> None:
    copies: list[tuple[int, int, int]] = []
    cache = KVCache(16, 16, copy=lambda *one: copies.append(one))
    common = tuple(range(18))
    serve(cache, prompt(*common, *range(100, 120)))
    assert serve(cache, prompt(*common, *range(200, 220))) == 18


@given(st.integers(0, 3), st.integers(1, 3))
def test_statistics_by_the_fields_definitions(hits: int, misses: int) -> None:
    stats = CacheStats()
    for _ in range(hits):
        stats.count(40, 36, 16)
    for _ in range(misses):
        stats.count(40, 0, 16)
    stats.new_tokens = 4 * hits + 40 * misses
    rates = stats.rates
    assert rates["request_hit_rate"] == hits / (hits + misses)
    assert rates["token_hit_rate"] == pytest.approx(36 * hits / (40 * (hits + misses)))
    assert rates["block_hit_rate"] == pytest.approx(2 * hits / (2 * (hits + misses)))
    assert rates["saved_share"] == pytest.approx(rates["token_hit_rate"])
