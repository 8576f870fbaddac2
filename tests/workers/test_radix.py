"""The radix cache beside a brute-force model: a plain mapping from (salt, prefix) to block id."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from transfer.messages import pack_tokens
from workers.kv.pool import CACHED, BlockPool
from workers.kv.radix import Node, RadixCache

BLOCK = 2  # tokens
STEP = BLOCK * 4  # bytes
POOL = 24

salts = st.sampled_from([b"", b"a", b"b"])
prompts = st.lists(st.sampled_from([1, 2, 3]), min_size=0, max_size=6).map(
    lambda kinds: pack_tokens(token for kind in kinds for token in (7, kind))
)


def prefixes(tokens: bytes) -> list[bytes]:
    return [tokens[:end] for end in range(STEP, len(tokens) + 1, STEP)]


def path(node: Node) -> list[Node]:
    """From below the root down to `node`."""
    return [*path(node.parent), node] if node.parent is not None else []


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(POOL)
        self.radix = RadixCache(BLOCK)
        self.model: dict[tuple[bytes, bytes], int] = {}
        self.pins: list[tuple[Node, bytes, bytes, list[int]]] = []

    @initialize()
    def something_there(self) -> None:
        self.insert(b"", pack_tokens([7, 1, 7, 2, 7, 3]), 0, keep=False)

    def known(self, salt: bytes, tokens: bytes) -> list[int]:
        blocks = []
        for prefix in prefixes(tokens):
            if (salt, prefix) not in self.model:
                break
            blocks.append(self.model[salt, prefix])
        return blocks

    def pinned_keys(self) -> set[tuple[bytes, bytes]]:
        return {(salt, prefix) for _, salt, tokens, _ in self.pins for prefix in prefixes(tokens)}

    def hold(self, node: Node, salt: bytes, tokens: bytes, blocks: list[int]) -> None:
        self.radix.pin(node)
        self.pins.append((node, salt, tokens, blocks))

    @rule(salt=salts, tokens=prompts, known=st.integers(0, 6), keep=st.booleans())
    def insert(self, salt: bytes, tokens: bytes, known: int, keep: bool) -> None:
        """A table whose first blocks came from a match; the others were computed although the tree may have them."""
        table = self.known(salt, tokens)[:known]
        fresh = len(prefixes(tokens)) - len(table)
        if not prefixes(tokens) or fresh > self.pool.free:
            return
        table = table + self.pool.allocate(fresh)
        before = self.known(salt, tokens)
        done = self.radix.insert(salt, tokens, table)
        assert done.blocks == before + table[len(before) :]
        assert done.adopted == table[len(before) :]
        assert done.duplicates == [mine for mine, theirs in zip(table, before, strict=False) if mine != theirs]
        self.pool.adopt(done.adopted)
        self.pool.release(done.duplicates)
        self.model.update({(salt, prefix): block for prefix, block in zip(prefixes(tokens), done.blocks, strict=True)})
        self.hold(done.node, salt, tokens, done.blocks)
        if not keep:
            self.unpin(len(self.pins) - 1)

    @rule(salt=salts, tokens=prompts, tail=st.sampled_from([b"", pack_tokens([7])]), keep=st.booleans())
    def match(self, salt: bytes, tokens: bytes, tail: bytes, keep: bool) -> None:
        match = self.radix.match(salt, tokens + tail)
        assert match.blocks == self.known(salt, tokens)
        self.hold(match.node, salt, tokens[: len(match.blocks) * STEP], match.blocks)
        if not keep:
            self.unpin(len(self.pins) - 1)

    @rule(salt=salts, tokens=prompts)
    def look(self, salt: bytes, tokens: bytes) -> None:
        """A match that nobody pins, as when a queue is looked through."""
        assert self.radix.match(salt, tokens).blocks == self.known(salt, tokens)

    @rule(which=st.integers(0, 100))
    def unpin(self, which: int) -> None:
        if self.pins:
            node, *_ = self.pins.pop(which % len(self.pins))
            self.radix.unpin(node)

    @rule(wanted=st.integers(0, POOL))
    def evict(self, wanted: int) -> None:
        pinned = self.pinned_keys()
        expected = min(wanted, len(self.model) - len(pinned))
        freed = set(self.radix.evict(wanted))
        assert len(freed) == expected
        self.pool.release(sorted(freed), CACHED)
        gone = {key for key, block in self.model.items() if block in freed}
        assert not gone & pinned
        for key in gone:
            del self.model[key]
        assert all(len(tokens) == STEP or (salt, tokens[:-STEP]) in self.model for salt, tokens in self.model)

    @rule()
    def evict_everything(self) -> None:
        self.evict(POOL)
        pinned = self.pinned_keys()
        assert self.model.keys() == pinned
        assert set(self.radix._roots) <= {salt for _, salt, _, _ in self.pins}

    @invariant()
    def counts_equal_a_full_walk(self) -> None:
        nodes = list(self.radix.nodes())
        blocks = [block for node in nodes for block in node.blocks]
        assert sorted(blocks) == sorted(self.model.values())
        assert len(set(blocks)) == len(blocks) == self.radix.cached
        pinned = {block for node in nodes if node.pins for block in node.blocks}
        assert pinned == {self.model[key] for key in self.pinned_keys()}
        assert self.radix.pinned == len(pinned)
        assert self.radix.evictable == sum(len(node.blocks) for node in nodes if not node.pins)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        assert self.pool.counts() == {
            "free": POOL - self.radix.cached,
            "private": 0,
            "cached": self.radix.cached,
            "quarantined": 0,
        }
        assert all(self.pool.owners()[block] == CACHED for block in self.model.values())

    @invariant()
    def ancestors_of_a_pinned_node_are_pinned(self) -> None:
        for node in self.radix.nodes():
            assert node.pins == sum(node in path(pinned) for pinned, *_ in self.pins)
            assert node.parent is not None
            assert node.parent.parent is None or node.parent.pins >= node.pins
            assert node.blocks
            assert len(node.tokens) == len(node.blocks) * STEP

    @invariant()
    def what_a_match_returned_does_not_change(self) -> None:
        for node, _, tokens, blocks in self.pins:
            assert [block for part in path(node) for block in part.blocks] == blocks
            assert b"".join(part.tokens for part in path(node)) == tokens

    def teardown(self) -> None:
        while self.pins:
            self.unpin(0)
        self.evict(POOL)
        assert not self.model
        assert not self.radix._roots
        assert self.pool.free == POOL


TestRadix = Machine.TestCase
TestRadix.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def packed(*kinds: int) -> bytes:
    return pack_tokens(token for kind in kinds for token in (7, kind))


def filled(*prompts: tuple[bytes, list[int]]) -> RadixCache:
    radix = RadixCache(BLOCK)
    for tokens, blocks in prompts:
        radix.insert(b"", tokens, blocks)
    return radix


def test_a_pin_holds_the_node_and_its_ancestors() -> None:
    radix = filled((packed(1, 2, 3), [0, 1, 2]), (packed(1, 9), [0, 3]))
    node = radix.match(b"", packed(1, 2)).node
    radix.pin(node)
    assert [part.pins for part in path(node)] == [1, 1]
    assert sorted(radix.evict(100)) == [2, 3]
    assert radix.match(b"", packed(1, 2, 3)).blocks == [0, 1]
    assert [part.pins for part in path(node)] == [1, 1]
    radix.unpin(node)
    assert [part.pins for part in path(node)] == [0, 0]
    assert sorted(radix.evict(100)) == [0, 1]
    assert list(radix.nodes()) == []


def test_evictable_is_right_after_split_pin_and_evict() -> None:
    radix = filled((packed(1, 2, 3, 4), [0, 1, 2, 3]))
    whole = radix.match(b"", packed(1, 2, 3, 4)).node
    radix.pin(whole)
    half = radix.match(b"", packed(1, 2)).node  # splits a pinned edge: both parts are pinned once
    assert (radix.cached, radix.pinned, radix.evictable) == (4, 4, 0)
    radix.pin(half)
    radix.unpin(whole)
    assert (radix.pinned, radix.evictable) == (2, 2)
    assert radix.evict(1) == [3]
    assert (radix.cached, radix.pinned, radix.evictable) == (3, 2, 1)
    radix.unpin(half)
    assert radix.evictable == 3


def test_eviction_takes_the_least_recently_used_leaf_first_and_from_its_end() -> None:
    radix = filled((packed(1, 1, 1), [0, 1, 2]), (packed(2, 2), [3, 4]), (packed(3, 3), [5, 6]))
    radix.match(b"", packed(1, 1, 1))
    assert radix.evict(1) == [4]
    assert radix.evict(2) == [3, 6]
    assert radix.evict(1) == [5]
    assert radix.evict(100) == [0, 1, 2]


def test_a_parent_is_evicted_only_after_its_children() -> None:
    radix = filled((packed(1), [0]), (packed(1, 2), [0, 1]), (packed(1, 3), [0, 2]))
    radix.match(b"", packed(1, 2))
    assert radix.evict(3) == [2, 1, 0]


def test_duplicates_keep_the_ids_that_were_there_first() -> None:
    radix = filled((packed(1, 2), [0, 1]))
    done = radix.insert(b"", packed(1, 2, 3), [5, 1, 6])
    assert (done.blocks, done.adopted, done.duplicates) == ([0, 1, 6], [6], [5])


@pytest.mark.parametrize("other", [b"b", b"", b"aa"])
def test_salts_never_share(other: bytes) -> None:
    radix = RadixCache(BLOCK)
    radix.insert(b"a", packed(1, 2), [0, 1])
    assert radix.match(other, packed(1, 2)).blocks == []
    assert radix.match(b"a", packed(1, 2)).blocks == [0, 1]


def test_blocks_that_differ_in_one_token_are_never_shared() -> None:
    radix = filled((pack_tokens([1, 2, 3, 4]), [0, 1]))
    assert radix.match(b"", pack_tokens([1, 2, 3, 5])).blocks == [0]
    assert radix.match(b"", pack_tokens([1 + 2**24, 2, 3, 4])).blocks == []


def test_a_used_salt_leaves_nothing_behind() -> None:
    radix = RadixCache(BLOCK)
    for number in range(100):
        salt = b"%d" % number
        node = radix.insert(salt, packed(1, 2), [2 * number, 2 * number + 1]).node
        radix.pin(node)
        radix.unpin(node)
        miss = radix.match(b"miss" + salt, packed(1)).node
        radix.pin(miss)
        radix.unpin(miss)
    assert len(radix._roots) == 100
    assert len(radix.evict(1000)) == 200
    assert not radix._roots


def test_the_eviction_queue_stays_small_and_forgets_nobody() -> None:
    radix = filled((packed(1), [0]), (packed(2), [1]))
    for _ in range(5000):
        node = radix.match(b"", packed(1)).node
        radix.match(b"", packed(2))  # used, but never pinned, since it was queued
        radix.pin(node)
        radix.unpin(node)
    assert len(radix._heap) <= 1025
    assert sorted(radix.evict(2)) == [0, 1]
