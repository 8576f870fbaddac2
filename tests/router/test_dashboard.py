"""What the dashboard is told: right figures, and to nobody what is not his."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from router.gateway.dashboard.own import Own
from router.gateway.dashboard.routes import PAGE, POLICY, files
from router.gateway.dashboard.viewer import Viewer, owner
from router.gateway.history import SAMPLES, SECONDS, History, merged
from router.gateway.recent import KEPT, MAX_EVENTS, Recent
from router.gateway.text import Text
from router.tenants import hashed
from tests.router.dashboards import BLOCKS, CACHED, body, cluster
from tests.telemetry import SAMPLED, spans, traced
from transfer.messages import Plan, pack_tokens

ACME, BEAN, CHIEF = "hw-acme-0123456789", "hw-bean-0123456789", "hw-chief-0123456789"
WORDS = "The river rises in the hills. " * 8
ALL = Viewer(None)


@asynccontextmanager
async def asking(app: FastAPI, key: str = "") -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as http:
        yield http


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    tenants = {
        "acme": {"keys": [hashed(ACME)], "requests_per_minute": 2, "max_concurrent": 1},
        "bean": {"keys": [hashed(BEAN)]},
        "chief": {"keys": [hashed(CHIEF)], "operator": True},
    }
    file = tmp_path / "tenants.yaml"
    file.write_text(json.dumps({"tenants": tenants}))
    return file


# --- the page ---------------------------------------------------------------------------------------------------------


async def test_the_page_is_whole_and_asks_nobody_else(text: Text, keys: Path) -> None:
    """Without a key: it has nothing to hide. Everything that it names is here, and nothing else is reachable."""
    app, _ = cluster(text, keys)
    async with asking(app) as http:
        page = await http.get("/dashboard")
        assert page.status_code == 200
        assert page.headers["content-security-policy"] == POLICY
        named = set(re.findall(r'(?:href|src)="([^"#]+)"', page.text))
        assert named >= {"dashboard/style.css", "dashboard/main.js"}
        for name, content in files().items():
            named |= {f"dashboard/{one}" for one in re.findall(r'from "\./([^"]+)"', content.decode())}
            outside = re.findall(r"(?:https?:)?//[a-z][^\s\"'`]*", content.decode())
            assert set(outside) <= {"http://www.w3.org/2000/svg", "//www.w3.org/2000/svg"}, name
            assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(| style=", content.decode()), name
        assert named == {f"dashboard/{name}" for name in files() if name != "index.html"}
        for name in named:
            part = await http.get(f"/{name}")
            assert (part.status_code, part.headers["x-content-type-options"]) == (200, "nosniff")
        for name in ("nothing.js", "..%2froutes.py", "__init__.py", "api"):
            assert (await http.get(f"/dashboard/{name}")).status_code == 404
    assert {one.suffix for one in PAGE.iterdir()} <= {".html", ".css", ".js", ".svg"}


# --- what is shown to whom --------------------------------------------------------------------------------------------


async def test_nothing_is_told_without_a_key(text: Text, keys: Path) -> None:
    app, _ = cluster(text, keys)
    for key in ("", "wrong"):
        async with asking(app, key) as http:
            for path in ("cluster", "ring", "requests", "requests/gateway-0/1", "trees/prefill-0", "nothing"):
                assert (await http.get(f"/dashboard/api/{path}")).status_code == 401


async def test_a_tenant_sees_its_own_requests_without_what_they_say(text: Text, keys: Path) -> None:
    app, played = cluster(text, keys)
    for key in (ACME, BEAN):
        async with asking(app, key) as http:
            assert (await http.post("/v1/completions", json=body(WORDS))).status_code == 200
    for key, tenants, says in ((ACME, ["acme"], False), (BEAN, ["bean"], False), (CHIEF, ["bean", "acme"], True)):
        async with asking(app, key) as http:
            requests = (await http.get("/dashboard/api/requests")).json()["requests"]
            assert [one["tenant"] for one in requests] == tenants
            assert all((one["label"] is not None) == says for one in requests)
            for number, tenant in ((1, "acme"), (2, "bean")):
                found = await http.get(f"/dashboard/api/requests/gateway-0/{number}")
                assert found.status_code == (200 if tenant in tenants else 404)
                assert ("river" in found.text) == says
            picture = (await http.get("/dashboard/api/cluster")).json()
            assert picture["total"]["requests"] == 2  # figures are for all, as metrics are
            assert picture["tenant"] == (None if says else key.split("-")[1])
    assert played.salts == []


async def test_a_tenant_sees_its_own_trees_alone(text: Text, keys: Path) -> None:
    app, _ = cluster(text, keys)
    for key in (ACME, BEAN):
        async with asking(app, key) as http:
            await http.post("/v1/completions", json=body(WORDS))
    for key, tenants in ((ACME, {"acme"}), (CHIEF, {"acme", "bean"})):
        async with asking(app, key) as http:
            tree = (await http.get("/dashboard/api/trees/prefill-0")).json()
            assert {one["tenant"] for one in tree["runs"] if "tenant" in one} == tenants
            assert any("river" in (one["text"] or "") for one in tree["runs"]) == (key == CHIEF)
            other = next(one["key"] for one in (await _tree(app))["runs"] if one.get("tenant") == "bean")
            closer = (await http.get("/dashboard/api/trees/prefill-0", params={"path": other})).json()
            assert closer["path"] == ([other] if key == CHIEF else [])


async def _tree(app: FastAPI) -> dict[str, Any]:
    async with asking(app, CHIEF) as http:
        return dict((await http.get("/dashboard/api/trees/prefill-0")).json())


async def test_looking_uses_nothing_of_a_tenants_limits(text: Text, keys: Path) -> None:
    app, _ = cluster(text, keys)
    async with asking(app, ACME) as http:
        for _ in range(5):
            assert (await http.get("/dashboard/api/cluster")).status_code == 200
        assert [(await http.post("/v1/completions", json=body("Hi"))).status_code for _ in range(3)] == [200, 200, 429]


async def test_looking_leaves_no_trace(text: Text) -> None:
    traced().clear()
    app, _ = cluster(text)
    async with asking(app) as http:
        for path in ("/dashboard", "/dashboard/api/cluster", "/v1/models"):
            assert (await http.get(path, headers={"traceparent": SAMPLED})).status_code == 200
    assert [one.attributes["http.route"] for one in spans() if one.attributes] == ["/v1/models"]


@pytest.mark.parametrize(
    ("salt", "told"),
    [
        (b"", ("", False)),
        (b"given\0x", ("", True)),
        (b"tenant\0acme\0", ("acme", False)),
        (b"tenant\0acme\0x\0y", ("acme", True)),
    ],
)
def test_whose_a_tree_is(salt: bytes, told: tuple[str, bool]) -> None:
    assert owner(salt) == {"tenant": told[0], "salted": told[1]}


# --- figures ----------------------------------------------------------------------------------------------------------


async def test_the_picture_of_a_cluster(text: Text) -> None:
    app, played = cluster(text, others=("gateway-1",))
    played.other = _with_one_request(text)
    async with asking(app) as http:
        answer = await http.post("/v1/completions", json=body(WORDS, 5))
        prompt = answer.json()["usage"]["prompt_tokens"]
        picture = (await http.get("/dashboard/api/cluster")).json()
        assert [one["answers"] for one in picture["gateways"]] == [True, True]
        worker = picture["workers"][1]
        assert (worker["name"], worker["role"], worker["state"]) == ("prefill-1", "prefill", "ready")
        assert (worker["blocks"], worker["cached_tokens"], worker["prompt_tokens"]) == (BLOCKS, 800, 2000)
        total = picture["total"]
        assert (total["requests"], total["answered"], total["failed"]) == (2, 1, 1)
        assert (total["prompt_tokens"], total["cached_tokens"], total["output_tokens"]) == (prompt, CACHED, 5)
        assert sum(one["requests"] for one in picture["seconds"]) == 2
        (pair,) = {pair for one in picture["seconds"] for pair in one["handed"]}
        assert pair.endswith(">decode-0")
        ring = (await http.get("/dashboard/api/ring")).json()
        assert set(ring["shares"]) == {"prefill-0", "prefill-1"}
        assert sum(ring["shares"].values()) == pytest.approx(1, abs=1e-3)
        played.other = None
        picture = (await http.get("/dashboard/api/cluster")).json()
        assert [one["answers"] for one in picture["gateways"]] == [True, False]
        assert picture["total"]["requests"] == 1


def _with_one_request(text: Text) -> Own:
    """Another gateway, which could not answer a request."""
    _, played = cluster(text)
    assert played.dispatcher is not None
    played.dispatcher.recent.begin(pack_tokens(range(5)), "", 7).end("failed", "nobody was there")
    return Own("gateway-1", played.dispatcher, text)


async def test_requests_of_all_gateways(text: Text) -> None:
    app, played = cluster(text, others=("gateway-1",))
    played.other = _with_one_request(text)
    async with asking(app) as http:
        await http.post("/v1/completions", json=body(WORDS))
        requests = (await http.get("/dashboard/api/requests")).json()["requests"]
        assert [one["gateway"] for one in requests] == ["gateway-0", "gateway-1"]
        assert [one["ended"] for one in requests] == ["length", "failed"]
        one = (await http.get("/dashboard/api/requests/gateway-1/1")).json()
        assert one["error"] == "nobody was there"
        for path in ("gateway-1/2", "gateway-9/1", "gateway-0/0"):
            assert (await http.get(f"/dashboard/api/requests/{path}")).status_code == 404
        played.other = None
        assert (await http.get("/dashboard/api/requests/gateway-1/1")).status_code == 503
        for path in ("x", "00", ".".join(["00" * 8] * 65)):
            refused = await http.get("/dashboard/api/trees/prefill-0", params={"path": path})
            assert refused.json()["error"]["param"] == "path"
        assert (await http.get("/dashboard/api/trees/prefill-9")).status_code == 404


async def test_the_timeline_of_a_request_that_is_tried_again(text: Text) -> None:
    app, played = cluster(text)
    played.fails = lambda number: number == 1
    played.gate.clear()
    async with asking(app) as http:
        mine = http.post("/v1/completions", json=body(WORDS, 4), headers={"x-request-id": "mine"})
        asked, running = asyncio.create_task(mine), []
        while not running or not running[0]["first_s"]:
            running = (await http.get("/dashboard/api/cluster")).json()["running"]
            await asyncio.sleep(0.01)
        assert (running[0]["stage"], running[0]["name"], running[0]["plans"]) == ("answering", "mine", 2)
        played.gate.set()
        assert (await asked).status_code == 200
        one = (await http.get("/dashboard/api/requests/gateway-0/1")).json()
    kinds = [event["what"] for event in one["events"]]
    assert kinds == ["planned", "sent", "failed", "lost", "planned", "sent", "first token", "transferred"]
    assert [event["s"] for event in one["events"]] == sorted(event["s"] for event in one["events"])
    first, second = (event["plan"] for event in one["events"] if event["what"] == "planned")
    assert first["prefill"] != second["prefill"] == one["prefill"]
    assert second["why"]["home"] in ("prefill-0", "prefill-1")
    assert (one["ended"], one["cached_tokens"], one["output_tokens"]) == ("length", CACHED, 4)
    assert 0 < one["first_s"] <= one["ended_s"]
    assert one["head"].startswith("The river rises")


async def test_a_client_that_leaves_and_a_request_that_fails(text: Text) -> None:
    app, played = cluster(text)
    async with asking(app) as http:
        played.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            await asyncio.wait_for(_left(http), 0.2)
        played.fails = lambda _: True
        assert (await http.post("/v1/completions", json=body(WORDS))).status_code == 500
        requests = (await http.get("/dashboard/api/requests")).json()["requests"]
    assert [one["ended"] for one in requests] == ["failed", "cancelled"]
    assert "stumbled" in requests[0]["error"]


async def _left(http: httpx.AsyncClient) -> None:
    try:
        await http.post("/v1/completions", json=body(WORDS))
    except asyncio.CancelledError:
        raise httpx.ReadTimeout("left") from None


async def test_a_label_is_how_a_chat_ends(text: Text) -> None:
    app, _ = cluster(text)
    async with asking(app) as http:
        messages = [{"role": "system", "content": WORDS}, {"role": "user", "content": "Where does it end?"}]
        await http.post("/v1/chat/completions", json={"model": "model", "messages": messages, "max_tokens": 3})
        (one,) = (await http.get("/dashboard/api/requests")).json()["requests"]
    assert one["label"] == "Where does it end?"


# --- what is kept is bounded ------------------------------------------------------------------------------------------


def test_the_last_requests_are_kept() -> None:
    recent = Recent()
    plan = Plan("p", "d")
    for number in range(KEPT + 10):
        record = recent.begin(pack_tokens(range(5000)), "acme" if number % 2 else "bean", 1)
    for _ in range(MAX_EVENTS + 10):
        record.planned(plan)
    assert len(record.events) == MAX_EVENTS
    assert len(record.head) + len(record.tail) <= 4 * 320
    assert [one.number for one in recent.records(None)] == list(range(KEPT + 10, 10, -1))
    assert {one.tenant for one in recent.records("acme")} == {"acme"}
    assert recent.find(11, None) is not None
    assert recent.find(11, "acme") is None
    assert recent.find(10, None) is None


def test_history_is_of_the_last_minutes_and_its_totals_of_all_time() -> None:
    now = 1000.0
    history = History(lambda: now)
    for second in range(SECONDS + 50):
        now = 1000.0 + second
        history.now().requests += 2
    assert history.total()["requests"] == 2 * (SECONDS + 50)
    assert [one["at"] for one in history.since(0)] == list(range(1050, 1000 + SECONDS + 50))
    assert [one["at"] for one in history.since(int(now) - 1)] == [int(now) - 1, int(now)]
    now += 10 * SECONDS
    assert history.since(0) == []
    now -= 20 * SECONDS  # somebody has set the clock back
    history.now().requests += 1
    assert history.total()["requests"] == 2 * (SECONDS + 50) + 1


def test_times_are_sampled_fairly() -> None:
    second = History(lambda: 1.0).now()
    for number in range(10 * SAMPLES):
        second.prompts += 1
        second.sample(float(number))
    assert len(second.first_s) == SAMPLES
    assert max(second.first_s) > 5 * SAMPLES


def test_seconds_of_gateways_are_added_up() -> None:
    one, other = (History(lambda: 5.0) for _ in range(2))
    for history, handed in ((one, {"a>b": 1, "a>c": 2}), (other, {"a>b": 3})):
        history.now().requests += 2
        history.now().handed.update(handed)
        history.now().sample(0.5)
    (both,) = merged([one.since(0), other.since(0)])
    assert (both["requests"], both["handed"], both["first_s"]) == (4, {"a>b": 4, "a>c": 2}, [0.5, 0.5])
    assert one.now().handed == {"a>b": 1, "a>c": 2}
