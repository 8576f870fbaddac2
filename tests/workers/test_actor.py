"""Whole workers in this process, without Ray: real engines, threads and NIXL, and calls that go wrong as told.

However requests, calls and writes race, each request has an outcome, no token is wrong, and both workers come to rest:
every block free or cached, nothing pinned or quarantined, no job, lease, transfer or task left.
"""

import asyncio
import random
import time
from typing import Any

import pytest

import workers.actor
import workers.takeover
from tests.seeds import seeds
from tests.workers.house import (
    LENGTHS,
    NEVER_S,
    Call,
    House,
    Rule,
    give_back,
    occupy,
    only,
    quarantined,
    smooth,
    until,
)
from transfer.messages import Outcome, pack_tokens
from transfer.outline import Outline
from workers.engine.engine import Engine
from workers.kv.pool import QUARANTINED
from workers.outlines import REST_S


def test_prompts_are_handed_over(house: House) -> None:
    async def scenario() -> list[str]:
        return await asyncio.gather(*(house.ask(case) for case in range(len(LENGTHS))))

    assert house.run(scenario()) == ["right"] * len(LENGTHS)


def test_only_engine_threads_keep_helpers(house: House) -> None:
    """A thread that loaded a model and lived on would make OpenMP's helpers sleep after every operator."""
    assert house.loaders
    assert not any(thread.is_alive() for thread in house.loaders)


def test_a_transfer_that_fails_before_its_reservation_is_served_is_not_handed_over(house: House) -> None:
    """D waits for blocks when the line breaks: it cannot go on with a prompt that has no place yet."""

    async def scenario() -> tuple[str, float]:
        blocks = await occupy(house.d)
        house.calls.rule = only("reserve", Call(fails_after_s=0.1))
        start = time.monotonic()
        answer = await house.ask(1, salt=b"nowhere yet")
        took = time.monotonic() - start
        await give_back(house.d, blocks)
        return answer, took

    answer, took = house.run(scenario())
    assert answer == "no blocks on d: d.reserve: no answer"
    assert took < 1.0


def test_blocks_that_a_living_sender_may_write_to_come_back_when_its_writes_have_ended(house: House) -> None:
    async def scenario() -> None:
        house.p._transfer_loop.transport.own.delay = lambda: 1.0
        start = time.monotonic()
        answer = await house.ask(3, salt=b"late")
        assert answer == "no write completed in time"
        assert await quarantined(house.d) > 0
        while await quarantined(house.d):
            assert time.monotonic() < start + 3
            await asyncio.sleep(0.01)
        assert time.monotonic() > start + 1.0

    house.run(scenario())


def test_blocks_that_nobody_vouches_for_are_given_up_in_the_end(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers.takeover, "SETTLE_S", 0.3)

    async def leave_while_writing() -> int:
        house.p._transfer_loop.transport.own.delay = lambda: 0.2
        house.calls.rule = only("cancel_transfer", Call(times=0))
        request = house.request(3, salt=b"given up")
        asking = asyncio.create_task(house.calls.call("p", "generate", request, "d", timeout=2))
        await until(lambda: house.d._front.on_transfer(lambda loop: loop.receiver.waiting))
        await house.leave(request.request_id)
        assert (await asking).status == "aborted"
        await until(lambda: house.d._front.on_transfer(lambda loop: not loop.receiver.waiting))
        return await quarantined(house.d)

    lost = house.run(leave_while_writing())
    assert lost == 16  # all of the prompt's blocks
    assert [record.levelname for record in caplog.records if "16 blocks are lost" in record.message] == ["ERROR"]
    house.calls.rule = smooth
    assert house.run(house.ask(2)) == "right"
    assert house.run(quarantined(house.d)) == lost

    def restart(engine: Engine) -> None:
        owners = engine.cache.pool.owners()
        engine.cache.end_quarantine([block for block, owner in enumerate(owners) if owner == QUARANTINED])

    house.run(house.d._front.on_engine(restart))


POINTS = ["generate called", "reserve called", "reserve answered", "write posted", "deliver called", "deliver answered"]


