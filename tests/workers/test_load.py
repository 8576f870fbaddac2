"""What a worker says of its load, and what it refuses because of it."""

import asyncio
import threading

from tests.workers.house import LENGTHS, House
from transfer.messages import Dispatch, Outcome
from workers.arrivals import KEEP_S, Arrivals


def test_arrivals_are_the_highest_numbers_of_lately() -> None:
    arrivals = Arrivals()
    for router, number, at in (("a", 5, 0.0), ("a", 4, 1.0), ("b", 7, 5.0), ("", 9, 5.0)):
        arrivals.arrived(Dispatch(router, number), at)
    assert dict(arrivals.latest(5.0)) == {"a": 5, "b": 7}
    assert dict(arrivals.latest(1.0 + KEEP_S)) == {"b": 7}
    assert arrivals.latest(5.0 + KEEP_S) == ()


def test_accepted_prompts_count_while_the_engine_is_at_a_step(house: House) -> None:
    """They count from the call on, before the engine has heard of them; what is believed to be cached does not."""
    go_on = threading.Event()

    async def scenario() -> tuple[int, Outcome, list[Outcome]]:
        house.p._engine_loop.call(lambda: go_on.wait(5.0))  # as a long step
        requests = [house.request(3, bytes([number]), timeout_s=10) for number in range(3)]
        dispatches = [Dispatch("r", number, cached=50) for number in (1, 2, 3)]
        calls = [
            asyncio.ensure_future(house.p.generate(request, "d", None, None, dispatch))
            for request, dispatch in zip(requests, dispatches, strict=True)
        ]
        await asyncio.sleep(0.2)
        load = house.p.load()
        assert dict(load.accepted) == {"r": 3}
        refused = await house.p.generate(house.request(3, b"x"), "d", None, None, Dispatch("r", 4, 0, most_queued=50))
        assert dict(house.p.load().accepted) == {"r": 4}
        go_on.set()
        outcomes = await asyncio.gather(*calls)
        await house.rest()
        assert house.p.load().queued_tokens == 0
        return load.queued_tokens, refused, outcomes

    queued, refused, outcomes = house.run(scenario())
    assert queued == 3 * (LENGTHS[3] - 50)
    assert (refused.status, refused.queued_tokens) == ("busy", queued)
    assert [one.status for one in outcomes] == ["handed off"] * 3


def test_a_longer_queue_than_was_believed_is_no_reason_to_refuse_without_a_condition(house: House) -> None:
    go_on = threading.Event()

    async def scenario() -> list[Outcome]:
        house.p._engine_loop.call(lambda: go_on.wait(5.0))
        calls = [
            asyncio.ensure_future(
                house.p.generate(
                    house.request(2, bytes([number]), timeout_s=10), "d", None, None, Dispatch("r", number)
                )
            )
            for number in range(1, 5)
        ]
        await asyncio.sleep(0.1)
        go_on.set()
        outcomes = await asyncio.gather(*calls)
        await house.rest()
        return outcomes

    assert [one.status for one in house.run(scenario())] == ["handed off"] * 4


def test_a_load_has_only_what_gossip_can_carry(house: House) -> None:
    load = house.p.load()
    assert load.free_blocks == house.p._engine.cache.counts()["total"]
    assert {type(value) for value in (load.queued_tokens, load.running, load.free_blocks)} == {int}
    assert type(load.prompt_tokens_s) is float
