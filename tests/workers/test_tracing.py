"""What workers tell of a request that is traced: real ones, and real transfers between them."""

import asyncio
import time
from dataclasses import replace
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from tests.telemetry import CALLER, SAMPLED, TRACE, own, samples, since, spans, traced
from tests.workers.house import OUTPUT, STEP_TOKENS, Answer, House, until
from tests.workers.test_fetch import PREFIX, alone, primed
from transfer.messages import Outcome, Source
from workers.tracing import Traces

LONG = 3
SLOW_S = 0.25


def ask(house: House, traceparent: str = SAMPLED, salt: bytes = b"traced") -> dict[str, ReadableSpan]:
    """Let a prompt of several steps be answered; its spans by name."""
    own()
    traced().clear()

    async def scenario() -> None:
        request = replace(house.request(LONG, salt), traceparent=traceparent)
        answer = house.gateway.answers.setdefault(request.request_id, Answer())
        outcome: Outcome = await house.calls.call("p", "generate", request, "d", timeout=5)
        assert outcome.status == "handed off"
        await answer.over.wait()
        await house.leave(request.request_id)
        await house.rest()

    house.run(scenario())
    found = spans()
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Without the prefix."""
    return {name.removeprefix("headwater."): value for name, value in (span.attributes or {}).items()}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_both_workers_tell_their_parts(house: House) -> None:
    found = ask(house)
    assert set(found) == {"queue", "prefill", "transfer", "reserve", "decode"}
    for one in found.values():
        assert f"{one.context.trace_id:032x}" == TRACE
        assert one.parent is not None
        assert f"{one.parent.span_id:016x}" == CALLER
        assert one.status.status_code is StatusCode.UNSET
    where = {name: attributes(one)["worker"] for name, one in found.items()}
    assert where == {"queue": "p", "prefill": "p", "transfer": "p", "reserve": "d", "decode": "d"}
    assert len({attributes(one)["request_id"] for one in found.values()}) == 1
    prompt = len(house.cases[LONG][0])
    prefill = attributes(found["prefill"])
    assert (prefill["tokens"], prefill["cached_tokens"]) == (prompt, 0)
    chunks = [dict(one.attributes or {})["headwater.tokens"] for one in found["prefill"].events]
    assert chunks == [STEP_TOKENS] * (prompt // STEP_TOKENS) + [prompt % STEP_TOKENS]
    assert attributes(found["decode"])["tokens"] == OUTPUT - 1
    assert found["queue"].end_time == found["prefill"].start_time
    ends = [found[name].end_time or 0 for name in ("prefill", "transfer", "decode")]
    assert ends == sorted(ends)
    assert (found["reserve"].end_time or 0) < (found["decode"].start_time or 0)


def test_what_is_cached_is_not_computed(house: House) -> None:
    ask(house, salt=b"twice")
    found = ask(house, salt=b"twice")
    prefill = attributes(found["prefill"])
    assert prefill["tokens"] + prefill["cached_tokens"] == len(house.cases[LONG][0])
    assert prefill["cached_tokens"] > 200


def test_a_slow_transfer_shows(house: House) -> None:
    """In its span and in its metric; the first token does not wait for it."""
    before = samples()
    house.p._transfer_loop.transport.own.delay = lambda: SLOW_S
    found = ask(house, salt=b"slow")
    assert seconds(found["transfer"]) >= SLOW_S
    assert seconds(found["prefill"]) < SLOW_S
    assert (found["decode"].start_time or 0) - (found["prefill"].end_time or 0) > SLOW_S * 0.9e9
    exposed = 'headwater_transfer_duration_seconds_sum{kind="exposed",worker="p"}'
    assert since(before)[exposed] >= SLOW_S * 0.9


def test_a_transfer_that_fails_is_an_error_and_the_prompt_is_computed_again(house: House) -> None:
    fails = iter([True])
    house.p._transfer_loop.transport.own.fail = lambda: next(fails, False)
    traced().clear()

    async def scenario() -> None:
        request = replace(house.request(LONG, b"fails"), traceparent=SAMPLED)
        answer = house.gateway.answers.setdefault(request.request_id, Answer())
        await house.calls.call("p", "generate", request, "d", timeout=5)
        await answer.over.wait()
        await house.leave(request.request_id)
        await house.rest()

    house.run(scenario())
    found = spans()
    (transfer,) = [one for one in found if one.name == "transfer"]
    assert transfer.status.status_code is StatusCode.ERROR
    assert transfer.status.description == "injected failure"
    prefills = [attributes(one) for one in found if one.name == "prefill"]
    assert [one["worker"] for one in prefills] == ["p", "d"]


def test_what_is_fetched_and_who_lends_it(house: House) -> None:
    async def scenario() -> None:
        request = replace(await primed(house, b"lent"), traceparent=SAMPLED)
        assert (await alone(house, "p", request, Source("d", PREFIX)))[0] == "right"

    traced().clear()
    house.run(scenario())
    found = {one.name: attributes(one) for one in spans()}
    assert {name: one["worker"] for name, one in found.items()} == {
        "fetch": "p",
        "lend": "d",
        "queue": "p",
        "prefill": "p",
        "decode": "p",
    }
    assert (found["fetch"]["source"], found["fetch"]["tokens"], found["lend"]["receiver"]) == ("d", PREFIX, "p")
    assert found["prefill"]["cached_tokens"] == PREFIX


def test_who_leaves_ends_its_spans(house: House) -> None:
    house.p._transfer_loop.transport.own.delay = lambda: 0.1
    traced().clear()

    async def scenario() -> None:
        request = replace(house.request(LONG, b"leaves"), traceparent=SAMPLED)
        asked = asyncio.create_task(house.calls.call("p", "generate", request, "d", timeout=5))
        await until(lambda: house.d._front.on_transfer(lambda loop: loop.receiver.waiting))
        await house.leave(request.request_id)
        assert (await asked).status == "aborted"
        await house.rest()

    house.run(scenario())
    found = {one.name: one for one in spans()}
    assert found["transfer"].status.description == "aborted"
    assert not house.p._traces._open
    assert not house.d._traces._open


def test_an_answer_that_nobody_wants_any_more_ends_its_spans(house: House) -> None:
    traced().clear()

    async def scenario() -> None:
        request = house.request(1, b"long")
        request = replace(request, sampling=replace(request.sampling, max_tokens=400), traceparent=SAMPLED)
        left = house.once("deliver called", lambda: house.leave(request.request_id))
        assert (await house.calls.call("p", "generate", request, None, timeout=5)).status == "aborted"
        await left
        await house.rest()

    house.run(scenario())
    found = {one.name: one.status.description for one in spans()}
    last = "decode" if "decode" in found else "prefill"
    assert found == {"queue": None, "prefill": None} | found | {last: "aborted"}
    assert not house.p._traces._open


def test_without_a_parent_nothing_is_noted(house: House) -> None:
    assert ask(house, traceparent="") == {}
    assert not house.p._traces._open


def test_what_it_costs_a_step_when_nothing_is_traced() -> None:
    none, begun = Traces("p"), time.perf_counter()
    works: list[Any] = [object()] * 64
    for _ in range(10_000):
        none.stepped(none.starting(works))
    assert (time.perf_counter() - begun) / 10_000 < 20e-6
