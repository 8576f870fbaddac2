"""API keys and tenants: nobody in without a key, beyond a limit, or at another tenant's cache or responses."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import anthropic
import httpx
import openai
import pytest
from fastapi import FastAPI

from router.config import GatewayConfig
from router.gateway import accounts
from router.gateway.accounts import NOBODY, Account, Keyring
from router.gateway.background import Background
from router.gateway.choice import Piece
from router.gateway.errors import ApiError
from router.gateway.keys import OPEN
from router.gateway.responses import ResponsesAnswer
from router.gateway.text import Text
from router.tenants import Tenant, hashed, read
from tests.router.scripted import piece
from tests.router.serving import MODEL, Played, application, serving
from tests.router.test_http import three
from transfer.messages import Request

ACME, BEAN, SHARED = "hw-acme-0123456789", "hw-bean-0123456789", "hw-shared-0123456789"
ORIGIN = "https://app.example"
COMPLETION = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 3}


def write(file: Path, **tenants: dict[str, Any]) -> Path:
    file.write_text(json.dumps({"tenants": tenants}))
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(
        tmp_path / "tenants.yaml",
        acme={"keys": [hashed(ACME)], "weight": 2, "max_priority": 3},
        bean={"keys": [hashed(BEAN)], "max_concurrent": 1, "requests_per_minute": 3},
        shared={"keys": [hashed(SHARED)], "cache": "shared"},
    )


class Gateway:
    """An application whose keys are looked at with a clock of its own."""

    def __init__(self, text: Text, file: Path, play: Callable[..., Any] = three) -> None:
        self.now = 1000.0
        self.played = Played(play)
        config = GatewayConfig(cors_origins=[ORIGIN])
        self.app = application(text, self.played, config, keyring=Keyring((), file, lambda: self.now))
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway")

    async def ask(self, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return await self.http.post(path, json={**COMPLETION, **body}, headers={"authorization": f"Bearer {key}"})


@pytest.fixture
async def gateway(text: Text, file: Path) -> AsyncIterator[Gateway]:
    made = Gateway(text, file)
    yield made
    await made.http.aclose()


def routes(app: FastAPI) -> list[tuple[str, str]]:
    paths = app.openapi()["paths"]
    return [(method.upper(), path) for path in paths if path not in OPEN for method in paths[path]]


async def test_no_route_answers_without_a_key(gateway: Gateway) -> None:
    found = routes(gateway.app)
    assert len(found) >= 13
    for method, path in [*found, ("GET", "/v1/nothing"), ("GET", "/"), ("HEAD", "/v1/models")]:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {ACME}"}, {"x-api-key": ""}):
            answer = await gateway.http.request(method, path, headers=headers)
            assert answer.status_code == 401, (method, path, headers)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"]
    assert gateway.played.requests == []


async def test_what_operators_and_browsers_need_needs_no_key(gateway: Gateway) -> None:
    for path in ("/health", "/ready", "/metrics", "/metrics/targets", "/openapi.json", "/docs"):
        assert (await gateway.http.get(path)).status_code == 200
    for _, path in routes(gateway.app):
        asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
        assert (await gateway.http.options(path, headers=asked)).status_code == 200
    refused = await gateway.http.post("/v1/completions", json=COMPLETION, headers={"origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN  # or a page could not read why


async def test_official_clients_get_in_with_a_key_and_hear_why_not(gateway: Gateway) -> None:
    async with serving(gateway.app, GatewayConfig()) as (port, _):
        for key in (ACME, "wrong"):
            url = f"http://127.0.0.1:{port}"
            of_openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            of_anthropic = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
            wanted = of_openai.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=3)
            messages: Any = [{"role": "user", "content": "Hi"}]
            also = of_anthropic.messages.create(model=MODEL, messages=messages, max_tokens=3)
            if key == ACME:
                assert (await wanted).usage
                assert (await also).usage
                continue
            with pytest.raises(openai.AuthenticationError, match="not known here"):
                await wanted
            with pytest.raises(anthropic.AuthenticationError, match="not known here"):
                await also


async def test_errors_are_those_of_the_api_that_is_used(gateway: Gateway) -> None:
    answer = (await gateway.ask("wrong")).json()["error"]
    assert answer == {
        "message": "the API key is not known here",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
    answer = (await gateway.ask("wrong", "/v1/messages")).json()
    assert (answer["type"], answer["error"]["type"]) == ("error", "authentication_error")


async def test_a_key_in_either_header(gateway: Gateway) -> None:
    for headers in ({"authorization": f"Bearer {ACME}"}, {"authorization": f"bearer  {ACME}"}, {"x-api-key": ACME}):
        assert (await gateway.http.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 200


async def test_tenants_share_no_cached_prefix_unless_they_are_to(gateway: Gateway) -> None:
    for key in (ACME, BEAN, SHARED):
        assert (await gateway.ask(key)).status_code == 200
    assert (await gateway.ask(ACME, cache_salt="x")).status_code == 200
    salts = [one.salt for one in gateway.played.requests]
    assert len(set(salts)) == 4
    assert salts[2] == b""
    assert [one.tenant for one in gateway.played.requests] == ["acme", "bean", "shared", "acme"]
    assert [one.weight for one in gateway.played.requests] == [2, 1, 1, 2]


def test_no_salt_of_a_tenant_is_that_of_another() -> None:
    accounts = [Account(name, Tenant(keys=[])) for name in ("a", "b", "ab")]
    salts = {account.salt(given) for account in accounts for given in (b"", b"a", b"b", b"\0a")}
    assert len(salts) == 12


async def test_priority_as_far_as_the_tenant_may(gateway: Gateway) -> None:
    assert (await gateway.ask(ACME, priority=3)).status_code == 200
    refused = await gateway.ask(ACME, priority=4)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        "priority: at most 3 is allowed here (max_priority of the tenant), got 4"
    )


async def test_a_rate_of_requests(gateway: Gateway) -> None:
    for _ in range(3):
        assert (await gateway.ask(BEAN)).status_code == 200
    refused = await gateway.ask(BEAN)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "20"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert (await gateway.ask(ACME)).status_code == 200
    gateway.now += 20
    assert (await gateway.ask(BEAN)).status_code == 200


async def test_a_rate_of_tokens(text: Text, tmp_path: Path) -> None:
    """Prompt and answer count; the one that goes over the limit is the last for a while."""
    gateway = Gateway(text, write(tmp_path / "t", acme={"keys": [hashed(ACME)], "tokens_per_minute": 60}))
    assert (await gateway.ask(ACME, prompt=[1] * 70)).status_code == 200
    refused = await gateway.ask(ACME)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "14")  # 60 - 70 - 3 is 14 below 1
    gateway.now += 14
    assert (await gateway.ask(ACME)).status_code == 200


async def test_requests_at_a_time_are_counted_to_their_very_end(text: Text, tmp_path: Path) -> None:
    go = asyncio.Event()

    async def wait(played: Played, request: Request) -> None:
        await go.wait()
        await three(played, request)

    gateway = Gateway(text, write(tmp_path / "t", acme={"keys": [hashed(ACME)], "max_concurrent": 1}), wait)
    first = asyncio.create_task(gateway.ask(ACME, stream=True))
    while not gateway.played.requests:
        await asyncio.sleep(0.01)
    refused = await gateway.ask(ACME)
    assert refused.status_code == 429
    assert "max_concurrent" in refused.json()["error"]["message"]
    go.set()
    assert (await first).status_code == 200
    for body in ({}, {"prompt": "x" * 10, "max_tokens": -1}, {"stream": True}):
        for _ in range(2):
            assert (await gateway.ask(ACME, **body)).status_code in (200, 400)


async def test_a_stored_response_is_its_tenants(gateway: Gateway) -> None:
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 3}
    made = await gateway.http.post("/v1/responses", json=body, headers={"x-api-key": ACME})
    name = made.json()["id"]
    for key, status in ((ACME, 200), (SHARED, 404)):
        found = await gateway.http.get(f"/v1/responses/{name}", headers={"x-api-key": key})
        assert found.status_code == status
        follow = {**body, "previous_response_id": name}
        answer = await gateway.http.post("/v1/responses", json=follow, headers={"x-api-key": key})
        assert answer.status_code == status
    assert (await gateway.http.delete(f"/v1/responses/{name}", headers={"x-api-key": SHARED})).status_code == 404
    assert (await gateway.http.delete(f"/v1/responses/{name}", headers={"x-api-key": ACME})).status_code == 200


async def test_keys_change_without_a_restart(gateway: Gateway, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert (await gateway.ask(BEAN)).status_code == 200
    write(file, acme={"keys": [hashed("another-key-01234567")]})
    gateway.now += 2
    assert (await gateway.ask(ACME)).status_code == 200  # it may still be written
    gateway.now += 2
    assert (await gateway.ask(ACME)).status_code == 401
    assert (await gateway.ask(BEAN)).status_code == 401
    assert (await gateway.ask("another-key-01234567")).status_code == 200
    for content in ("tenants: {acme: {keys: [plain-key]}}", "- [", None):
        if content is None:
            os.remove(file)
        else:
            await asyncio.to_thread(file.write_text, content)
        for _ in range(2):
            gateway.now += 2
            assert (await gateway.ask("another-key-01234567")).status_code == 200
    assert sum("the keys stay as they were" in one.message for one in caplog.records) == 3
    assert "plain-key" not in caplog.text


def test_use_counts_on_when_limits_change() -> None:
    now = 0.0
    account = Account("a", Tenant(keys=[], requests_per_minute=1), lambda: now)
    account.begin()
    account.changed(Tenant(keys=[], requests_per_minute=1, weight=3))
    with pytest.raises(ApiError):
        account.begin()
    account.changed(Tenant(keys=[], requests_per_minute=2))
    account.begin()
    assert account.running == 2


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("tenants: {a: {keys: [secret-in-clear]}}", "tenants.a.keys.0: "),
        ("tenants: {a: {keys: [], wieght: 2}}", "tenants.a.wieght: Extra inputs"),
        ("tenants: {a b: {keys: []}}", "tenants.a b"),
        ("[]", "valid dictionary"),
        ("tenants: [", "no YAML, line "),
        ("tenants:\n  secret: {keys: []}\n  b: {keys: []}\n  secret: {keys: []}", "line 4: .*has this key already"),
        ("tenants: {a: {keys: [], requests_per_minute: 0}}", "tenants.a.requests_per_minute: "),
    ],
)
def test_a_file_that_is_wrong_is_told_why_without_its_secrets(tmp_path: Path, content: str, problem: str) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=problem) as told:
        read(file)
    assert "secret" not in str(told.value)


def test_two_tenants_have_no_key_in_common(tmp_path: Path) -> None:
    file = write(tmp_path / "t", a={"keys": [hashed(ACME)]}, b={"keys": [hashed(ACME)]})
    with pytest.raises(ValueError, match="tenants a and b have the same key"):
        Keyring((), file)


async def test_keys_by_themselves(text: Text) -> None:
    keyring = Keyring([ACME])
    assert keyring.needed
    assert not Keyring().needed
    account = keyring.account(ACME)
    assert account is not None
    assert account.name == "default"
    assert keyring.account(BEAN) is None


def test_no_salt_of_a_client_is_that_of_a_tenant() -> None:
    """Whoever shares its cache chooses all of its salt, and could write what stands before a tenant's own."""
    private = Account("victim", Tenant(keys=[]))
    for other in (Account("b", Tenant(keys=[], cache="shared")), NOBODY):
        assert other.salt(b"") == b""
        for given in (b"", b"x"):
            assert other.salt(private.salt(given)) != private.salt(given)
        assert other.salt(b"a") != other.salt(b"b")


