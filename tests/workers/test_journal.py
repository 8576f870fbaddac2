"""What a worker publishes of its radix tree, beside a walk over the tree: the checkpoints of whole blocks that are
cached, closed under prefix at every moment, and no salt's in another's."""

import random
import threading
import time
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.workers.drive import answers, engine, request
from transfer.gossip.ladder import checkpoints
from transfer.gossip.summary import Load, Summary
from transfer.messages import pack_tokens
from transfer.prefix import PrefixChain, root_key
from workers.engine.model import Model
from workers.kv.journal import Journal
from workers.kv.policies import POLICIES
from workers.kv.pool import CACHED, BlockPool
from workers.kv.radix import Node, RadixCache

BLOCK = 16  # so that every fourth block is a checkpoint
STEP = BLOCK * 4
POOL = 60
LIMIT = 3

salts = st.sampled_from([b"", b"a", b"b"])
# Runs of equal blocks: prompts part from one another within steps of the ladder and at their ends.
prompts = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 9)), min_size=1, max_size=3).map(
    lambda runs: pack_tokens(kind for kind, blocks in runs for _ in range(blocks * BLOCK))
)


def numbers(salt: bytes, tokens: bytes) -> list[int]:
    """Keys of the checkpoints of a prompt, as a router makes them."""
    chain = PrefixChain.of(root_key("model", tenant=salt), tokens, BLOCK)
    found: list[int] = chain.numbers(checkpoints(len(chain.keys), BLOCK)).tolist()
    return found


def prefix(node: Node) -> tuple[bytes, bytes]:
    """Salt and tokens of the prefix that ends with a node."""
    if node.parent is None:
        return node.tokens, b""
    salt, tokens = prefix(node.parent)
    return salt, tokens + node.tokens


class Watch(Journal):
    """Sees that what is published is closed after every call."""

    def __init__(self) -> None:
        super().__init__("model")
        self.above: dict[int, list[int]] = {}
        self.there: set[int] = set()

    def know(self, salt: bytes, tokens: bytes) -> None:
        keys = numbers(salt, tokens)
        for index, key in enumerate(keys):
            self.above[key] = keys[:index]

    def came(self, keys: list[int]) -> None:
        super().came(keys)
        for key in keys:
            assert key not in self.there
            assert self.there.issuperset(self.above[key])
            self.there.add(key)

    def went(self, keys: list[int]) -> None:
        super().went(keys)
        for key in keys:
            self.there.remove(key)
            assert not any(key in self.above[other] for other in self.there)


