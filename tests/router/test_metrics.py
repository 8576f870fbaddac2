"""What a gateway says of requests: once each, and in no more words the more it is asked."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from cluster.simulate.status import stand_in
from router.config import GatewayConfig
from router.gateway.targets import targets
from router.gateway.text import Text
from router.view import View
from tests.router.serving import Play, Played, application, completion
from tests.telemetry import own, samples, since
from transfer.messages import Delta, Request, Speeds

FIRST = "headwater_time_to_first_token_seconds"
NORMAL = '{priority="normal"}'
GAPS = "headwater_time_between_tokens_seconds"
PAUSE_S = 0.06


@asynccontextmanager
async def gateway(text: Text, play: Play) -> AsyncIterator[httpx.AsyncClient]:
    own()
    transport = httpx.ASGITransport(application(text, Played(play), GatewayConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


async def quick(played: Played, request: Request) -> None:
    for start in range(3):
        played.deliver(request, start, (7,), "length" if start == 2 else None)


async def test_five_hundred_paths_and_models_make_no_new_series(text: Text) -> None:
    async with gateway(text, quick) as http:

        async def strangers(name: str) -> None:
            await http.get(f"/{name}")
            await http.get(f"/v1/models/{name}", headers={"x-request-id": name})
            body = json.dumps({"model": name, "prompt": "x", "user": name})
            await http.post(f"/v1/completions?x={name}", content=body)
            await http.request(f"M{name[-4:].upper()}", "/v1/completions")

        await http.post("/v1/completions", content=completion(max_tokens=3))
        await strangers("first0000")
        before = set(samples())
        for number in range(500):
            await strangers(f"some{number:04}")
        assert set(samples()) == before


@pytest.mark.parametrize("given", [0, 1])
async def test_a_request_has_one_first_token_whatever_it_takes(text: Text, given: int) -> None:
    async def fails_once(played: Played, request: Request) -> None:
        """The first attempt ends after a while, before or behind its first token."""
        await asyncio.sleep(PAUSE_S)
        first = len(played.requests) == 1
        for start in range(given if first else 3 - given):
            played.deliver(request, start, (7,), "length" if start == 2 - given else None)
        if first:
            assert played.dispatcher is not None
            played.dispatcher.deliver([Delta(request.request_id, given, (), 0, error="it has failed")])

    async with gateway(text, fails_once) as http:
        before = samples()
        answer = await http.post("/v1/completions", content=completion(max_tokens=3))
    assert answer.status_code == 200, answer.text
    seen = since(before)
    assert seen[f"{FIRST}_count{NORMAL}"] == seen["headwater_request_duration_seconds_count"] == 1
    assert seen[f"{FIRST}_sum{NORMAL}"] >= (2 - given) * PAUSE_S
    # A token that one attempt has given, and an answer that another one ends: a pause, as for the client.
    assert seen[f"{GAPS}_count"] == 2
    assert (seen[f"{GAPS}_sum"] > PAUSE_S) == bool(given)


async def test_choices_are_of_one_request(text: Text) -> None:
    async with gateway(text, quick) as http:
        before = samples()
        answer = await http.post("/v1/completions", content=completion(max_tokens=3, n=3))
        assert len(answer.json()["choices"]) == 3
    seen = since(before)
    assert seen[f"{FIRST}_count{NORMAL}"] == seen["headwater_request_duration_seconds_count"] == 1
    assert seen["headwater_output_tokens_total"] == 9
    assert seen[f"{GAPS}_count"] == 6


async def test_time_before_the_workers_counts(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs from when the request arrives, not from when it is sent on."""
    slow = Text.encode

    def encode(self: Text, prompt: str) -> list[int]:
        time.sleep(PAUSE_S)
        return slow(self, prompt)

    monkeypatch.setattr(Text, "encode", encode)
    async with gateway(text, quick) as http:
        before = samples()
        await http.post("/v1/completions", content=completion(prompt="x", max_tokens=3))
    assert since(before)[f"{FIRST}_sum{NORMAL}"] >= PAUSE_S


async def test_what_is_started_ends_once(text: Text) -> None:
    """F2: started = sum of outcomes + in flight, and nothing stays in flight."""

    async def for_ever(played: Played, request: Request) -> None:
        await asyncio.sleep(3600)

    async with gateway(text, for_ever) as http:
        before = samples()
        asked = [asyncio.create_task(http.post("/v1/completions", content=completion())) for _ in range(20)]
        await asyncio.sleep(0.1)
        assert since(before)["headwater_requests_started_total"] == 20
        assert not any("requests_total" in name for name in since(before))
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    seen = since(before)
    assert sum(count for name, count in seen.items() if name.startswith("headwater_requests_total")) == 20


def test_targets_are_what_lives_and_where_it_listens() -> None:
    view = View([("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")])
    for name, worker in view.workers.items():
        worker.status = replace(stand_in(name, worker.role, Speeds(), 1), metrics=f"{name}:9464")
    view.mark_dead("decode-1")
    found = targets(view.workers.values(), {"gateway-0": "10.0.0.9:8000"}, "https")
    meta = "__meta_headwater_"
    assert found == [
        {
            "targets": ["prefill-0:9464"],
            "labels": {f"{meta}name": "prefill-0", f"{meta}kind": "worker", f"{meta}role": "prefill"},
        },
        {
            "targets": ["decode-0:9464"],
            "labels": {f"{meta}name": "decode-0", f"{meta}kind": "worker", f"{meta}role": "decode"},
        },
        {
            "targets": ["10.0.0.9:8000"],
            "labels": {f"{meta}name": "gateway-0", f"{meta}kind": "gateway", "__scheme__": "https"},
        },
    ]