async def test_what_goes_on_in_the_background_counts() -> None:
    """It takes one of the tenant's places until it is over, not until its request is."""
    account = Account("a", Tenant(keys=[], max_concurrent=1))
    background = Background(8)
    over = asyncio.Event()

    async def pieces() -> AsyncGenerator[Piece, None]:
        await over.wait()
        yield piece("x", "stop")

    before = accounts.current.set(account)
    account.begin()
    background.start("r", cast(ResponsesAnswer, Whole()), pieces())
    account.end()
    accounts.current.reset(before)
    with pytest.raises(ApiError, match="max_concurrent"):
        account.begin()
    over.set()
    while account.running:
        await asyncio.sleep(0)
    account.begin()


class Whole:
    """An answer that only takes what comes."""

    over = True

    async def whole(self, pieces: AsyncGenerator[Piece, None]) -> None:
        async for _ in pieces:
            pass


def test_who_takes_a_share_leaves_the_rest() -> None:
    """And gets something where a limit is small: otherwise it would wait forever."""
    now = 0.0
    limits = Tenant(keys=[], max_concurrent=4, requests_per_minute=60)
    account = Account("a", limits, lambda: now)
    for _ in range(2):
        account.begin(0.5)
    with pytest.raises(ApiError, match="max_concurrent"):
        account.begin(0.5)
    account.begin()
    for _ in range(3):
        account.end()
    for _ in range(27):
        account.begin(0.5)
        account.end()
    with pytest.raises(ApiError, match="requests_per_minute") as caught:
        account.begin(0.5)
    assert caught.value.retry_after_s == 1
    for _ in range(30):
        account.begin()
        account.end()
    with pytest.raises(ApiError, match="requests_per_minute"):
        account.begin()
    now = 32.0
    account.begin(0.5)
    least = Account("b", Tenant(keys=[], max_concurrent=1, requests_per_minute=1), lambda: now)
    least.begin(0.5)
    least.end()
    now += 60
    least.begin(0.5)
