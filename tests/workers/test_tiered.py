"""Engines with tiers, real threads and real files: the same tokens from whatever tier, also after the worst end."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workers.drive import answers, assert_idle, engine, request
from tests.workers.tiered import BLOCKS, PREFIX, Tiered, answer, prompts, tiered
from transfer.layout import Shard
from workers.engine.model import Model


@pytest.fixture
def made(tiny: Model, tmp_path: Path) -> Iterator[Callable[..., Tiered]]:
    """Engines with tiers, over one directory."""
    some: list[Tiered] = []

    def make(device: int, host: int, disk: int = 0, **more: object) -> Tiered:
        some.append(tiered(tiny, device, host, disk, tmp_path if disk else None, **more))
        return some[-1]

    yield make
    for one in some:
        one.close()


def reference(tiny: Model, wanted: list[list[int]]) -> list[list[int]]:
    plain = engine(tiny, prefix_cache=False)
    return [answer(plain, prompt)[0] for prompt in wanted]


@pytest.mark.parametrize("policy", ["write-through", "write-back", "selective"])
def test_tokens_are_the_same_from_every_tier(tiny: Model, made: Callable[..., Tiered], policy: str) -> None:
    one = made(BLOCKS // 10, 3 * BLOCKS // 10, 2 * BLOCKS, policy=policy)
    wanted = prompts(1, 120)
    assert [answer(one.engine, prompt)[0] for prompt in wanted] == reference(tiny, wanted)
    one.rest()
    assert_idle(one.engine)
    tiers = one.engine.cache.tiers
    assert tiers is not None
    assert tiers.stats.loaded_blocks > tiers.stats.read_blocks
    assert tiers.stats.read_blocks > 10 or policy != "write-through"
    assert tiers.host.free + len(tiers.index.host) == tiers.host.total


def test_many_at_once_over_little_room(tiny: Model, made: Callable[..., Tiered]) -> None:
    one = made(20, 60, 2 * BLOCKS)
    wanted = prompts(2, 60)
    expected = reference(tiny, wanted)
    for start in range(0, len(wanted), 12):
        some = [request(prompt, 3) for prompt in wanted[start : start + 12]]
        assert answers(one.engine, some) == expected[start : start + 12]
    one.rest()
    assert_idle(one.engine)


def test_a_prompt_of_whole_blocks_leaves_one_token_to_compute(made: Callable[..., Tiered]) -> None:
    """One, two and several blocks, and a token more or less."""
    one = made(16, 32)
    for length in (15, 16, 17, 32, 64):
        prompt = list(range(length, 2 * length))
        answer(one.engine, prompt)
        one.rest()
        one.engine.cache.clear()
        cached = answer(one.engine, prompt)[1].cached_tokens
        assert cached == (length - 1) // 16 * 16


def test_salts_share_nothing(made: Callable[..., Tiered]) -> None:
    one = made(16, 32, 64)
    prompt = list(range(1, 100))
    answer(one.engine, prompt, b"a")
    one.rest()
    one.engine.cache.clear()
    assert answer(one.engine, prompt, b"b")[1].cached_tokens == 0
    assert answer(one.engine, prompt, b"a")[1].cached_tokens == 96


def test_what_is_lent_comes_up_and_nothing_is_evicted_for_what_is_not_there(made: Callable[..., Tiered]) -> None:
    one = made(12, 32)
    prompt, other = list(range(1, 97)), list(range(100, 230))
    answer(one.engine, prompt)
    one.rest()
    cached = one.engine.cache.counts()["cached"]
    assert not one.engine.promote(request(prompt, 1))  # it is there
    assert not one.engine.promote(request(other, 1))  # nobody has it
    assert one.engine.cache.counts()["cached"] == cached
    one.engine.cache.clear()
    assert one.engine.promote(request(prompt, 1))
    promoted: list[str] = []
    while not promoted:
        promoted = one.engine.plan().promoted
    assert one.engine.cache.counts()["cached"] == 6
    one.rest()
    assert_idle(one.engine)


def test_aborts_in_every_state_leave_nothing_behind(tiny: Model, made: Callable[..., Tiered]) -> None:
    one = made(20, 60, 2 * BLOCKS)
    rng = random.Random(5)
    wanted = prompts(3, 80)
    for prompt in wanted:
        each = request(prompt, 3)
        one.engine.add(each)
        for _ in range(rng.randrange(4)):
            one.engine.run(one.engine.plan().works)
            time.sleep(rng.choice([0, 0, 0.001]))
        one.engine.abort(each.request_id)
    one.rest()
    assert_idle(one.engine)
    assert [answer(one.engine, prompt)[0] for prompt in wanted[:20]] == reference(tiny, wanted[:20])


def test_weights_of_another_model_find_nothing(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(1, 100))
    for identity, cached in ((tiny.identity, 0), ("other weights", 0), (tiny.identity, 96)):
        with monkeypatch.context() as patch:
            patch.setattr(tiny, "identity", identity)
            again = tiered(tiny, 16, 32, 64, tmp_path)
        time.sleep(0.1)
        again.rest()
        assert answer(again.engine, prompt)[1].cached_tokens == cached
        again.rest()
        again.close()


def test_blocks_in_another_format_are_not_found(tiny: Model, tmp_path: Path) -> None:
    """Whatever lies in the directory; and each format finds its own."""
    prompt = list(range(1, 100))
    expected = answer(engine(tiny, prefix_cache=False), prompt)[0]
    for form, cached in (("int8", 0), ("exact", 0), ("fp8", 0), ("int8", 96), ("exact", 96)):
        again = tiered(tiny, 16, 32, 256, tmp_path, format=form)
        time.sleep(0.1)
        again.rest()
        tokens, last = answer(again.engine, prompt)
        assert last.cached_tokens == cached
        assert tokens == expected or form == "int8"
        again.rest()
        again.close()


@pytest.mark.parametrize("form", ["exact", "int8"])
def test_blocks_are_found_in_whatever_slices_they_were_stored(tiny: Model, tmp_path: Path, form: str) -> None:
    prompt = list(range(1, 100))
    expected = answer(engine(tiny, prefix_cache=False), prompt)[0]
    for shard, cached in ((Shard(), 0), (Shard(0, 2, 2), 96), (Shard(), 96)):
        again = tiered(tiny, 16, 32, 64, tmp_path, shard, format=form)
        time.sleep(0.1)
        again.rest()
        tokens, last = answer(again.engine, prompt)
        assert last.cached_tokens == cached
        assert tokens == expected or form == "int8"
        again.rest()
        again.close()


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_lossy_tiers_have_room_for_more_and_answer_much_alike(
    tiny: Model, made: Callable[..., Tiered], form: str
) -> None:
    one = made(BLOCKS // 10, BLOCKS // 10, 2 * BLOCKS, format=form, guard=False)
    wanted = prompts(1, 60)
    found = [token for prompt in wanted for token in answer(one.engine, prompt)[0]]
    one.rest()
    tiers, disk = one.engine.cache.tiers, one.io.disk
    assert tiers is not None
    assert disk is not None
    expected = [token for tokens in reference(tiny, wanted) for token in tokens]
    same = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
    assert same > 0.75 * len(expected)  # of a model whose words are all nearly as likely
    assert tiers.stats.read_blocks > 10
    record = 3072 + 4 * 12  # a byte for each value, and a scale for each head of keys and values in three layers
    assert disk.stats.written_bytes == disk.stats.written_blocks * record
    assert tiers.host.total == BLOCKS // 10 * 4 * 3072 // record


class Child:
    """A process that answers requests from number `first` on, until it has or until it is killed."""

    def __init__(self, model: Path, disk: Path, count: int, first: int = 0) -> None:
        command = [sys.executable, "-m", "tests.workers.tiered", str(model), str(disk), str(count), str(first)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def lines(self, most: int) -> list[dict[str, object]]:
        assert self.process.stdout is not None
        found = []
        for line in self.process.stdout:
            found.append(json.loads(line))
            if len(found) == most:
                break
        return found

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def share(lines: list[dict[str, object]], wanted: list[list[int]]) -> float:
    """Of the prompts' tokens, those that were cached."""
    return sum(int(str(line["cached"])) for line in lines) / sum(map(len, wanted))


