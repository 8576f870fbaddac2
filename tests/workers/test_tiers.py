"""What goes down and comes back, without threads: in any order, with any failure, never another prefix's block."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.seeds import seeds
from tests.workers.drive import request
from tests.workers.tier_world import LAYOUT, MB_BLOCK, SIZE, World
from transfer.gossip import ladder
from transfer.gossip.summary import DISK, HOST
from transfer.messages import pack_tokens
from workers.kv.tier_io import Found, Save, Write
from workers.kv.tier_speeds import UNTRIED_S
from workers.sequence import Sequence


@pytest.fixture(autouse=True)
def every_block_is_published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ladder, "STEPS", ((SIZE, 1 << 31),))
    ladder._ladder.cache_clear()
    yield
    ladder._ladder.cache_clear()


def prompt(rng: random.Random) -> list[int]:
    """One of few beginnings, of any length."""
    start = rng.randrange(4)
    return [start] * rng.randrange(1, 20) + [rng.randrange(3) for _ in range(rng.randrange(1, 12))]


@pytest.mark.parametrize("policy", ["write-through", "write-back", "selective"])
@pytest.mark.parametrize("first", seeds(1, 20))
def test_no_order_and_no_failure_brings_another_block_or_keeps_one(first: int, policy: str) -> None:
    assert sum(disordered(10 * first + number, policy) for number in range(10))


def disordered(seed: int, policy: str) -> int:
    """How many tokens were loaded in a world where everything happens at any time."""
    rng = random.Random(f"{seed}{policy}")
    disk = rng.choice([0, 6, 40])
    world = World(12, rng.choice([6, 16]), disk, policy=policy, tenant_share=rng.choice([1.0, 0.5]))
    world.io.fails = lambda: rng.random() < 0.05
    came = 0
    for _ in range(600):
        world.now += 0.005
        what = rng.random()
        if what < 0.05:
            world.cache.prefetch(Sequence(request(prompt(rng), 1, rng.choice([b"", b"tenant"]))))
        elif what < 0.2:
            world.begin(prompt(rng), rng.choice([b"", b"", b"tenant"]))
        elif what < 0.5 and world.running:
            one = rng.choice(world.running)
            if rng.random() < 0.2:
                world.end(one)  # aborted, perhaps in the middle of a load
            elif one.load is None:
                came += sum(one.loaded)
                world.compute(one)
                world.end(one)
        elif what < 0.85:
            world.io.advance(rng)
        elif what < 0.87:
            world.now += 10.0  # some loads take too long
        elif disk and what < 0.88:
            assert world.disk
            world.disk.stats.read_only = not world.disk.stats.read_only
        world.settle()
        world.invariants()
        world.published()
    for one in list(world.running):
        world.end(one)
    if world.disk:
        world.disk.stats.read_only = False
    world.balance()
    assert world.published() == world.held()
    return came


def test_what_the_device_forgets_comes_back_from_host_memory() -> None:
    world = World(16, 16)
    tokens = list(range(30))
    assert world.answer(tokens) == 0
    world.rest()
    world.forget_device()
    assert world.answer(tokens) == 28
    assert world.tiers.stats.loaded_blocks == 7
    world.balance()


def test_what_host_memory_forgets_comes_back_from_disk() -> None:
    world = World(16, 8, 100)
    first, second = list(range(30)), list(range(100, 130))
    for tokens in (first, second):
        world.answer(tokens)
        world.rest()
    world.forget_device()
    assert world.answer(first) == 28
    assert world.tiers.stats.read_blocks >= 6
    world.balance()


def test_salts_share_nothing_in_any_tier() -> None:
    world = World(16, 8, 100)
    tokens = list(range(30))
    world.answer(tokens, b"a")
    world.rest()
    world.forget_device()
    assert world.answer(tokens, b"b") == 0
    assert world.tiers.found(b"c", pack_tokens(tokens), 0) == 0
    assert world.answer(tokens, b"a") == 28


def test_selective_keeps_what_was_used_again() -> None:
    world = World(32, 32, policy="selective", hits=2)
    once, often = list(range(30)), list(range(100, 130))
    world.answer(once)
    for _ in range(3):
        world.answer(often)
    world.rest()
    world.forget_device()
    assert world.answer(once) == 0
    assert world.answer(often) == 28


def test_write_back_copies_ahead_of_eviction() -> None:
    world = World(16, 64, policy="write-back")
    first = list(range(30))
    world.answer(first)
    world.rest()
    assert world.tiers.stats.saved_blocks == 0
    for start in range(100, 1000, 100):
        world.answer(list(range(start, start + 16)))
        world.rest()
    assert world.answer(first) == 28


def test_a_tenant_fills_its_share_and_no_more() -> None:
    world = World(64, 16, 16, tenant_share=0.5)
    world.answer(list(range(30)), b"quiet")
    world.rest()
    for start in range(100, 1000, 100):
        world.answer(list(range(start, start + 30)), b"loud")
        world.rest()
    assert world.tiers.index.host.count(b"loud") <= 8
    assert world.tiers.index.disk.count(b"loud") <= 8
    world.forget_device()
    assert world.answer(list(range(30)), b"quiet") == 28


def test_what_is_to_be_kept_goes_last_from_host_memory_and_from_disk() -> None:
    world = World(16, 16, 16, policy="selective", hits=1000)
    one = Sequence(replace(request(range(30), 1), keep_s=60.0))
    assert world.cache.admit(one, one.length)
    world.running.append(one)
    world.compute(one)
    world.end(one)
    world.tiers.policy = "write-through"
    for start in range(100, 1000, 100):
        world.rest()
        world.answer(list(range(start, start + 30)))
    world.rest()
    world.forget_device()
    assert world.answer(list(range(31))) == 28
    assert world.tiers.stats.read_blocks == 0
    world.now += 61
    for start in range(1000, 2000, 100):
        world.rest()
        world.answer(list(range(start, start + 30)))
    assert world.tiers.found(b"", pack_tokens(range(30)), 0) == 0


def test_the_head_of_a_prefix_goes_down_first() -> None:
    world = World(64, 64, in_flight=LAYOUT.block_bytes)
    world.answer(list(range(80)))
    world.settle()
    (job,) = world.io.saver
    assert isinstance(job, Save)
    entries = world.tiers.index.walk(b"", pack_tokens(range(80)))
    assert [entry.depth for entry in entries] == list(range(len(job.blocks)))


def test_a_block_is_written_once_however_slow_the_disk_is() -> None:
    world = World(64, 64, 100, in_flight=100 * LAYOUT.block_bytes)
    one = world.begin(list(range(200)))
    assert one is not None
    written: list[bytes] = []
    for count in range(0, 200, 10):
        for number in range(one.computed // SIZE, count // SIZE):
            world.io.device[one.blocks[number]] = (b"", one.packed((number + 1) * SIZE))
        one.computed = count
        world.cache.commit(one)
        world.settle()
        while world.io.saver:
            job = world.io.saver.popleft()
            world.io.write(job)
            world.io.over.append(job)
            world.settle()
        for queued in list(world.io.writer):
            assert isinstance(queued, Write)
            written += [block.digest for block in queued.blocks]
        world.io.writer.clear()
    assert len(written) == len(set(written)) >= 40


def loading(world: World, tokens: list[int]) -> Sequence:
    """A sequence that has begun to load."""
    world.rest()
    world.forget_device()
    one = world.begin(tokens)
    assert one is not None
    assert one.load is not None
    return one


@pytest.mark.parametrize("steps", [0, 3, 50])
def test_what_a_waiting_prompt_needs_comes_nearer_meanwhile_and_once(steps: int) -> None:
    world = World(64, 16, 100)
    tokens = list(range(41))
    for some in (tokens, list(range(100, 164))):
        world.answer(some)
        world.rest()
    world.forget_device()
    assert not any(entry.ready for entry in world.tiers.index.walk(b"", pack_tokens(tokens)))
    waiting = Sequence(request(tokens, 1))
    for _ in range(2):
        world.cache.prefetch(waiting)
    for _ in range(steps):
        world.io.advance(random.Random(0))
        world.settle()
    assert world.answer(tokens) == 40
    world.rest()
    assert world.tiers.stats.read_blocks == 10
    world.balance()


def test_a_load_that_takes_too_long_is_given_up_and_holds_up_nobody() -> None:
    world = World(32, 32)
    tokens = list(range(40))
    world.answer(tokens)
    one = loading(world, tokens)
    world.io.advance(random.Random(0))
    world.now += 10.0
    world.settle()
    assert one.load is None
    assert one.computed == SIZE
    world.compute(one)
    world.end(one)
    world.forget_device()
    other = world.begin(tokens)
    assert other is not None
    assert other.load is None  # whatever keeps the other load would keep this one
    world.end(other)
    world.rest()
    world.forget_device()
    assert world.answer(tokens) == 36
    assert world.tiers.stats.given_up == 1
    world.balance()


def test_nothing_is_written_to_blocks_of_who_has_left() -> None:
    world = World(32, 32)
    tokens = list(range(40))
    world.answer(tokens)
    one = loading(world, tokens)
    blocks = list(one.blocks)
    world.end(one)
    world.rest()
    assert {world.io.device.get(block) for block in blocks} == {None}
    world.balance()


def test_a_file_that_is_gone_or_bad_is_a_miss_from_there_on() -> None:
    world = World(32, 16, 100)
    tokens = list(range(40))
    for some in (tokens, list(range(100, 160))):
        world.answer(some)
        world.rest()
    world.forget_device()
    assert world.disk is not None
    entries = world.tiers.index.walk(b"", pack_tokens(tokens))
    assert len(entries) == 10
    assert not entries[4].ready
    del world.disk.files[entries[4].digest]
    assert world.answer(tokens) == 16
    world.rest()
    world.forget_device()
    assert world.answer(tokens) == 36  # it was computed and written again
    world.balance()


@dataclass(frozen=True)
class Pace:
    """Megabytes a second."""

    host: float
    disk: float = 0.0


@pytest.mark.parametrize(
    ("pace", "tokens_s", "wanted"),
    [
        (Pace(1000.0), 100.0, 9),  # 1 ms a block against 40
        (Pace(10.0), 100.0, 0),  # 100 against 40
        (Pace(10.0), 0.0, 9),  # unknown
        (Pace(1000.0, 100.0), 100.0, 9),
        (Pace(1000.0, 10.0), 100.0, 5),  # host memory yes, disk no
    ],
)
def test_the_faster_of_loading_and_computing_is_taken(pace: Pace, tokens_s: float, wanted: int) -> None:
    world = World(32, 32, 100 if pace.disk else 0, MB_BLOCK)
    tokens = list(range(36))
    world.answer([*tokens, 1])
    world.rest()
    world.forget_device()
    world.tiers.speeds.measured(HOST, 1, 2**20 / pace.host / 1e6)
    if pace.disk:
        world.tiers.speeds.measured(DISK, 1, 2**20 / pace.disk / 1e6)
        for entry in world.tiers.index.walk(b"", pack_tokens(tokens))[:4:-1]:
            world.tiers._forget(world.tiers.index.leave_host(entry))
    world.tiers.speeds.prompt_tokens_s = tokens_s
    found = world.tiers.find(b"", pack_tokens([*tokens, 1]), 0)
    assert len(found) == wanted


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_a_lossy_format_changes_sizes_and_files_and_nothing_that_is_told(form: str) -> None:
    """Keys are those that routers know, and speeds are in bytes of KV, a quarter of which is moved."""
    world, exact = (World(32, 32, 100, MB_BLOCK, format=one) for one in (form, "exact"))
    for one in (world, exact):
        one.answer(list(range(37)))
        one.rest()
        one.forget_device()
    assert world.published() == exact.published() != {}
    files, others = (one.disk.files for one in (world, exact) if one.disk is not None)
    assert len(files) == len(others) == 9
    assert not files.keys() & others.keys()
    world.tiers.speeds.measured(HOST, 1, 0.25)
    world.tiers.speeds.measured(DISK, 1, 0.5)
    assert (world.tiers.host_bytes_s, world.tiers.disk_bytes_s) == (4 * 2**20, 2 * 2**20)
    assert world.tiers.speeds.seconds(next(world.tiers.index.entries())) == pytest.approx(0.25)
    assert (world.tiers._most, exact.tiers._most) == (15, 4)  # of the bytes under way; scales take a few
    assert (world.tiers.status().format, exact.tiers.status().format) == (form, "exact")


def test_a_tier_that_was_slow_once_is_tried_again() -> None:
    world = World(32, 32, layout=MB_BLOCK)
    tokens = list(range(36))
    world.answer(tokens)
    world.rest()
    world.tiers.speeds.measured(HOST, 1, 100.0)
    world.tiers.speeds.prompt_tokens_s = 1000.0
    assert world.tiers.find(b"", pack_tokens(tokens), 0) == []
    world.now += UNTRIED_S + 1
    assert len(world.tiers.find(b"", pack_tokens(tokens), 0)) == 2
    assert world.tiers.find(b"", pack_tokens(tokens), 0) == []


def test_what_earlier_lives_left_is_found_in_any_order_and_forgotten_by_its_last_use() -> None:
    old = World(32, 32, 100)
    first, second = list(range(24)), list(range(100, 124))
    for tokens in (first, second):
        old.answer(tokens)
    old.rest()
    assert old.disk is not None
    blocks = [(one.block, float(one.salt == b"" and one.tokens[0] < 100)) for one in old.tiers.index.entries()]
    blocks = [(block, 2.0 if pack_tokens(first)[:1] == b"\0" and block.tokens[0] < 100 else 1.0) for block, _ in blocks]
    random.Random(3).shuffle(blocks)
    new = World(32, 32, 12)
    assert new.disk is not None
    new.disk.files = dict(old.disk.files)
    lost = next(block for block, _ in blocks if block.depth == 3 and block.tokens[0] >= 100)
    blocks = [item for item in blocks if item[0] is not lost]
    del new.disk.files[lost.digest]
    for start in range(0, len(blocks), 5):
        new.io.found.append(Found("me", blocks[start : start + 5]))
    new.io.found.append(Found("me", [], last=True))
    new.rest()
    # What lies behind the lost one leads nowhere, and goes first.
    assert (len(new.disk.files), len(new.tiers.index)) == (11, 9)
    assert new.tiers.found(b"", pack_tokens(first), 0) == 6
    assert new.tiers.found(b"", pack_tokens(second), 0) == 3
    new.answer(list(range(200, 208)))
    new.rest()
    assert len(new.disk.files) == 12
    assert new.tiers.found(b"", pack_tokens(second), 0) == 3
    new.answer(list(range(200, 224)))
    new.rest()
    assert new.tiers.found(b"", pack_tokens(first), 0) == 6  # used later than the other one
    assert new.tiers.found(b"", pack_tokens(second), 0) == 0
    new.balance()


def test_what_others_delete_is_forgotten() -> None:
    other = World(32, 32, 100)
    tokens = list(range(24))
    other.answer(tokens)
    other.rest()
    blocks = [one.block for one in other.tiers.index.entries()]
    world = World(32, 32, 100)
    world.io.found.append(Found("you", [(block, 0.0) for block in blocks]))
    world.settle()
    assert world.tiers.found(b"", pack_tokens(tokens), 0) == 6
    world.io.found.append(Found("you", [], [blocks[3].digest, bytes(16)]))
    world.settle()
    assert world.tiers.found(b"", pack_tokens(tokens), 0) == 3
    assert len(world.tiers.index) == 3


def test_a_block_whose_beginning_another_worker_has_is_not_useless() -> None:
    old = World(32, 32, 100)
    tokens = list(range(24))
    old.answer(tokens)
    old.rest()
    blocks = sorted((one.block for one in old.tiers.index.entries()), key=lambda block: block.depth)
    world = World(32, 32, 100)
    world.io.found.append(Found("me", [(block, 0.0) for block in blocks[3:]]))
    world.io.found.append(Found("me", [], last=True))
    world.rest()
    assert world.tiers.found(b"", pack_tokens(tokens), 0) == 0
    world.io.found.append(Found("you", [(block, 0.0) for block in blocks[:3]]))
    world.rest()
    assert world.tiers.found(b"", pack_tokens(tokens), 0) == 6


def test_what_this_life_has_used_goes_after_what_earlier_ones_left() -> None:
    old = World(32, 32, 100)
    earlier = list(range(24))
    old.answer(earlier)
    old.rest()
    assert old.disk is not None
    world = World(32, 32, 11)
    assert world.disk is not None
    world.disk.files = dict(old.disk.files)
    now = list(range(100, 116))
    world.answer(now)
    world.rest()
    world.io.found.append(Found("me", [(one.block, 5.0) for one in old.tiers.index.entries()]))
    world.io.found.append(Found("me", [], last=True))
    world.rest()
    world.answer(list(range(200, 216)))
    world.rest()
    world.forget_device()
    assert len(world.tiers.index.walk(b"", pack_tokens(now))) == 4
    assert len(world.tiers.index.walk(b"", pack_tokens(earlier))) == 3


def test_what_could_not_be_written_is_written_later() -> None:
    world = World(32, 32, 100)
    assert world.disk is not None
    failing = world.disk.put
    world.disk.put = lambda *_: False  # type: ignore[method-assign]
    world.answer(list(range(24)))
    world.rest()
    assert not world.disk.files
    world.disk.put = failing  # type: ignore[method-assign]
    world.now += 2
    world.rest()
    assert len(world.disk.files) == 6
    world.balance()


def test_loads_behind_others_have_time_to_wait() -> None:
    world = World(64, 64, layout=MB_BLOCK)
    prompts = [[start] * 36 for start in range(5)]
    for tokens in prompts:
        world.answer(tokens)
        world.rest()
    world.forget_device()
    world.tiers.speeds.measured(HOST, 1, 0.02)  # 20 ms a block
    waiting = [one for tokens in prompts if (one := world.begin(tokens)) is not None]
    assert all(one.load is not None for one in waiting)
    for one in waiting:
        while one.load is not None:
            world.now += 0.02
            world.io.advance(random.Random(0))
            world.settle()
    assert world.tiers.stats.given_up == 0
    assert [one.computed for one in waiting] == [32] * 5


def test_others_files_are_used_and_left_alone() -> None:
    other = World(32, 32, 100)
    tokens = list(range(24))
    other.answer(tokens)
    other.rest()
    blocks = [(one.block, 0.0) for one in other.tiers.index.entries()]
    world = World(32, 4, 100)
    assert world.disk is not None
    assert other.disk is not None
    world.io.found.append(Found("you", blocks))
    world.settle()
    world.disk.files = dict(other.disk.files)  # as if these were readable
    assert world.answer([*tokens, 9]) == 16  # host memory has no room for more on its way
    world.rest()
    assert len(world.disk.files) == 6
