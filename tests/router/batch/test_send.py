"""What is sent again, where, and until when: over HTTP, with gateways that answer as told."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from router.batch import send
from router.batch.errors import BatchError
from router.batch.lines import COMPLETIONS, Item
from router.batch.send import Answer, Gateways

ITEM = Item("a", COMPLETIONS, {"model": "m", "prompt": "x"})
GOOD = (200, {"text": "good"})


def failed(status: int, **headers: str) -> tuple[int, Any, dict[str, str]]:
    return status, {"error": {"message": f"no {status}", "type": "some_error", "code": None}}, headers


class Gateway(ThreadingHTTPServer):
    """Answers with what it is given, the last of it again and again; `asked` has the headers of requests."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append(self.headers)
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        status, body, *headers = answer
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), "x-request-id": "r", **(headers or [{}])[0]}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def gateway(*answers: Any) -> Iterator[Gateway]:
    made = Gateway(*answers)
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "MIN_WAIT_S", 0.01)


async def answer_of(*urls: str, timeout_s: float = 5.0, key: str | None = None) -> Answer:
    async with Gateways(lambda: list(urls), timeout_s, key) as gateways:
        return await gateways.send(ITEM)


@pytest.mark.parametrize(
    ("first", "attempts"),
    [([], 1), ([failed(429)], 2), ([failed(503), failed(502), failed(408)], 4), ([failed(500)] * 2, 3), ([None], 2)],
)
async def test_what_was_not_accepted_is_sent_again(first: list[Any], attempts: int) -> None:
    with gateway(*first, GOOD) as one:
        answer = await answer_of(one.url)
    assert answer == Answer(200, "r", {"text": "good"}, None)
    assert len(one.asked) == attempts


@pytest.mark.parametrize(("status", "attempts"), [(400, 1), (404, 1), (413, 1), (504, 1), (500, 3)])
async def test_what_was_refused_or_failed_is_the_answer(status: int, attempts: int) -> None:
    with gateway(failed(status)) as one:
        answer = await answer_of(one.url)
    error = {"code": "some_error", "message": f"no {status}"}
    assert (answer.status, answer.error, len(one.asked)) == (status, error, attempts)
    assert answer.body["error"]["message"] == f"no {status}"


@pytest.mark.parametrize("body", [b"<html>oops</html>", b"[1]", b""])
async def test_an_answer_that_is_none_is_an_error(body: bytes) -> None:
    with gateway((200, body)) as one:
        answer = await answer_of(one.url)
    assert answer.body is None
    assert answer.error is not None
    assert answer.error["code"] == "invalid_answer"
    assert body.decode() in answer.error["message"]


async def test_retry_after_is_heeded_and_what_it_leaves_no_time_for_is_the_answer() -> None:
    with gateway(failed(429, retry_after="1"), GOOD) as one:
        begun = time.monotonic()
        assert (await answer_of(one.url)).status == 200
        assert time.monotonic() - begun >= 1
    with gateway(failed(429, retry_after="9"), GOOD) as one:
        begun = time.monotonic()
        assert (await answer_of(one.url)).status == 429
        assert time.monotonic() - begun < 1


async def test_a_gateway_that_cannot_be_reached_is_left_alone() -> None:
    with gateway(GOOD) as one, gateway(None) as other:
        async with Gateways(lambda: [other.url, one.url], 5.0) as gateways:
            for _ in range(6):
                assert (await gateways.send(ITEM)).status == 200
        assert (len(one.asked), len(other.asked)) == (6, 1)
    answer = await answer_of("http://127.0.0.1:9", timeout_s=0.1)
    assert answer.status is None
    assert answer.error is not None
    assert answer.error["code"] == "unreachable"


async def test_gateways_that_have_moved_are_found() -> None:
    with gateway(GOOD) as one:
        urls = ["http://127.0.0.1:9"]
        async with Gateways(lambda: list(urls), 5.0) as gateways:
            urls[:] = [one.url]
            assert (await gateways.send(ITEM)).status == 200


async def test_a_refused_key_ends_all() -> None:
    with gateway(GOOD) as one:
        await answer_of(one.url, key="a-secret")
        assert one.asked[0]["authorization"] == "Bearer a-secret"
    refused = r"the API key is refused \(401\): no 401"
    with gateway(failed(401)) as one, pytest.raises(BatchError, match=refused) as caught:
        await answer_of(one.url, key="a-secret")
    assert "a-secret" not in str(caught.value)
