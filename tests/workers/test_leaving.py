"""A worker that leaves: what it has begun goes on elsewhere, from what it has cached, and it takes nothing new."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.workers.house import Answer, House
from transfer.messages import Outcome, Request, SamplingParams, Source, pack_tokens

LENGTH = 200


@pytest.fixture
def leaving(house: House) -> Iterator[House]:
    """The decode worker stays for the tests that follow."""
    yield house
    house.d._state = "ready"


def request(house: House, answered: list[int], timeout_s: float = 20.0) -> Request:
    made = house.request(3, timeout_s=timeout_s)
    sampling = SamplingParams(LENGTH - len(answered), temperature=0.0, ignore_eos=True)
    return replace(made, prompt=made.prompt + pack_tokens(answered), sampling=sampling, answered=len(answered))


async def whole(house: House, worker: str, wanted: Request, source: Source | None = None) -> list[int]:
    answer = house.gateway.answers.setdefault(wanted.request_id, Answer())
    outcome: Outcome = await house.calls.call(worker, "generate", wanted, None, source, timeout=20)
    assert outcome.status == "done", outcome
    await asyncio.wait_for(answer.over.wait(), 5)
    return [answer.tokens[index] for index in range(len(answer.tokens))]


def test_what_was_begun_goes_on_elsewhere_from_what_is_cached_here(leaving: House) -> None:
    async def scenario() -> tuple[list[int], list[int], int, int]:
        expected = await whole(leaving, "p", request(leaving, []))
        await leaving.p._front.on_engine(lambda engine: engine.cache.clear())
        begun = request(leaving, [])
        answer = leaving.gateway.answers.setdefault(begun.request_id, Answer())
        running = asyncio.create_task(leaving.calls.call("d", "generate", begun, None, timeout=20))
        while len(answer.tokens) < 50:
            await asyncio.sleep(0.002)
        draining = asyncio.create_task(leaving.d.drain(0.0))
        assert (await running).status == "aborted"
        assert answer.error == "d leaves"
        sent = [answer.tokens[index] for index in range(len(answer.tokens))]
        held = (leaving.d._engine.cache.counts())["cached"]
        rest = request(leaving, sent)
        before = leaving.p._transfers.fetched_blocks
        tokens = (rest.prompt_tokens - 1) // 16 * 16
        answered = sent + await whole(leaving, "p", rest, Source("d", tokens, 0.1))
        assert await draining == 1
        return expected, answered, leaving.p._transfers.fetched_blocks - before, held

    expected, answered, fetched, held = leaving.run(scenario())
    assert answered == expected
    assert fetched >= held - 2 >= 250 // 16


def test_requests_that_end_in_time_do_not_move(leaving: House) -> None:
    async def scenario() -> tuple[int, list[int]]:
        running = asyncio.create_task(whole(leaving, "d", request(leaving, [])))
        await asyncio.sleep(0.05)
        moved = await leaving.d.drain(20.0)
        return moved, await running

    moved, answered = leaving.run(scenario())
    assert moved == 0
    assert len(answered) == LENGTH


def test_one_that_leaves_takes_nothing_new(leaving: House) -> None:
    async def scenario() -> tuple[str, str]:
        await leaving.d.drain(0.0)
        there: Outcome = await leaving.calls.call("d", "generate", request(leaving, []), None, timeout=5)
        handed: Outcome = await leaving.calls.call("p", "generate", leaving.request(1), "d", timeout=5)
        return there.status, handed.status

    assert leaving.run(scenario()) == ("busy", "busy")