class Machine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def something_there(self, policy: str) -> None:
        self.radix = RadixCache(BLOCK, POLICIES[policy](), lambda: 0.0)
        self.watch = Watch()
        self.radix.watch(self.watch)
        self.summary, self.small = Summary("w", 1, 1000), Summary("w", 1, LIMIT)
        self.pool = BlockPool(POOL)
        self.pins: list[tuple[Node, bytes, bytes]] = []
        self.insert(b"", pack_tokens([1] * 5 * BLOCK))

    @rule(salt=salts, tokens=prompts)
    def insert(self, salt: bytes, tokens: bytes) -> None:
        self.put(salt, tokens, None)

    def put(self, salt: bytes, tokens: bytes, own: Node | None) -> None:
        known = self.radix.match(salt, tokens).blocks
        need = len(tokens) // STEP - len(known)
        if need > self.pool.free:
            return
        self.watch.know(salt, tokens)
        table = known + self.pool.allocate(need)
        done = self.radix.insert(salt, tokens, table, own)
        self.pool.adopt(done.adopted)
        self.pool.release(done.superseded, CACHED)
        if done.node.parent is not None:
            self.radix.pin(done.node)
            self.pins.append((done.node, salt, tokens))

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 99), more=prompts)
    def grow(self, which: int, more: bytes) -> None:
        """An answer gets longer."""
        node, salt, tokens = self.pins[which % len(self.pins)]
        self.put(salt, tokens + more, node)

    @precondition(lambda self: self.pins and self.pool.free)
    @rule(which=st.integers(0, 99), length=st.integers(1, BLOCK - 1))
    def keep_tail(self, which: int, length: int) -> None:
        node, salt, _ = self.pins[which % len(self.pins)]
        (block,) = self.pool.allocate(1)
        superseded = self.radix.keep_tail(salt, node, pack_tokens([1] * length), block)
        if superseded is None:
            self.pool.release([block])
        else:
            self.pool.adopt([block])
            self.pool.release(superseded, CACHED)

    @rule(salt=salts, tokens=prompts)
    def match(self, salt: bytes, tokens: bytes) -> None:
        """May split an edge."""
        self.radix.match(salt, tokens)

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 99))
    def unpin(self, which: int) -> None:
        node, _, _ = self.pins.pop(which % len(self.pins))
        self.radix.unpin(node)

    @rule(wanted=st.integers(1, 12))
    def evict(self, wanted: int) -> None:
        self.pool.release(self.radix.evict(wanted), CACHED)

    @rule()
    def clear(self) -> None:
        self.pool.release(self.radix.evict(self.radix.evictable), CACHED)

    @rule()
    def publish(self) -> None:
        self.summary.update(Load())

    @invariant()
    def published_is_what_is_cached(self) -> None:
        if not hasattr(self, "radix"):
            return
        cached: dict[bytes, set[int]] = {}
        for node in self.radix.nodes():
            salt, tokens = prefix(node)
            cached.setdefault(salt, set()).update(numbers(salt, tokens))
            assert node.start + len(node.blocks) == -(-len(tokens) // STEP)
        expected = {key for keys in cached.values() for key in keys}
        assert len(expected) == sum(map(len, cached.values())), "salts share no key"
        entries = list(self.watch._entries)
        self.watch.read(self.summary)
        assert {key for key in self.watch.above if key in self.summary} == expected == self.watch.there
        assert len(self.summary) == len(expected)
        self.watch._entries.extend(entries)
        self.watch.read(self.small)
        small = {key for key in expected if key in self.small}
        assert len(small) == len(self.small) == min(LIMIT, len(expected))
        assert all(small.issuperset(self.watch.above[key]) for key in small)


Machine.TestCase.settings = settings(stateful_step_count=30)
TestPublished = Machine.TestCase


def prompts_of(seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    while True:
        yield pack_tokens(kind for _ in range(12) for kind in [rng.randrange(3)] * BLOCK * 2)


def test_one_thread_changes_the_tree_and_another_one_publishes() -> None:
    """What is read at any time is closed under prefix, and in the end it is what is cached."""
    radix, journal = RadixCache(BLOCK, POLICIES["lru"](), time.monotonic), Journal("model")
    radix.watch(journal)
    summary, above = Summary("w", 1, 10_000), dict[int, list[int]]()
    drawn = prompts_of(1)
    prompts = [next(drawn) for _ in range(200)]
    for tokens in prompts:
        keys = numbers(b"", tokens)
        above |= {key: keys[:index] for index, key in enumerate(keys)}
    done = threading.Event()

    def engine_thread() -> None:
        for tokens in prompts * 10:
            radix.insert(b"", tokens, list(range(len(tokens) // STEP)))
            if radix.cached > 800:
                radix.evict(100)
        done.set()

    thread = threading.Thread(target=engine_thread)
    thread.start()
    reads = 0
    while not done.is_set():
        journal.read(summary)
        reads += 1
        assert all(other in summary for key, keys in above.items() if key in summary for other in keys)
    thread.join()
    journal.read(summary)
    expected = {key for node in radix.nodes() for key in numbers(*prefix(node))}
    assert {key for key in above if key in summary} == expected
    assert len(summary) == len(expected) > 20
    assert reads > 3


def test_a_tree_with_something_in_it_cannot_be_watched() -> None:
    radix = RadixCache(BLOCK, POLICIES["lru"](), time.monotonic)
    radix.insert(b"", pack_tokens([1] * BLOCK), [0])
    with pytest.raises(ValueError, match="from its beginning"):
        radix.watch(Journal("model"))


def test_the_engine_publishes_what_a_router_looks_for(tiny: Model) -> None:
    """By the fingerprint and the salt; prompt and answer; and nothing once the cache is cleared."""
    one = engine(tiny)
    one.warm_up()
    journal, summary = one.watch(), Summary("w", 1, 1000)
    prompt = [7, 8, 9, 1] * 30
    (answer,) = answers(one, [request(prompt, 40, salt=b"a")])
    journal.read(summary)
    written = pack_tokens([*prompt, *answer][:-1])
    chains = {
        salt: PrefixChain.of(root_key(one.memory.layout.fingerprint, tenant=salt), written, BLOCK)
        for salt in (b"a", b"b", b"")
    }
    keys = {salt: chain.numbers(checkpoints(len(chain.keys), BLOCK)).tolist() for salt, chain in chains.items()}
    assert len(keys[b"a"]) == len(summary) == 2
    assert all(key in summary for key in keys[b"a"])
    assert not any(key in summary for key in keys[b"b"] + keys[b""])
    one.cache.clear()
    journal.read(summary)
    assert len(summary) == 0
