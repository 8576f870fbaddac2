"""What holds on every route: what is no request is refused by name before anybody works, and what is one is answered
alike, whole or streamed."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fastapi import FastAPI

from cluster.models import DEFAULT_MODEL, resolve
from router.config import GatewayConfig
from router.gateway.errors import ApiError
from router.gateway.text import Text
from tests.router import test_messages, test_responses
from tests.router.scripted import gateway
from tests.router.serving import MODEL, Play, Played, application, serving
from transfer.messages import Delta, Request, TokenLogprobs

CHAT: list[Any] = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "user": "me", "stop": ["x"]},
    "/v1/completions": {"prompt": "One two three", "cache_salt": "mine"},
    "/v1/responses": {"input": [{"role": "user", "content": "Hi"}], "metadata": {"a": "b"}},
    "/v1/messages": {"messages": CHAT, "max_tokens": 5, "system": [{"type": "text", "text": "Be kind"}]},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/embeddings": {"input": ["Hi"]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}
LENGTH_FIELDS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
INTERNAL = ["request_id", "salt", "tenant", "plan", "decode", "guide", "cached_tokens", "kv_transfer_params"]
EMOJI = "a👩‍👩‍👧‍👦 é数"
SCHEMA = {"type": "object", "properties": {"a": {"type": "foo"}}}


def says(tokens: list[int]) -> Play:
    """A worker that says this, a token at a time with its log-probability, as far as it may."""

    async def play(directory: Played, request: Request) -> None:
        assert directory.dispatcher is not None
        told = tokens[: request.sampling.max_tokens]
        for place, token in enumerate(told):
            logprobs = (TokenLogprobs(token, -0.5),) if request.sampling.logprobs is not None else ()
            finish = "length" if place == len(told) - 1 else None
            delta = Delta(request.request_id, place, (token,), 0, finish, logprobs=logprobs)
            directory.dispatcher.deliver([delta])

    return play


async def breaks(directory: Played, request: Request) -> None:
    """A worker whose gateway ends after its first token."""
    assert directory.dispatcher is not None
    directory.deliver(request, 0, (1000,))
    directory.dispatcher.shut_down()


@asynccontextmanager
async def asking(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


def error_of(path: str, answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error, which has the shape of its API."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    error: dict[str, Any] = body["error"]
    if path.startswith("/v1/messages"):
        assert (set(body), set(error)) == ({"type", "error", "request_id"}, {"type", "message"})
    else:
        assert (set(body), set(error)) == ({"error"}, {"message", "type", "param", "code"})
    return error


def with_changed_strings(value: Any) -> Iterator[Any]:
    """The same value with a lone surrogate in place of one of its strings, names of fields among them."""
    if isinstance(value, str):
        yield "x\ud800"
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from ([*value[:place], changed, *value[place + 1 :]] for changed in with_changed_strings(one))
    elif isinstance(value, dict):
        yield {**value, "x\ud800": 1}
        for name, one in value.items():
            yield from ({**value, name: changed} for changed in with_changed_strings(one))


async def test_these_are_all_routes(text: Text) -> None:
    paths = application(text, Played(says([1])), GatewayConfig()).openapi()["paths"]
    taken = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert taken == {*BODIES, "/v1/files", "/v1/batches"}  # these two have tests of their own


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_no_request_is_refused(text: Text, path: str) -> None:
    played = Played(says([1]))
    async with asking(application(text, played, GatewayConfig())) as http:
        for content in (b"", b"{", b"null", b"[]", b'"x"', b'{"model": NaN}', b"[" * 100_000, b'{"model": "\xff"}'):
            error = error_of(path, await http.post(path, content=content))
            assert error["type"] == "invalid_request_error"
        for body in with_changed_strings({"model": MODEL, **BODIES[path]}):
            error = error_of(path, await http.post(path, content=json.dumps(body)))
            assert error["message"] == "the body contains a lone surrogate, which is not text"
        for field in INTERNAL:
            error = error_of(path, await http.post(path, json={"model": MODEL, **BODIES[path], field: "x"}))
            assert error["message"] == f"{field}: this parameter is not supported"
        error = error_of(path, await http.post(path, json={"model": "other-9", **BODIES[path]}), 404)
        assert "other-9" in error["message"]
    assert not played.requests


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"])
async def test_priority_reaches_the_worker_as_far_as_it_is_allowed(text: Text, path: str) -> None:
    body, played = {"model": MODEL, **BODIES[path]}, Played(says([1000]))
    async with asking(application(text, played, GatewayConfig())) as http:
        for priority in (-100, 0, None):
            assert (await http.post(path, json={**body, "priority": priority})).status_code == 200
        for priority in (-101, 1):
            assert error_of(path, await http.post(path, json={**body, "priority": priority}))["param"] == "priority"
    assert [one.priority for one in played.requests] == [-100, 0, 0]


@pytest.mark.parametrize("path", LENGTH_FIELDS)
async def test_prompt_and_answer_fit_the_context_exactly_or_the_error_names_both(text: Text, path: str) -> None:
    body, field = {"model": MODEL, **BODIES[path]}, LENGTH_FIELDS[path]
    played = Played(says(list(range(1000, 1100))))
    async with asking(application(text, played, GatewayConfig())) as http:
        assert (await http.post(path, json={**body, field: 1})).status_code == 200
        prompt = len(played.requests[0].prompt) // 4
    played.requests.clear()
    async with asking(application(text, played, GatewayConfig(), context=prompt + 5)) as http:
        assert (await http.post(path, json={**body, field: 5})).status_code == 200
        assert played.requests.pop().sampling.max_tokens == 5
        for length in (6, 10**12):
            message = error_of(path, await http.post(path, json={**body, field: length}))["message"]
            assert message.startswith(f"{field}: {prompt} prompt tokens + {length} output tokens")
            assert f"{prompt + 5}" in message
    for context in (prompt, prompt - 1):
        async with asking(application(text, played, GatewayConfig(), context=context)) as http:
            message = error_of(path, await http.post(path, json={**body, field: 1}))["message"]
            assert f"{prompt} tokens" in message
            assert f"{context} tokens" in message
    assert not played.requests


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("echo", [None, False, True])
async def test_lengths_of_completions(text: Text, echo: bool | None, logprobs: int | None) -> None:
    played = Played(says(list(range(1000, 1100))))
    body = {"model": MODEL, "prompt": "One two three", "echo": echo, "logprobs": logprobs}
    async with asking(application(text, played, GatewayConfig())) as http:
        for length in (-1, "5", 1e12, 1.5, 10**12, True, *([] if echo else [0])):
            answer = await http.post("/v1/completions", json={**body, "max_tokens": length})
            assert error_of("", answer)["param"] == "max_tokens"
        assert not played.requests
        for length, tokens in ((None, 16), (1, 1), *([(0, 0)] if echo else [])):
            answer = await http.post("/v1/completions", json={**body, "max_tokens": length})
            (choice,) = answer.json()["choices"]
            assert answer.json()["usage"]["completion_tokens"] == tokens
            assert choice["text"].startswith("One two three" if echo else "")
            if logprobs is not None:
                shown = 3 if echo else 0  # of the prompt, the first one's is unknown; this worker tells no others
                assert len(choice["logprobs"]["tokens"]) == tokens + min(shown, 1)


async def test_choices_have_a_bound_in_chats_too(text: Text) -> None:
    played = Played(says([1]))
    async with asking(application(text, played, GatewayConfig())) as http:
        for count in (0, 129, 10**9, 1.5, True):
            answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT, "n": count})
            assert error_of("", answer)["param"] == "n"
    assert not played.requests


@pytest.mark.parametrize("stop", ["", [], None])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_stop_strings_that_mean_none(text: Text, path: str, stop: Any) -> None:
    async with asking(application(text, Played(says(text.encode("One two three"))), GatewayConfig())) as http:
        answer = await http.post(path, json={"model": MODEL, **BODIES[path], "max_tokens": 20, "stop": stop})
        (choice,) = answer.json()["choices"]
        assert choice.get("text", choice.get("message", {}).get("content")) == "One two three"


async def test_characters_that_an_answer_s_end_cuts(text: Text) -> None:
    """Whole and streamed they are the same valid text; bytes of log-probabilities are the text's, one entry a token."""
    tokens = text.encode(EMOJI)
    assert len(tokens) > len(EMOJI)
    async with asking(application(text, Played(says(tokens)), GatewayConfig())) as http:
        for length in range(1, len(tokens) + 1):
            body = {"model": MODEL, "messages": CHAT, "max_tokens": length, "logprobs": True}
            (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
            content, entries = choice["message"]["content"], choice["logprobs"]["content"]
            streamed = (await http.post("/v1/chat/completions", json={**body, "stream": True})).text
            chunks = [json.loads(line[6:])["choices"][0] for line in streamed.split("\n") if line.startswith("data: {")]
            pieces = [chunk["delta"].get("content") or "" for chunk in chunks]
            assert "".join(pieces) == content == text.decode(tokens[:length])
            assert not any("\ufffd" in one for one in pieces[:-1])
            assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
            assert [one for chunk in chunks if chunk["logprobs"] for one in chunk["logprobs"]["content"]] == entries
            assert [one["top_logprobs"] for one in entries] == [[]] * length
            assert bytes(byte for one in entries for byte in one["bytes"]).decode(errors="replace") == content


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"])
async def test_what_a_template_says_against_messages_is_the_client_s_to_know(path: str) -> None:
    text = Text(resolve(DEFAULT_MODEL), "{{ raise_exception('roles must alternate') }}")
    body = {"messages": CHAT} if path == "/tokenize" else BODIES[path]
    async with asking(application(text, Played(says([1])), GatewayConfig())) as http:
        message = error_of(path, await http.post(path, json={"model": MODEL, **body}))["message"]
    assert "the chat template refuses them: roles must alternate" in message


TOOL = {"name": "f", "parameters": SCHEMA}
SCHEMAS: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        "response_format",
    ),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}, "tools"),
    ("/v1/completions", {"guided_json": SCHEMA}, "guided_json"),
    ("/v1/completions", {"guided_json": {"foo": 2**64}}, "guided_json"),
    ("/v1/completions", {"guided_grammar": "root ::= foo"}, "guided_grammar"),
    (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        "text.format",
    ),
    ("/v1/responses", {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"}, "tools"),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}, "tools"),
]


async def test_schemas_that_are_none_are_named(text: Text) -> None:
    played = Played(says([1]))
    async with asking(application(text, played, GatewayConfig())) as http:
        for path, fields, param in SCHEMAS:
            message = error_of(path, await http.post(path, json={"model": MODEL, **BODIES[path], **fields}))["message"]
            assert message.startswith(f"{param}: ")
            assert "foo" in message or f"{2**64}" in message
    assert not played.requests


# The official clients


@pytest.mark.parametrize(
    ("status", "openai_type", "anthropic_type"),
    [
        (400, openai.BadRequestError, anthropic.BadRequestError),
        (401, openai.AuthenticationError, anthropic.AuthenticationError),
        (403, openai.PermissionDeniedError, anthropic.PermissionDeniedError),
        (404, openai.NotFoundError, anthropic.NotFoundError),
        (413, openai.APIStatusError, anthropic.APIStatusError),
        (429, openai.RateLimitError, anthropic.RateLimitError),
        (500, openai.InternalServerError, anthropic.InternalServerError),
        (503, openai.InternalServerError, anthropic.InternalServerError),
        (504, openai.InternalServerError, anthropic.InternalServerError),
    ],
)
async def test_an_error_before_the_first_token_has_its_type(status: int, openai_type: Any, anthropic_type: Any) -> None:
    async with gateway([ApiError(status, "so it is", "field", "code", 7)]) as served:
        async with test_responses.client_of(served.url) as client:
            for stream in (False, True):
                with pytest.raises(openai_type, match="so it is") as raised:
                    await client.chat.completions.create(model=MODEL, messages=CHAT, stream=stream)
                error = raised.value
                assert (error.status_code, error.param, error.code) == (status, "field", "code")
                assert error.response.headers["retry-after"] == "7"
                with pytest.raises(openai_type, match="so it is"):
                    await client.responses.create(model=MODEL, input="Hi", stream=stream)
        async with test_messages.client_of(served.url) as claude:
            with pytest.raises(anthropic_type, match="so it is"):
                await claude.messages.create(model=MODEL, max_tokens=5, messages=CHAT)


@pytest.mark.parametrize("kind", ["helper", "chat", "completion"])
async def test_a_failure_in_mid_stream_raises_in_the_client(text: Text, kind: str) -> None:
    async def read(client: openai.AsyncOpenAI) -> None:
        if kind == "helper":
            async with client.chat.completions.stream(model=MODEL, messages=CHAT) as stream:
                await stream.until_done()
        elif kind == "chat":
            async for _ in await client.chat.completions.create(model=MODEL, messages=CHAT, stream=True):
                pass
        else:
            async for _ in await client.completions.create(model=MODEL, prompt="Hi", stream=True):
                pass

    async with broken(text) as client:
        with pytest.raises(openai.APIError, match="the gateway is shutting down"):
            await read(client)


async def test_a_response_that_fails_in_mid_stream_is_no_final_one(text: Text) -> None:
    """The client of OpenAI hands the error over as an event."""
    async with broken(text) as client, client.responses.stream(model=MODEL, input="Hi") as stream:
        kinds = [event.type async for event in stream]
        assert kinds[-2:] == ["error", "response.failed"]
        with pytest.raises(RuntimeError, match="completed"):
            await stream.get_final_response()


@asynccontextmanager
async def broken(text: Text) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a gateway that breaks off after the first token."""
    config = GatewayConfig()
    async with (
        serving(application(text, Played(breaks), config), config) as (port, _),
        test_responses.client_of(f"http://127.0.0.1:{port}") as client,
    ):
        yield client
