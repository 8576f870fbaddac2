"""The radix cache beside a brute-force model: a plain mapping from (salt, prefix) to block id."""

import itertools
import time
import tracemalloc
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from transfer.messages import pack_tokens
from workers.kv.policies import POLICIES, Policy
from workers.kv.pool import CACHED, BlockPool
from workers.kv.radix import Node, Partial, RadixCache

BLOCK = 3  # tokens
STEP = BLOCK * 4  # bytes
POOL = 24

salts = st.sampled_from([b"", b"a", b"b"])
prompts = st.lists(st.sampled_from([1, 2, 3]), min_size=0, max_size=6).map(
    lambda kinds: pack_tokens(token for kind in kinds for token in (7, 8, kind))
)
tails = st.sampled_from([pack_tokens(some) for some in ([7], [7, 8], [7, 9], [9])])


def prefixes(tokens: bytes) -> list[bytes]:
    return [tokens[:end] for end in range(STEP, len(tokens) + 1, STEP)]


def above(tokens: bytes) -> bytes:
    """The prefix without its last block, full or not."""
    return tokens[: (len(tokens) - 1) // STEP * STEP]


def path(node: Node) -> list[Node]:
    """From below the root down to `node`."""
    return [*path(node.parent), node] if node.parent is not None else []


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(POOL)
        self.model: dict[tuple[bytes, bytes], int] = {}
        self.pins: list[tuple[Node, bytes, bytes, list[int]]] = []

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def something_there(self, policy: str) -> None:
        self.radix = RadixCache(BLOCK, POLICIES[policy](), lambda: self.now)
        self.insert(b"", packed(1, 2, 3), 0, keep=False)

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
        self.give_up(done.superseded, salt, tokens)
        self.model.update({(salt, prefix): block for prefix, block in zip(prefixes(tokens), done.blocks, strict=True)})
        self.hold(done.node, salt, tokens, done.blocks)
        if not keep:
            self.unpin(len(self.pins) - 1)

    @rule(salt=salts, tokens=prompts, tail=tails)
    def keep_tail(self, salt: bytes, tokens: bytes, tail: bytes) -> None:
        match = self.radix.match(salt, tokens)
        if self.pool.free == 0 or len(match.blocks) * STEP < len(tokens):
            return
        held = [node for node, owner, prefix, _ in self.pins if (owner, prefix) == (salt, tokens)]
        node = held[0] if held else match.node if match.blocks else None
        known = self.inside(salt, tokens + tail) * 4 == len(tail)
        (block,) = self.pool.allocate(1)
        superseded = self.radix.keep_tail(salt, node, tail, block)
        assert (superseded is None) == known
        if superseded is None:
            self.pool.release([block])
        else:
            self.pool.adopt([block])
            self.give_up(superseded, salt, tokens + tail)
            self.model[salt, tokens + tail] = block

    def give_up(self, blocks: list[int], salt: bytes, tokens: bytes) -> None:
        """Only what is the beginning of something longer now, and what nobody holds."""
        keys = {block: key for key, block in self.model.items()}
        for block in blocks:
            assert keys[block][0] == salt
            assert len(keys[block][1]) % STEP
            assert tokens.startswith(keys[block][1])
            assert keys[block] not in self.pinned_keys()
            del self.model[keys[block]]
        self.pool.release(blocks, CACHED)

    @rule(salt=salts, tokens=prompts, tail=tails | st.just(b""), keep=st.booleans())
    def match(self, salt: bytes, tokens: bytes, tail: bytes, keep: bool) -> None:
        inside = self.inside(salt, tokens + tail)
        assert self.radix.peek(salt, tokens + tail, partial=False) == len(self.known(salt, tokens)) * BLOCK
        assert self.radix.peek(salt, tokens + tail, partial=True) == len(self.known(salt, tokens)) * BLOCK + inside
        match = self.radix.match(salt, tokens + tail)
        assert match.blocks == self.known(salt, tokens)
        assert (match.partial.tokens if match.partial else 0) == inside
        if match.partial:
            assert match.partial.block == match.partial.node.blocks[0]
            assert match.partial.node.parent is match.node
        self.hold(match.node, salt, tokens[: len(match.blocks) * STEP], match.blocks)
        if not keep:
            self.unpin(len(self.pins) - 1)

    def inside(self, salt: bytes, tokens: bytes) -> int:
        """Tokens that the best cached block behind the known ones has in common with what is wanted next."""
        start = len(self.known(salt, tokens)) * STEP
        wanted, best = tokens[start : start + STEP], 0
        for owner, prefix in self.model:
            if owner == salt and start < len(prefix) <= start + STEP and prefix[:start] == tokens[:start]:
                equal = 0
                while (
                    equal < min(len(wanted), len(prefix) - start)
                    and prefix[start + equal : start + equal + 4] == wanted[equal : equal + 4]
                ):
                    equal += 4
                best = max(best, equal // 4)
        return best

    @rule(which=st.integers(0, 100), priority=st.integers(0, 2), keep=st.integers(0, 3))
    def protect(self, which: int, priority: int, keep: int) -> None:
        if self.pins:
            self.radix.protect(self.pins[which % len(self.pins)][0], priority, self.now + keep)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(salt=salts, tokens=prompts)
    def look(self, salt: bytes, tokens: bytes) -> None:
        """A match that nobody pins, as when a queue is looked through."""
        assert self.radix.match(salt, tokens).blocks == self.known(salt, tokens)

    @rule(which=st.integers(0, 100), end=st.booleans())
    def touch(self, which: int, end: bool) -> None:
        if self.pins:
            node = self.pins[which % len(self.pins)][0]
            (self.radix.renew if end else self.radix.touch)(node)

    @rule(which=st.integers(0, 100), kinds=st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=2))
    def continue_in_place(self, which: int, kinds: list[int]) -> None:
        """A sequence that goes on where its own node ends."""
        if not self.pins:
            return
        which %= len(self.pins)
        own, salt, before, blocks = self.pins[which]
        tokens = before + packed(*kinds)
        fresh = len(prefixes(tokens)) - len(blocks)
        if len(before) % STEP or fresh > self.pool.free:
            return
        known = self.known(salt, tokens)
        table = blocks + self.pool.allocate(fresh)
        done = self.radix.insert(salt, tokens, table, own)
        assert done.blocks == known + table[len(known) :]
        self.pool.adopt(done.adopted)
        self.pool.release(done.duplicates)
        self.give_up(done.superseded, salt, tokens)
        self.model.update({(salt, prefix): block for prefix, block in zip(prefixes(tokens), done.blocks, strict=True)})
        if done.node is own:
            self.pins[which] = (own, salt, tokens, done.blocks)
        else:
            self.hold(done.node, salt, tokens, done.blocks)
            self.unpin(which)

    @rule(which=st.integers(0, 100))
    def unpin(self, which: int) -> None:
        if self.pins:
            node, *_ = self.pins.pop(which % len(self.pins))
            self.radix.unpin(node)

    @rule(wanted=st.integers(0, POOL))
    def evict(self, wanted: int) -> None:
        pinned = self.pinned_keys()
        expected = min(wanted, len(self.model) - len(pinned))
        keys = {block: key for key, block in self.model.items()}
        worth = {block: (self.kept(block), self.priority(block)) for block in keys}
        freed = set(self.radix.evict(wanted))
        assert len(freed) == expected
        left = [block for block, key in keys.items() if key not in pinned and block not in freed]
        for block in left:
            # Whatever stayed although it could go was worth no less than what went, or held up something that was.
            below = [one for one, key in keys.items() if key[0] == keys[block][0] and key[1].startswith(keys[block][1])]
            assert all(max(worth[one] for one in below) >= worth[gone] for gone in freed)
        self.pool.release(sorted(freed), CACHED)
        gone = {key for key, block in self.model.items() if block in freed}
        assert not gone & pinned
        for key in gone:
            del self.model[key]
        assert all((salt, above(tokens)) in self.model or not above(tokens) for salt, tokens in self.model)

    def node_of(self, block: int) -> Node:
        return next(node for node in self.radix.nodes() if block in node.blocks)

    def kept(self, block: int) -> bool:
        return self.node_of(block).keep_until > self.now

    def priority(self, block: int) -> int:
        return self.node_of(block).priority

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
            assert -(-len(node.tokens) // STEP) == len(node.blocks)
            assert len(node.tokens) % STEP == 0 or (len(node.blocks) == 1 and not node.children)
            assert node.order is None or list(node.order) == sorted(node.children)
            assert (node.order is None) == (len(node.children) < 2)
            assert all(key == child.tokens[:STEP] for key, child in node.children.items())

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
TestRadix.settings = settings(stateful_step_count=40)


def packed(*kinds: int) -> bytes:
    return pack_tokens(token for kind in kinds for token in (7, 8, kind))


def use(radix: RadixCache, tokens: bytes) -> Node:
    node = radix.match(b"", tokens).node
    radix.touch(node)
    return node


def filled(*prompts: tuple[bytes, list[int]]) -> RadixCache:
    radix = RadixCache(BLOCK, Policy(), lambda: 0.0)
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
    use(radix, packed(1, 1, 1))
    assert radix.evict(1) == [4]
    assert radix.evict(2) == [3, 6]
    assert radix.evict(1) == [5]
    assert radix.evict(100) == [0, 1, 2]


def test_a_parent_is_evicted_only_after_its_children() -> None:
    radix = filled((packed(1), [0]), (packed(1, 2), [0, 1]), (packed(1, 3), [0, 2]))
    use(radix, packed(1, 2))
    assert radix.evict(3) == [2, 1, 0]


def test_duplicates_keep_the_ids_that_were_there_first() -> None:
    radix = filled((packed(1, 2), [0, 1]))
    done = radix.insert(b"", packed(1, 2, 3), [5, 1, 6])
    assert (done.blocks, done.adopted, done.duplicates) == ([0, 1, 6], [6], [5])


@pytest.mark.parametrize("other", [b"b", b"", b"aa"])
def test_salts_never_share(other: bytes) -> None:
    radix = RadixCache(BLOCK, Policy(), lambda: 0.0)
    radix.insert(b"a", packed(1, 2), [0, 1])
    assert radix.match(other, packed(1, 2)).blocks == []
    assert radix.match(b"a", packed(1, 2)).blocks == [0, 1]


def test_blocks_that_differ_in_one_token_are_never_shared() -> None:
    radix = filled((pack_tokens([1, 2, 3, 4, 5, 6]), [0, 1]))
    assert radix.match(b"", pack_tokens([1, 2, 3, 4, 5, 7])).blocks == [0]
    assert radix.match(b"", pack_tokens([1 + 2**24, 2, 3, 4, 5, 6])).blocks == []


def test_a_used_salt_leaves_nothing_behind() -> None:
    radix = RadixCache(BLOCK, Policy(), lambda: 0.0)
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
        node = use(radix, packed(1))
        use(radix, packed(2))  # used, but never pinned, since it was queued
        radix.pin(node)
        radix.unpin(node)
    assert len(radix._queue) <= 1040
    assert sorted(radix.evict(2)) == [0, 1]


def test_a_tail_is_found_inside_only_and_gives_way_to_what_is_longer() -> None:
    radix = filled((packed(1), [0]))
    node = radix.match(b"", packed(1)).node
    assert radix.keep_tail(b"", node, pack_tokens([7]), 1) == []
    assert radix.match(b"", packed(1) + pack_tokens([7])).blocks == [0]
    assert radix.match(b"", packed(1, 2)).partial == Partial(node.children[pack_tokens([7])], 1, 1)
    assert radix.keep_tail(b"", node, pack_tokens([7]), 2) is None
    assert radix.keep_tail(b"", node, pack_tokens([7, 8]), 3) == [1]
    assert radix.insert(b"", packed(1, 2), [0, 4]).superseded == [3]
    assert radix.keep_tail(b"", node, pack_tokens([7, 8]), 5) is None
    assert sorted(radix.evict(9)) == [0, 4]


def test_a_root_from_a_match_that_found_nothing_never_replaces_the_tree() -> None:
    radix = RadixCache(BLOCK, Policy(), lambda: 0.0)
    root = radix.match(b"", packed(1)).node
    radix.pin(root)
    radix.insert(b"", packed(1), [0])
    assert radix.keep_tail(b"", root, pack_tokens([9]), 1) == []
    radix.unpin(root)
    assert radix.match(b"", packed(1)).blocks == [0]
    assert radix.match(b"", pack_tokens([9, 9, 9])).partial is not None


def test_an_answer_that_comes_block_by_block_is_one_node() -> None:
    radix = RadixCache(BLOCK, Policy(), lambda: 0.0)
    node = radix.insert(b"", packed(1), [0]).node
    radix.pin(node)
    for length in range(2, 30):
        assert radix.insert(b"", packed(*range(1, length + 1)), list(range(length)), node).node is node
    assert list(radix.nodes()) == [node]
    assert (radix.cached, radix.pinned) == (29, 29)
    radix.pin(node)  # somebody else's match ends here
    assert radix.insert(b"", packed(*range(1, 31)), list(range(30)), node).node is not node


def test_what_others_have_used_does_not_grow() -> None:
    """Or a one-off end would be worth what its popular beginning is."""
    radix = filled((packed(1), [0]))
    node = use(radix, packed(1))
    radix.pin(node)
    assert radix.insert(b"", packed(1, 2), [0, 1], node).node is not node


def test_time_that_passes_while_evicting_does_not_send_a_leaf_back_and_forth() -> None:
    clock = itertools.count()
    radix = RadixCache(BLOCK, Policy(), lambda: float(next(clock)))
    for number in range(4):
        node = radix.insert(b"", packed(number), [number]).node
        radix.pin(node)
        radix.unpin(node)
        radix.protect(node, 0, 20.0 + number)
    assert sorted(block for _ in range(4) for block in radix.evict(1)) == [0, 1, 2, 3]


# --- policies -----------------------------------------------------------------------------------------------------


def used(policy: str, uses: str) -> str:
    """Prompts are used in the order of `uses`, then evicted one after the other: the order in which they go."""
    radix = RadixCache(BLOCK, POLICIES[policy](), lambda: 0.0)
    names: dict[int, str] = {}
    for name in uses:
        if name not in names.values():
            names[len(names)] = name
            radix.insert(b"", packed(ord(name)), [len(names) - 1])
        else:
            assert use(radix, packed(ord(name))).blocks
    return "".join(names[block] for _ in range(len(names)) for block in radix.evict(1))


@pytest.mark.parametrize(
    ("policy", "uses", "order"),
    [
        ("lru", "abcabca", "bca"),
        ("lru", "abcdab", "cdab"),
        ("fifo", "abcdcba", "abcd"),
        ("lfu", "aaabbcd", "cdba"),
        ("lfu", "aabbc", "cab"),
        ("lru-k", "aabbcd", "cdab"),
        ("lru-k", "abbacd", "cdab"),  # the last but one use of a is older
        ("slru", "aabcd", "bcda"),
        ("slru", "abcdeabcde", "abcde"),  # at most four fifths are protected
        ("slru", "abcdeabcdecd", "abecd"),
    ],
)
def test_order_of_eviction(policy: str, uses: str, order: str) -> None:
    assert used(policy, uses) == order


def test_a_scan_does_not_displace_what_slru_and_lru_k_protect() -> None:
    for policy in ("slru", "lru-k", "lfu"):
        assert used(policy, "xyabab" + "cdefgh").endswith("ab")
    assert not used("lru", "xyabab" + "cdefgh").endswith("ab")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_priority_and_time_come_before_any_policy(policy: str) -> None:
    now = [0.0]
    radix = RadixCache(BLOCK, POLICIES[policy](), lambda: now[0])
    for block, (priority, keep) in enumerate([(1, 0), (0, 0), (0, 10), (2, 0)]):
        node = radix.insert(b"", packed(block), [block]).node
        radix.pin(node)
        radix.protect(node, priority, now[0] + keep)
        radix.unpin(node)
    assert radix.evict(1) == [1]
    now[0] = 11.0
    assert [radix.evict(1) for _ in range(3)] == [[2], [0], [3]]


def test_what_is_kept_for_a_time_goes_when_nothing_else_can() -> None:
    radix = RadixCache(BLOCK, Policy(), lambda: 0.0)
    node = radix.insert(b"", packed(1), [0]).node
    radix.pin(node)
    radix.protect(node, 0, 100.0)
    radix.unpin(node)
    assert radix.evict(5) == [0]


# --- speed and size -----------------------------------------------------------------------------------------------


def timed(work: Callable[[], object], times: int) -> float:
    """The least of several runs, in seconds."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def tree(nodes: int, block_size: int = 16, blocks: int = 1) -> RadixCache:
    """One long edge that all share, and behind it `nodes` leaves."""
    radix = RadixCache(block_size, Policy(), time.monotonic)
    trunk = pack_tokens(range(block_size))
    for number in range(nodes):
        tail = pack_tokens([number + 1] * block_size * blocks)
        radix.insert(b"", trunk + tail, [0, *range(1 + number * blocks, 1 + (number + 1) * blocks)])
    return radix


def test_a_prompt_of_32768_tokens_is_matched_within_a_millisecond() -> None:
    radix = RadixCache(16, Policy(), time.monotonic)
    prompt = pack_tokens(range(32_768))
    for stop in range(256, 2049, 256):  # eight edges
        radix.insert(b"", prompt[: stop * 64], list(range(stop)))
    assert len(radix.match(b"", prompt).blocks) == 2048
    assert timed(lambda: radix.match(b"", prompt), times=50) < 1e-3


def test_eviction_from_a_large_tree_costs_what_it_costs_in_a_small_one() -> None:
    small, large = tree(1_000), tree(100_000)
    few, many = (timed(lambda one=one: one.evict(1), times=500) for one in (small, large))
    assert many <= 2 * few


@pytest.mark.parametrize("blocks", [50_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_a_million_blocks_fit_in_400_megabytes(blocks: int) -> None:
    """Nodes of eight blocks; and the average of a tree does not grow with it."""
    tracemalloc.start()
    radix = tree(blocks // 8, blocks=8)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert radix.cached == blocks + 1
    assert size < 400 * blocks


def test_even_nodes_of_one_block_are_within_700_bytes_each() -> None:
    tracemalloc.start()
    radix = tree(10_000)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 700 * radix.cached


def test_of_what_is_kept_the_lower_priority_goes_first() -> None:
    radix = RadixCache(BLOCK, POLICIES["fifo"](), lambda: 0.0)
    for block, priority in ((0, 1), (1, 0)):
        node = radix.insert(b"", packed(block + 1), [block]).node
        radix.pin(node)
        radix.protect(node, priority, 5.0)
        radix.unpin(node)
    assert radix.evict(1) == [1]
    assert radix.evict(1) == [0]
