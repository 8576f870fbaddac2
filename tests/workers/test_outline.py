"""Looks at caches: everything that is there, once, in the right place, in bounded time, and nobody else's."""

import random
from collections import Counter
from dataclasses import astuple
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from tests.workers.drive import request
from transfer.messages import pack_tokens
from transfer.outline import Outline
from workers.kv.cache import KVCache
from workers.kv.journal import Journal
from workers.kv.outline import CHECK, LONG, Walk, outline
from workers.kv.pool import CACHED
from workers.kv.tier_index import TierIndex
from workers.sequence import Sequence

SIZE = 4
STEP = 4 * SIZE
SALTS = (b"", b"tenant\0a\0", b"tenant\0b\0x")


def cached(blocks: int = 400, tiers: bool = True) -> KVCache:
    made = KVCache(blocks, SIZE, copy=lambda *_: None)
    made.watch(Journal("model"))
    if tiers:
        index = TierIndex("model", "records", "w", STEP)
        made.tiers = SimpleNamespace(index=index, policy="", find=lambda *_: [])  # type: ignore[assignment]
    return made


def serve(cache: KVCache, tokens: list[int], salt: bytes = b"") -> None:
    one = Sequence(request(tokens, 8, salt))
    assert cache.admit(one, one.length)
    one.computed = one.length
    cache.commit(one)
    cache.release(one)


def store(cache: KVCache, tokens: list[int], salt: bytes, disk: int) -> None:
    """Have whole blocks below the device: the first `disk` of them on disk, all in host memory."""
    assert cache.tiers is not None
    index, packed, above = cache.tiers.index, pack_tokens(tokens), None
    for start in range(0, len(packed) - STEP + 1, STEP):
        block = packed[start : start + STEP]
        known = index.walk(salt, packed[: start + STEP])
        above = known[-1] if len(known) * STEP == start + STEP else index.grow(above, salt, block)
        above.ready = True
        above.owner = "w" if start < disk * STEP else above.owner


def look(cache: KVCache, path: tuple[bytes, ...] = (), most: int = 100_000, salts: bytes | None = None) -> Outline:
    return outline(Walk(cache, path, salts, 60), most)


def held(cache: KVCache) -> Counter[tuple[Any, ...]]:
    """Tokens by salt and what has them, as the two trees say it block by block."""
    found: Counter[tuple[Any, ...]] = Counter()
    for salt, root in cache.radix.roots.items():
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            found[salt, "device"] += len(node.tokens) // 4
    assert cache.tiers is not None
    for entry in cache.tiers.index.entries():
        found[entry.salt, "host"] += SIZE * entry.ready
        found[entry.salt, "disk"] += SIZE * bool(entry.owner)
    return +found


def shown(made: Outline) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    salts: list[bytes] = []
    for run in made.runs:
        salts.append(run.salt if not run.tokens else salts[run.parent])
        for tier in ("device", "host", "disk"):
            found[salts[-1], tier] += getattr(run, tier)
    return +found


def busy(seed: int, tiers: bool = True) -> KVCache:
    """A cache that many prompts with common beginnings went through, some of which has gone to lower tiers alone."""
    rng, cache = random.Random(seed), cached()
    stems = [[rng.randrange(9) for _ in range(rng.randrange(2, 30))] for _ in range(6)]
    for _ in range(40):
        tokens = [*rng.choice(stems), *(rng.randrange(3) for _ in range(rng.randrange(1, 20)))]
        salt = rng.choice(SALTS)
        if rng.random() < 0.7:
            serve(cache, tokens, salt)
        if tiers and rng.random() < 0.6:
            store(cache, tokens, salt, rng.randrange(4))
    cache.pool.release(cache.radix.evict(cache.radix.evictable // 3), CACHED)
    return cache


@pytest.mark.parametrize("seed", range(8))
def test_everything_is_seen_once_and_under_its_salt(seed: int) -> None:
    cache = busy(seed)
    made = look(cache)
    assert made.whole
    assert shown(made) == held(cache)
    assert {run.salt for run in made.runs[1:] if not run.tokens} == {salt for salt, _ in held(cache)}


@pytest.mark.parametrize("seed", range(4))
def test_a_run_is_found_again_by_its_path(seed: int) -> None:
    """And from there on everything is as it was from above."""
    cache = busy(seed)
    whole = look(cache)
    paths: list[tuple[bytes, ...]] = [()]
    for run in whole.runs[1:]:
        paths.append((*paths[run.parent], run.key))
    for run, path in zip(whole.runs, paths, strict=True):
        if path and path[-1]:  # a block that is not full has no key
            made = look(cache, path)
            assert made.path == path
            assert astuple(made.runs[0])[1:6] == astuple(run)[1:6]
            assert made.runs[0].below == run.below
    assert look(cache, (whole.runs[1].key, b"nothing!")).path == (whole.runs[1].key,)


@pytest.mark.parametrize("most", [1, 2, 7, 20])
def test_the_largest_are_chosen_and_what_is_left_out_is_counted(most: int) -> None:
    cache = busy(1)
    whole, some = look(cache), look(cache, most=most)
    assert len(some.runs) == most
    assert some.seen == len(whole.runs)
    sizes = sorted((run.below for run in whole.runs), reverse=True)
    assert sorted((run.below for run in some.runs), reverse=True) == sizes[:most]
    assert [run.parent for run in some.runs[:1]] == [-1]
    assert all(run.parent < number for number, run in enumerate(some.runs))
    children = Counter(run.parent for run in some.runs)
    assert all(run.hidden == run.children - children[number] for number, run in enumerate(some.runs))
    assert sum(run.hidden for run in whole.runs) == 0


def test_a_tenant_sees_its_own_trees_alone() -> None:
    cache = busy(2)
    made = look(cache, salts=b"tenant\0a\0")
    assert {run.salt for run in made.runs if not run.tokens} - {b""} == {b"tenant\0a\0"}
    other = next(run.key for run in look(cache).runs if run.salt == SALTS[2])
    assert look(cache, (other,), salts=b"tenant\0a\0").path == ()


def test_the_walk_stops_when_its_time_is_over() -> None:
    ticks = count()
    walk = Walk(busy(3), (), None, 0.5, lambda: float(next(ticks)))
    made = outline(walk, 1000)
    assert not made.whole
    assert CHECK <= sum(1 + one.tokens // SIZE for one in walk.seen[1:]) < CHECK + 30  # the longest run of these
    assert made.runs[0].below < look(busy(3)).runs[0].below


def test_heat_is_how_often_and_how_lately() -> None:
    cache = cached(tiers=False)
    for tokens in ([1] * 8, [2] * 8, [1] * 9, [1] * 9):
        serve(cache, tokens)
    ones, twos = (run for run in look(cache).runs if run.tokens == 8)
    assert (ones.packed[:4], ones.uses) == (pack_tokens([1]), 3)
    assert (twos.uses, ones.ago < twos.ago) == (1, True)


def test_a_long_chain_below_the_device_is_several_runs() -> None:
    cache = cached()
    store(cache, [1] * (SIZE * (LONG + 3)), b"", 0)
    made = look(cache)
    assert [run.tokens for run in made.runs[2:]] == [LONG * SIZE, 3 * SIZE]