@pytest.mark.parametrize(("count", "lives"), [(80, 0), pytest.param(250, 4, marks=pytest.mark.long)])
def test_killed_at_random_and_started_again(
    tiny: Model, zoo: Callable[[str], Path], tmp_path: Path, count: int, lives: int
) -> None:
    """The same tokens in every life, and as many of them cached as if there had been only one: the second half of the
    requests is answered by the process that answered the first half, and then once more after it was killed."""
    rng = random.Random(7)
    wanted = prompts(4, 2 * count)
    expected = reference(tiny, wanted)
    one = Child(zoo("llama"), tmp_path, 2 * count + 1)
    lines = one.lines(2 * count)
    one.kill()  # while it answers the next one, and writes
    assert [line["tokens"] for line in lines] == expected
    before = share(lines[count:], wanted[count:])
    for _ in range(lives):
        one = Child(zoo("llama"), tmp_path, 2 * count, count)
        some = one.lines(rng.randrange(count // 4, count))
        one.kill()
        assert [line["tokens"] for line in some] == expected[count : count + len(some)]
    one = Child(zoo("llama"), tmp_path, 2 * count, count)
    lines = one.lines(count)
    one.kill()
    assert [line["tokens"] for line in lines] == expected[count:]
    assert before > 0.3 * PREFIX / (PREFIX + 7)  # what is not written in time is not there; a busy machine writes late
    assert share(lines, wanted[count:]) >= before - 0.02