@pytest.mark.parametrize("case", [1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_client_that_leaves_at_any_point(house: House, point: str, case: int) -> None:
    async def scenario() -> Outcome:
        request = house.request(case, salt=point.encode())
        house.p._transfer_loop.transport.own.delay = lambda: 0.02
        left = house.once(point, lambda: house.leave(request.request_id))
        outcome = await house.calls.call("p", "generate", request, "d", timeout=2)
        await left
        return outcome

    # The call itself may come behind the abort; gateways abort once more when it returns.
    allowed = {"aborted", "handed off"} if point in POINTS[:2] else {"aborted", "failed", "handed off"}
    assert house.run(scenario()).status in allowed


@pytest.mark.parametrize("case", [1, 3])
@pytest.mark.parametrize(
    ("reserve", "expected"),
    [
        (Call(before_s=0.2), "right"),
        (Call(after_s=0.2), "right"),
        (Call(fails_after_s=0.02, before_s=0.1), "no blocks on d"),
        (Call(fails_after_s=0.3, after_s=0.6), "right"),
        (Call(times=0), ("no", "deadline exceeded")),  # whose clock is first
        (Call(after_s=NEVER_S), ""),  # D may be quick enough to compute the prompt when P gives up
    ],
)
def test_a_reservation_that_comes_late_or_never(
    house: House, case: int, reserve: Call, expected: str | tuple[str, ...]
) -> None:
    house.calls.rule = only("reserve", reserve)
    salt = repr((case, reserve)).encode()
    answer = house.run(house.ask(case, salt, timeout_s=0.7))
    assert answer.startswith(expected)


@pytest.mark.parametrize("victim", ["p", "d"])
@pytest.mark.parametrize("point", ["reserve called", "reserve answered", "write posted", "deliver answered"])
def test_a_worker_that_dies_at_any_point(house: House, victim: str, point: str) -> None:
    """The other one comes to rest, and gets on with the next life of the dead one."""
    other = "d" if victim == "p" else "p"

    async def scenario() -> str:
        house.p._transfer_loop.transport.own.delay = lambda: 0.03
        died = house.once(point, lambda: house.kill(victim))
        answer = await house.ask(3, salt=f"{victim} {point}".encode())
        await died
        await house.rest(other)
        await house.begin(victim)
        return answer

    answer = house.run(scenario())
    # Who dies last takes the answer with it, or has given it already.
    assert "dead" in answer or answer in ("connection reset", "deadline exceeded at the gateway", "right")


def test_a_gateway_that_hangs_for_a_while_gets_every_token(house: House) -> None:
    async def scenario() -> list[str]:
        house.once("deliver called", lambda: hang(0.7))
        return await asyncio.gather(*(house.ask(case, b"hangs", timeout_s=3) for case in range(len(LENGTHS))))

    async def hang(seconds: float) -> None:
        house.gateway.open.clear()
        await asyncio.sleep(seconds)
        house.gateway.open.set()

    assert house.run(scenario()) == ["right"] * len(LENGTHS)


def test_a_gateway_that_is_gone_stops_the_work_for_it(house: House) -> None:
    async def scenario() -> str:
        house.p._transfer_loop.transport.own.delay = lambda: 0.3
        request = house.request(3, b"gone", timeout_s=20)

        async def die() -> None:
            house.calls.die("g")

        house.once("reserve answered", die)
        outcome = await house.p.generate(request, "d")
        await house.rest()
        house.calls.live("g", house.gateway)
        return outcome.status

    # "failed" where D notices first and cancels the transfer; nobody is left to whom it would matter.
    assert house.run(scenario(), limit_s=5) in ("aborted", "failed")


def chaos(draw: random.Random) -> Rule:
    """Every third call goes wrong in one way or another, except the gateway's own."""

    def rule(_name: str, method: str, _arguments: tuple[Any, ...]) -> Call:
        kind = draw.random()
        if method == "generate" or kind < 0.65:
            return Call()
        if kind < 0.8:
            return Call(before_s=draw.uniform(0, 0.05), after_s=draw.uniform(0, 0.05))
        if kind < 0.85:
            return Call(fails_after_s=draw.uniform(0, 0.03), before_s=draw.uniform(0, 0.03))
        if kind < 0.9:
            return Call(times=0)
        if kind < 0.95:
            return Call(after_s=NEVER_S)
        return Call(times=2 if method in ("deliver", "abort", "cancel_transfer") else 1)

    return rule


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_random_schedules(house: House, seed: int) -> None:
    draw = random.Random(seed)
    house.calls.rule = chaos(draw)
    writes = random.Random(seed)  # of its own: it is used in another thread
    transport = house.p._transfer_loop.transport.own
    transport.delay = lambda: 0.8 if writes.random() < 0.03 else writes.uniform(0, 0.02)
    transport.fail = lambda: writes.random() < 0.03

    async def one(number: int) -> str:
        await asyncio.sleep(draw.uniform(0, 0.1))
        asking = asyncio.ensure_future(
            house.ask(draw.randrange(len(LENGTHS)), salt=b"%d" % draw.randrange(3), timeout_s=0.6)
        )
        if draw.random() < 0.4:
            _, waiting = await asyncio.wait({asking}, timeout=draw.uniform(0, 0.2))
            for task in waiting:  # the client leaves
                task.cancel()
            await asyncio.wait({asking})
            return "left" if asking.cancelled() else asking.result()
        return await asking

    async def scenario() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(8)))

    # Tokens are checked on the way, and what is left behind by the fixture.
    outcomes = house.run(scenario())
    assert len(outcomes) == 8


def test_people_may_look_at_caches_while_they_are_used(house: House) -> None:
    """However many at once: they change nothing, and between two walks there is a rest."""
    prompt = house.cases[2][0]

    async def scenario() -> tuple[str, list[Outline]]:
        begun = asyncio.create_task(house.ask(2, b"looked at"))
        looks = [await asyncio.gather(*(house.p.outline((), None, 50) for _ in range(3)))]
        answer = await begun
        looks.append([await house.p.outline((), b"looked", 50), await house.p.outline((), b"others", 50)])
        return answer, [look for some in looks for look in some]

    before = time.monotonic()
    answer, (*_, mine, others) = house.run(scenario())
    assert time.monotonic() - before > 4 * REST_S
    assert answer == "right"
    assert [run.salt for run in mine.runs[:2]] == [b"", b"looked at"]
    assert mine.runs[2].packed == pack_tokens(prompt)[: len(mine.runs[2].packed)]
    assert sum(run.device for run in mine.runs) >= len(prompt)
    assert len(others.runs) == 1
