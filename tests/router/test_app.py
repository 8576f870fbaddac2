"""What every answer of the gateway has: ids, error objects, CORS headers, and a description."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cluster.logs import JsonFormatter
from router.config import GatewayConfig
from router.gateway.errors import ApiError, deadline
from router.gateway.text import Text
from tests.router.serving import Played, application, completion
from tests.router.test_http import three
from transfer.messages import Request

ORIGIN = "https://app.example"


@pytest.fixture
async def app(text: Text) -> FastAPI:
    made = application(text, Played(three), GatewayConfig(cors_origins=[ORIGIN]))

    @made.get("/bug")
    async def bug() -> None:
        logging.getLogger("router.test").warning("before it")
        raise ZeroDivisionError("a secret")

    @made.get("/number/{number}")
    async def number(number: int) -> int:
        return number

    return made


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


REQUESTS: list[tuple[str, str, bytes, int, str | None]] = [
    ("GET", "/health", b"", 200, None),
    ("GET", "/nowhere", b"", 404, "invalid_request_error"),
    ("GET", "/v1/completions", b"", 405, "invalid_request_error"),
    ("DELETE", "/health", b"", 405, "invalid_request_error"),
    ("GET", "/v1/models/other", b"", 404, "invalid_request_error"),
    ("GET", "/number/x", b"", 400, "invalid_request_error"),
    ("POST", "/v1/completions", b"{", 400, "invalid_request_error"),
    ("POST", "/v1/completions", completion(max_tokens=3), 200, None),
    ("POST", "/v1/completions", completion(max_tokens=3, stream=True), 200, None),
    ("GET", "/bug", b"", 500, "server_error"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "kind"), REQUESTS)
async def test_every_answer_has_an_id_and_cors_headers_and_an_error_is_an_object(
    http: httpx.AsyncClient, method: str, path: str, body: bytes, status: int, kind: str | None
) -> None:
    answer = await http.request(method, path, content=body, headers={"Origin": ORIGIN, "X-Request-Id": "mine 1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine 1")
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    if kind is not None:
        error = answer.json()["error"]
        assert (set(error), error["type"]) == ({"message", "type", "param", "code"}, kind)
        assert "secret" not in error["message"]
    if status == 405:
        assert answer.headers["allow"]


async def test_ids_are_unlike_where_the_client_names_none_or_none_that_can_be_used(http: httpx.AsyncClient) -> None:
    given: list[bytes | None] = [None, None, b"", b"x" * 129, "ü".encode(), b"a\x01b", b" "]
    seen = set()
    for name in given:
        headers = [] if name is None else [(b"x-request-id", name)]
        seen.add((await http.get("/health", headers=headers)).headers["x-request-id"])
    assert len(seen) == len(given)
    assert all(name.startswith("req_") for name in seen)
    assert (await http.get("/health", headers={"x-request-id": "x" * 128})).headers["x-request-id"] == "x" * 128


async def test_the_log_names_the_request(http: httpx.AsyncClient) -> None:
    lines: list[dict[str, Any]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonFormatter().format(record)))

    handler = Collect()
    logging.getLogger().addHandler(handler)
    try:
        await http.get("/bug", headers={"x-request-id": "mine"})
        logging.getLogger("router.test").warning("of no request")
    finally:
        logging.getLogger().removeHandler(handler)
    assert [(one["message"], one.get("request")) for one in lines] == [
        ("before it", "mine"),
        ("/bug failed", "mine"),
        ("of no request", None),
    ]
    assert "ZeroDivisionError" in lines[1]["error"]


async def test_the_log_of_a_request_s_own_tasks_names_it_too(text: Text) -> None:
    """The dispatcher works in tasks of its own; its ids are not the client's."""
    names: list[str] = []

    async def play(played: Played, request: Request) -> None:
        record = logging.LogRecord("router", logging.WARNING, "", 0, "x", (), None)
        names.append(json.loads(JsonFormatter().format(record))["request"])
        await three(played, request)
        assert request.request_id != "mine"

    transport = httpx.ASGITransport(application(text, Played(play), GatewayConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        await http.post("/v1/completions", content=completion(max_tokens=3), headers={"x-request-id": "mine"})
    assert names == ["mine"]


async def test_a_browser_may_ask_first(http: httpx.AsyncClient) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    answer = await http.options("/v1/chat/completions", headers={"Origin": ORIGIN, **asked})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert answer.headers["x-request-id"]
    strange = await http.options("/v1/chat/completions", headers={"Origin": "https://other.example", **asked})
    assert "access-control-allow-origin" not in strange.headers


async def test_without_origins_there_is_no_cors(text: Text) -> None:
    transport = httpx.ASGITransport(application(text, Played(three), GatewayConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        answer = await http.get("/health", headers={"Origin": ORIGIN})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", ["https://app.example/", "app.example", "https://app.example/page", ""])
def test_origins_that_no_browser_sends_are_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        GatewayConfig(cors_origins=[origin])
    assert GatewayConfig(cors_origins=["*", "http://localhost:3000"]).cors_origins


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        *((ApiError(status, "x"), "invalid_request_error") for status in (400, 401, 403, 404, 405, 413, 422, 431)),
        *((ApiError(status, "x"), "timeout_error") for status in (408, 504)),
        *((ApiError(status, "x"), "server_error") for status in (500, 502, 503)),
        (ApiError(429, "x"), "rate_limit_error"),
        (deadline("late"), "timeout_error"),
    ],
)
def test_types_of_errors(error: ApiError, kind: str) -> None:
    assert error.body()["error"]["type"] == kind


async def test_every_route_is_described(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    text, schemas = json.dumps(document), document["components"]["schemas"]
    assert "$defs" not in text
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= set(schemas)
    assert {"ChatRequest", "ChatRequest.Message", "CompletionRequest", "ErrorAnswer"} <= references
    for path, method in ((path, method) for path, methods in document["paths"].items() for method in methods):
        operation = document["paths"][path][method]
        if path.startswith("/v1"):
            error = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
            shape = "MessagesError" if path.startswith("/v1/messages") else "ErrorAnswer"
            assert error == {"$ref": f"#/components/schemas/{shape}"}
        if path == "/v1/files" and method == "post":
            assert set(operation["requestBody"]["content"]) == {"multipart/form-data"}
        elif method == "post" and not path.endswith("/cancel"):
            body = operation["requestBody"]["content"]["application/json"]["schema"]
            fields = schemas[body["$ref"].rsplit("/", 1)[1]]["properties"]
            assert ("input_file_id" if path == "/v1/batches" else "model") in fields
            streamed = {"text/event-stream"} if "stream" in fields else set()
            answers = operation["responses"]["200"]["content"]
            assert set(answers) == {"application/json"} | streamed
            assert all(set(answers[kind]["itemSchema"]["properties"]) == {"event", "data"} for kind in streamed)
    assert set(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    fields = schemas["ChatRequest"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert fields["store"]["anyOf"][0] == {"type": "boolean", "const": False}
    assert (await http.get("/docs")).status_code == 200
