"""Prefixes copied from another worker's cache: over real NIXL, and with everything on the way going wrong.

Whatever happens, the answer is right, and both workers come to rest (see the fixture `house`).
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.workers.house import NEVER_S, OUTPUT, Answer, Call, House, give_back, occupy, only, until
from transfer.messages import Outcome, Request, Reservation, Source
from workers.config import TiersConfig
from workers.engine.engine import Engine
from workers.kv.tier_io import TierIO

LONG = 3
BLOCKS = 15
"""Whole blocks of the longest prompt."""
PREFIX = 16 * BLOCKS


async def cached(house: House, name: str, request: Request) -> int:
    """Tokens of a prompt that a worker would not have to compute."""
    worker = house.calls.actors[name]
    return int(await worker._front.on_engine(lambda engine: engine.found(request)))


@pytest.fixture(autouse=True)
def nobody_is_late(house: House) -> None:
    """What one test has found out of a worker does not count in the next."""
    for worker in (house.p, house.d):
        worker._fetch._late.clear()


async def forget(house: House, name: str) -> None:
    await house.calls.actors[name]._front.on_engine(lambda engine: engine.cache.clear())


async def alone(house: House, name: str, request: Request, fetch: Source | None) -> tuple[str, int]:
    """One worker answers; "right" or why not, and the prompt tokens that it did not compute."""
    answer = house.gateway.answers.setdefault(request.request_id, Answer())
    begun = await house.calls.actors[name]._front.on_engine(lambda engine: engine.cache.stats.cached_tokens)
    outcome: Outcome = await house.calls.call(name, "generate", request, None, fetch, timeout=5.0)
    if outcome.status != "done":
        return outcome.error or outcome.status, 0
    await asyncio.wait_for(answer.over.wait(), 5)
    found = [answer.tokens.get(index) for index in range(OUTPUT)]
    assert found == house.cases[LONG][1], answer
    hits = await house.calls.actors[name]._front.on_engine(lambda engine: engine.cache.stats.cached_tokens)
    return "right", hits - begun


async def primed(house: House, salt: bytes, lender: str = "d", borrower: str = "p") -> Request:
    """The lender has answered the prompt and the borrower knows nothing; the same request once more."""
    await forget(house, borrower)
    assert (await alone(house, lender, house.request(LONG, salt), None))[0] == "right"
    return house.request(LONG, salt)


@pytest.mark.parametrize(("lender", "borrower"), [("d", "p"), ("p", "d")])
def test_what_another_worker_has_is_not_computed(house: House, lender: str, borrower: str) -> None:
    async def scenario() -> None:
        request = await primed(house, b"fetched", lender, borrower)
        assert await alone(house, borrower, request, Source(lender, PREFIX)) == ("right", PREFIX)

    before = house.calls.actors[borrower]._transfers.fetched_blocks
    house.run(scenario())
    assert house.calls.actors[borrower]._transfers.fetched_blocks == before + BLOCKS


@pytest.fixture
def below(house: House) -> Iterator[TierIO]:
    """The worker `d` has host memory below its device."""
    worker = house.d

    async def attach() -> TierIO:
        config = TiersConfig(host=4 << 20)
        return await worker._front.on_engine(lambda engine: engine.attach("d", config, None, worker._wake))

    io: TierIO = house.run(attach())
    yield io
    house.run(house.rest())
    io.stop(5.0)
    house.d._engine.cache.tiers = None


async def settle(house: House, name: str) -> None:
    """Wait until nothing goes up or down there."""
    tiers = house.calls.actors[name]._engine.cache.tiers

    async def still() -> bool:
        return not tiers.busy and not tiers.status().under_way

    await until(still)


def test_what_another_worker_has_below_its_device_is_not_computed(house: House, below: TierIO) -> None:
    async def scenario() -> None:
        request = await primed(house, b"from below")
        await settle(house, "d")
        await forget(house, "d")
        assert await alone(house, "p", request, Source("d", PREFIX)) == ("right", PREFIX)

    blocks = house.p._transfers.fetched_blocks
    house.run(scenario())
    assert house.p._transfers.fetched_blocks == blocks + BLOCKS
    tiers = house.d._engine.cache.tiers
    assert tiers is not None
    assert tiers.stats.loaded_blocks == BLOCKS


def test_a_lender_whose_load_never_ends_lends_what_is_on_its_device(house: House, below: TierIO) -> None:
    async def scenario() -> None:
        request = await primed(house, b"stuck below")
        await settle(house, "d")
        await forget(house, "d")
        stuck, read = threading.Event(), below._load
        below._load = lambda job: (stuck.wait(5), read(job))[1]  # type: ignore[method-assign]
        try:
            assert await alone(house, "p", request, Source("d", PREFIX)) == ("right", 0)
        finally:
            stuck.set()
            below._load = read  # type: ignore[method-assign]
        await settle(house, "d")

    house.run(scenario())


def test_what_is_there_already_does_not_travel(house: House) -> None:
    async def scenario() -> int:
        request = await primed(house, b"half there")
        half = house.request(LONG, b"half there")
        half = replace(half, prompt=half.prompt[: 4 * 100])
        outcome = await house.calls.call("p", "generate", half, None, timeout=5.0)
        assert outcome.status == "done"
        blocks = house.p._transfers.fetched_blocks
        assert await alone(house, "p", request, Source("d", PREFIX)) == ("right", PREFIX)
        again = house.request(LONG, b"half there")
        # The prompt's last tokens are behind its last whole block, in a block that is copied.
        assert (await alone(house, "p", again, Source("d", PREFIX)))[0] == "right"
        return house.p._transfers.fetched_blocks - blocks

    assert house.run(scenario()) == BLOCKS - 6


def test_who_begins_alike_waits_for_what_is_being_fetched(house: House) -> None:
    async def scenario() -> int:
        request = await primed(house, b"waits")
        house.d._transfer_loop.transport.own.delay = lambda: 0.3
        new = house.p._engine.cache.stats.new_tokens
        first = asyncio.create_task(alone(house, "p", request, Source("d", PREFIX)))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(alone(house, "p", house.request(LONG, b"waits"), None))
        assert [answer for answer, _ in await asyncio.gather(first, second)] == ["right"] * 2
        return house.p._engine.cache.stats.new_tokens - new

    assert house.run(scenario()) <= 2 * (250 - PREFIX)


def test_what_is_cached_anyway_waits_for_nobody(house: House) -> None:
    async def scenario() -> float:
        request = await primed(house, b"cached anyway")
        assert (await alone(house, "p", request, Source("d", PREFIX)))[0] == "right"
        await forget(house, "p")
        half = replace(house.request(LONG, b"cached anyway"), prompt=request.prompt[: 4 * 100])
        assert (await house.calls.call("p", "generate", half, None, timeout=5.0)).status == "done"
        house.d._transfer_loop.transport.own.delay = lambda: 0.4
        fetching = asyncio.create_task(alone(house, "p", house.request(LONG, b"cached anyway"), Source("d", PREFIX)))
        await asyncio.sleep(0.05)
        again = replace(house.request(LONG, b"cached anyway"), prompt=request.prompt[: 4 * 90])
        begun = time.monotonic()
        assert (await house.calls.call("p", "generate", again, None, timeout=5.0)).status == "done"
        took = time.monotonic() - begun
        assert (await fetching)[0] == "right"
        return took

    assert house.run(scenario()) < 0.3


def test_nothing_is_fetched_for_a_while_from_a_worker_that_did_not_answer(house: House) -> None:
    async def scenario() -> float:
        request = await primed(house, b"silent")
        house.calls.rule = only("lend", Call(times=0))
        assert (await alone(house, "p", request, Source("d", PREFIX)))[0] == "right"
        await forget(house, "p")
        begun = time.monotonic()
        assert (await alone(house, "p", house.request(LONG, b"silent"), Source("d", PREFIX)))[0] == "right"
        house.p._fetch._late.clear()
        return time.monotonic() - begun

    assert house.run(scenario()) < 0.4


def test_a_fetched_prompt_is_handed_over(house: House) -> None:
    async def scenario() -> str:
        await primed(house, b"both")
        await forget(house, "d")
        assert (await alone(house, "p", house.request(LONG, b"both"), None))[0] == "right"
        await forget(house, "d")
        request = house.request(LONG, b"both")
        answer = house.gateway.answers.setdefault(request.request_id, Answer())
        outcome = await house.calls.call("p", "generate", request, "d", Source("d", PREFIX), timeout=5.0)
        assert outcome.status == "handed off"
        await asyncio.wait_for(answer.over.wait(), 5)
        assert [answer.tokens.get(index) for index in range(OUTPUT)] == house.cases[LONG][1]
        return "right"

    assert house.run(scenario()) == "right"


def test_a_lender_that_has_less_gives_what_it_has(house: House) -> None:
    async def scenario(keep: int) -> tuple[str, int]:
        request = await primed(house, b"less %d" % keep)

        def evict(engine: Engine) -> None:
            engine.cache.clear()

        await house.d._front.on_engine(evict)
        if keep:
            part = house.request(LONG, b"less %d" % keep)
            part = replace(part, prompt=part.prompt[: 4 * 16 * keep])
            assert (await house.calls.call("d", "generate", part, None, timeout=5.0)).status == "done"
        return await alone(house, "p", request, Source("d", PREFIX))

    assert house.run(scenario(0)) == ("right", 0)
    assert house.run(scenario(4)) == ("right", 64)


def test_another_tenants_prefix_is_not_lent(house: House) -> None:
    async def scenario() -> tuple[str, int]:
        await primed(house, b"tenant a")
        return await alone(house, "p", house.request(LONG, b"tenant b"), Source("d", PREFIX))

    assert house.run(scenario()) == ("right", 0)


@pytest.mark.parametrize(
    "lend",
    [
        Call(times=0),
        Call(before_s=0.7),
        Call(after_s=NEVER_S),
        Call(fails_after_s=0.001, before_s=0.05),
        Call(fails_after_s=0.001, after_s=0.3),
        Call(times=2),
    ],
)
def test_a_call_that_goes_wrong_costs_time_and_nothing_else(house: House, lend: Call) -> None:
    async def scenario() -> str:
        request = await primed(house, repr(lend).encode())
        house.calls.rule = only("lend", lend)
        return (await alone(house, "p", request, Source("d", PREFIX)))[0]

    begun = time.monotonic()
    assert house.run(scenario()) == "right"
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize("lend", [Call(before_s=0.8), Call(times=2, after_s=0.3)])
def test_a_lender_that_is_asked_too_late_or_twice_writes_nothing_then(house: House, lend: Call) -> None:
    """By then the borrower has put something else there."""

    async def scenario() -> bool:
        request = await primed(house, b"fenced " + repr(lend).encode())
        house.calls.rule = only("lend", lend)
        assert (await alone(house, "p", request, Source("d", PREFIX)))[0] == "right"
        await until(lambda: at_rest(house, "p"))
        blocks = await occupy(house.p)
        house.p._engine.memory.flat.fill_(0x55)
        await asyncio.sleep(1.2)
        await house.p._front.on_transfer(lambda loop: loop.transport.receive())
        untouched = bool((house.p._engine.memory.flat == 0x55).all())
        await give_back(house.p, blocks)
        return untouched

    assert house.run(scenario())


def test_writes_that_fail_are_computed_instead(house: House) -> None:
    async def scenario() -> tuple[str, int]:
        request = await primed(house, b"fails")
        house.d._transfer_loop.transport.own.fail = lambda: True
        return await alone(house, "p", request, Source("d", PREFIX))

    assert house.run(scenario()) == ("right", 0)


def test_a_late_write_meets_blocks_that_nobody_uses(house: House) -> None:
    """The borrower has given up and computed; the lender's write comes 0.8 s later. (It is at rest only when it knows
    that no write is under way.)"""

    async def scenario() -> tuple[str, int]:
        request = await primed(house, b"late")
        house.d._transfer_loop.transport.own.delay = lambda: 0.8
        answer = await alone(house, "p", request, Source("d", PREFIX))
        counts = await house.p._front.on_engine(lambda engine: engine.cache.counts())
        assert counts["quarantined"] == BLOCKS
        return answer

    assert house.run(scenario()) == ("right", 0)


def test_a_flipped_bit_is_computed_instead(house: House) -> None:
    async def scenario() -> tuple[str, int]:
        request = await primed(house, b"flipped")
        checksum = house.p._engine.memory.checksum

        def flip(blocks: object, layers: object) -> int:
            return checksum(blocks, layers) ^ 1  # type: ignore[arg-type]

        house.p._engine.memory.checksum = flip  # type: ignore[method-assign,assignment]
        try:
            return await alone(house, "p", request, Source("d", PREFIX))
        finally:
            house.p._engine.memory.checksum = checksum  # type: ignore[method-assign]

    refused = house.p._transfers.refused
    assert house.run(scenario()) == ("right", 0)
    assert house.p._transfers.refused == refused + 1


def test_a_client_that_leaves_while_its_prefix_is_fetched(house: House) -> None:
    async def scenario() -> Outcome:
        request = await primed(house, b"leaves")
        gone = house.once("lend called", lambda: house.leave(request.request_id))
        outcome: Outcome = await house.calls.call("p", "generate", request, None, Source("d", PREFIX), timeout=5.0)
        await asyncio.wait_for(gone, 5)
        return outcome

    assert house.run(scenario()).status == "aborted"


@pytest.mark.parametrize("point", ["lend called", "write posted", "lend answered"])
def test_a_lender_that_dies_or_restarts(house: House, point: str) -> None:
    async def scenario() -> tuple[str, int]:
        request = await primed(house, point.encode())

        async def die() -> None:
            await house.kill("d")

        dead = house.once(point, die)
        answer = await alone(house, "p", request, Source("d", PREFIX))
        await asyncio.wait_for(dead, 5)
        assert answer[0] == "right"
        await until(lambda: at_rest(house, "p"))
        await house.begin("d")
        # The borrower still knows the lender's former life, and finds out.
        request = await primed(house, point.encode())
        assert (await alone(house, "p", request, Source("d", PREFIX)))[0] == "right"
        request = await primed(house, point.encode())
        return await alone(house, "p", request, Source("d", PREFIX))

    assert house.run(scenario(), limit_s=60) == ("right", PREFIX)


async def at_rest(house: House, name: str) -> bool:
    return await house._unrest(house.calls.actors[name]) is None


def test_blocks_of_another_life_are_not_written_to(house: House) -> None:
    """A call that the borrower's former life has made arrives when the lender knows the present one."""

    async def scenario() -> tuple[str, bool]:
        request = await primed(house, b"former")
        assert (await alone(house, "p", request, Source("d", PREFIX))) == ("right", PREFIX)
        known = house.d._handover._peers["p"]
        former = Reservation(known.incarnation - 1, 0, tuple(range(BLOCKS)))
        part = replace(house.request(LONG, b"former"), prompt=request.prompt[: 4 * PREFIX])
        blocks = await occupy(house.p)
        house.p._engine.memory.flat.fill_(0x55)
        outcome = await house.calls.call("d", "lend", part, former, "p", house.d.incarnation, timeout=3.0)
        await house.p._front.on_transfer(lambda loop: loop.transport.receive())
        untouched = bool((house.p._engine.memory.flat == 0x55).all())
        await give_back(house.p, blocks)
        assert house.d._handover._peers["p"] is known
        return outcome.status, untouched

    assert house.run(scenario()) == ("failed", True)


def test_more_to_compute_than_expected_is_stale(house: House) -> None:
    async def scenario() -> list[str]:
        await forget(house, "d")
        statuses = []
        for limit in (249, 250):
            request = house.request(LONG, b"stale")
            outcome = await house.calls.call("d", "generate", request, None, None, limit, timeout=5.0)
            statuses.append(outcome.status)
        return statuses

    assert house.run(scenario()) == ["stale", "done"]
