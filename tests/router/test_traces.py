"""What a gateway tells of a request that is traced: to the caller's trace, and nothing that the request says."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from router.config import GatewayConfig
from router.gateway.accounts import Keyring
from router.gateway.text import Text
from tests.router.serving import MODEL, Play, Played, application, completion
from tests.router.test_metrics import quick
from tests.telemetry import CALLER, NOT_SAMPLED, SAMPLED, TRACE, spans, traced
from transfer.messages import Delta, Request

SECRET, KEY = "correct horse battery staple", "a key of sixteen characters"


@asynccontextmanager
async def gateway(text: Text, play: Play, **headers: str) -> AsyncIterator[tuple[httpx.AsyncClient, Played]]:
    traced().clear()
    played = Played(play)
    app = application(text, played, GatewayConfig(), keyring=Keyring([KEY]))
    headers = {"traceparent": SAMPLED, "authorization": f"Bearer {KEY}", **headers}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://gateway", headers=headers
    ) as client:
        yield client, played


def tree(found: list[ReadableSpan]) -> Any:
    """Names of spans, each with those below it, from the caller's on."""

    def below(parent: int) -> Any:
        mine = [one for one in found if one.parent is not None and one.parent.span_id == parent]
        return [(one.name, below(one.context.span_id)) if below(one.context.span_id) else one.name for one in mine]

    return below(int(CALLER, 16))


async def test_a_request_is_a_span_of_the_caller_s_trace(text: Text) -> None:
    async with gateway(text, quick) as (http, played):
        answer = await http.post("/v1/completions", content=completion(prompt=SECRET, max_tokens=3, temperature=0))
    assert answer.status_code == 200, answer.text
    found = spans()
    assert {f"{one.context.trace_id:032x}" for one in found} == {TRACE}
    assert tree(found) == [(f"text_completion {MODEL}", [("attempt", ["route"])])]
    server, attempt, route = found
    assert server.kind is SpanKind.SERVER
    usage = answer.json()["usage"]
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "http.request.header.x-request-id": (answer.headers["x-request-id"],),
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert expected.items() <= dict(server.attributes or {}).items()
    assert [one.name for one in server.events] == ["first token"]
    (request,) = played.requests
    assert request.traceparent == f"00-{TRACE}-{attempt.context.span_id:016x}-01"
    about = dict(route.attributes or {})
    assert (about["headwater.prefill"], about["headwater.decode"]) == ("both-0", "both-0")
    assert json.loads(str(about["headwater.why"]))["candidates"] == 1


async def test_nothing_of_what_a_request_says_is_in_a_trace(text: Text) -> None:
    async with gateway(text, quick) as (http, _):
        chat = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "user": SECRET}
        for body in (chat, {**chat, "logit_bias": {SECRET: 1}}, {**chat, "model": SECRET}, {**chat, SECRET: 1}):
            await http.post(f"/v1/chat/completions?secret={SECRET}", json=body)
        await http.post(f"/{SECRET}", json=chat)
        await http.post("/v1/chat/completions", json=chat, headers={"authorization": f"Bearer {SECRET}"})
    text_of_all = "".join(one.to_json() for one in spans())
    assert "chat model" in text_of_all
    assert not [word for word in (*SECRET.split(), *KEY.split()[2:], "Bearer") if word in text_of_all]


async def test_an_attempt_that_fails_is_followed_by_another_one(text: Text) -> None:
    async def fails_once(played: Played, request: Request) -> None:
        if len(played.requests) > 1:
            await quick(played, request)
        elif played.dispatcher is not None:
            played.dispatcher.deliver([Delta(request.request_id, 0, (), 0, error="it has failed")])

    async with gateway(text, fails_once) as (http, played):
        await http.post("/v1/completions", content=completion(max_tokens=3))
    found = spans()
    assert tree(found) == [(f"text_completion {MODEL}", [("attempt", ["route"]), ("attempt", ["route"])])]
    server, *attempts = [one for one in found if one.name != "route"]
    assert [(one.attributes or {})["headwater.attempt"] for one in attempts] == [1, 2]
    assert [one.status.status_code for one in attempts] == [StatusCode.ERROR, StatusCode.UNSET]
    assert attempts[0].status.description == "it has failed"
    assert server.status.status_code is StatusCode.UNSET
    asked = [one.traceparent.split("-")[2] for one in played.requests]
    assert asked == [f"{one.context.span_id:016x}" for one in attempts]


async def test_choices_and_streams_and_clients_that_leave(text: Text) -> None:
    async def for_ever(played: Played, request: Request) -> None:
        played.deliver(request, 0, (7,))
        await asyncio.sleep(3600)

    async with gateway(text, quick) as (http, _):
        await http.post("/v1/completions", content=completion(max_tokens=3, n=2, stream=True))
    found = spans()
    assert tree(found) == [(f"text_completion {MODEL}", [("attempt", ["route"])] * 2)]
    assert dict(found[0].attributes or {})["gen_ai.response.finish_reasons"] == ("length", "length")
    async with gateway(text, for_ever) as (http, played):
        asked = asyncio.create_task(http.post("/v1/completions", content=completion()))
        while not played.requests:
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await played.all_aborted()
    assert dict(next(one for one in spans() if one.name == "attempt").attributes or {})["headwater.aborted"]


@pytest.mark.parametrize("traceparent", [NOT_SAMPLED, "", "00-nonsense-01", "x" * 5000])
async def test_without_a_caller_that_wants_it_nothing_is_recorded(text: Text, traceparent: str) -> None:
    async with gateway(text, quick, traceparent=traceparent) as (http, played):
        assert (await http.post("/v1/completions", content=completion(max_tokens=3))).status_code == 200
    assert spans() == []
    assert [one.traceparent for one in played.requests] == [""]


async def test_errors_and_what_operators_ask(text: Text, caplog: pytest.LogCaptureFixture) -> None:
    async def breaks(played: Played, request: Request) -> None:
        raise ZeroDivisionError(SECRET)

    async with gateway(text, breaks) as (http, _):
        for path in ("/health", "/ready", "/metrics", "/metrics/targets"):
            await http.get(path)
        assert spans() == []
        with caplog.at_level(logging.CRITICAL):
            answer = await http.post("/v1/completions", content=completion(max_tokens=3))
        await http.post("/v1/nothing")
        await http.request("BREW", "/v1/models")
    assert answer.status_code == 500
    found = spans()
    assert SECRET not in "".join(one.to_json() for one in found)
    status: Callable[[ReadableSpan], StatusCode] = lambda one: one.status.status_code  # noqa: E731
    names = [(one.name, status(one)) for one in found if one.kind is SpanKind.SERVER]
    assert names == [
        (f"text_completion {MODEL}", StatusCode.ERROR),
        ("POST", StatusCode.UNSET),
        ("_OTHER", StatusCode.UNSET),
    ]
