"""Anthropic's Messages API: conversions, objects, events and errors as the official client has them, and the client."""

import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from router.gateway.errors import ApiError, failed, overloaded, unavailable
from router.gateway.messages import MessagesAnswer, error_body, to_chat
from router.gateway.schemas.common import parse
from router.gateway.schemas.messages import CountTokensRequest, MessagesError, MessagesRequest
from tests.router.scripted import (
    CACHED_TOKENS,
    JOBS,
    MODEL,
    PROMPT_TOKENS,
    Step,
    events_of,
    gateway,
    piece,
    played,
    text_pieces,
    tool_pieces,
)

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
CHAT: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"name": "weather", "description": "The weather", "input_schema": SCHEMA}
CACHE = {"cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}


def asked(**fields: Any) -> MessagesRequest:
    body = {"model": MODEL, "max_tokens": 10, "messages": CHAT, **fields}
    return parse(MessagesRequest, json.dumps(body).encode())


def chat_of(**fields: Any) -> dict[str, Any]:
    return to_chat(asked(**fields)).model_dump(exclude_none=True)


async def streamed(steps: list[Step]) -> list[Any]:
    """The events without pings, all of them valid in the official client's types."""
    data = [data async for data in MessagesAnswer(asked(), JOBS).stream(played(steps))]  # type: ignore[arg-type]
    events = events_of(b"".join(data))
    assert [name for name, _ in events].index("ping") == 1
    parsed = [EVENTS.validate_json(text) for name, text in events if name != "ping"]
    assert [name for name, _ in events if name != "ping"] == [event.type for event in parsed]
    return parsed


# Input


def test_blocks_become_messages() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **CACHE}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "text", "text": "Wait"},
                USE,
                {**USE, "id": "t2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {**RESULT, "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}]},
                {**RESULT, "tool_use_id": "t2", "content": "no such city", "is_error": True},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    assert chat_of(system=[{"type": "text", "text": "Be kind", **CACHE}], messages=messages)["messages"] == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "reasoning_content": "Hm",
            "content": "Wait",
            "tool_calls": [call, {**call, "id": "t2"}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no such city"},
        {"role": "user", "content": "Well?"},
    ]


def test_parameters_become_those_of_a_chat() -> None:
    chat = chat_of(
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        tools=[{**WEATHER, "type": "custom", **CACHE}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        metadata={"user_id": "me"},
    )
    assert {name: chat[name] for name in chat if name not in ("model", "messages")} == {
        "max_tokens": 10,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "tools": [
            {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": SCHEMA}}
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "user": "me",
    }


@pytest.mark.parametrize(("choice", "meant"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_tool_choices(choice: str, meant: str) -> None:
    assert chat_of(tools=[WEATHER], tool_choice={"type": choice})["tool_choice"] == meant


def said(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, *CHAT]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
        (said({"type": "image", "source": {}}), "messages.0.content.0"),
        (said({"type": "text"}), "messages.0.content.0.text"),
        (said({"type": "text", "text": "a", "b": 1}), "messages.0.content.0.b"),
        (
            said({"type": "text", "text": "a", "cache_control": {"type": "x"}}),
            "messages.0.content.0.cache_control.type",
        ),
        (said(USE), "messages.0.content.0"),
        (said(RESULT, role="assistant"), "messages.0.content.0"),
        (said(RESULT), "messages.0.content.0.tool_use_id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"container": "x"}, "container"),
        ({"metadata": {"name": "x"}}, "metadata.name"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_of(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(param)


def test_counting_takes_no_sampling_parameters() -> None:
    with pytest.raises(ApiError, match="temperature"):
        parse(CountTokensRequest, json.dumps({"model": MODEL, "messages": CHAT, "temperature": 1}).encode())


# Output


async def test_events_of_a_text() -> None:
    events = await streamed(text_pieces("Hel", "lo"))
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert (events[0].message.content, events[0].message.stop_reason) == ([], None)
    assert (events[0].message.usage.input_tokens, events[0].message.usage.cache_read_input_tokens) == (
        PROMPT_TOKENS - CACHED_TOKENS,
        CACHED_TOKENS,
    )
    assert "".join(event.delta.text for event in events[2:4]) == "Hello"
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("end_turn", 2)


async def test_events_of_thinking_text_and_tools() -> None:
    events = await streamed(tool_pieces())
    blocks = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use", "tool_use"]
    places = [event.index for event in events if event.type.startswith("content_block")]
    assert places == sorted(places)
    parts = [
        event.delta.partial_json for event in events if getattr(event, "index", None) == 2 and hasattr(event, "delta")
    ]
    assert parts == ['{"city": ', '"Paris"}']
    assert events[-2].delta.stop_reason == "tool_use"
    assert events[-2].usage.output_tokens_details.thinking_tokens == 2


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (piece(finish="stop"), "end_turn", None),
        (piece(finish="stop", stop="END"), "stop_sequence", "END"),
        (piece(finish="length"), "max_tokens", None),
        (piece(finish="tool_calls"), "tool_use", None),
    ],
)
async def test_why_an_answer_ended(last: Any, reason: str, sequence: str | None) -> None:
    whole = Message.model_validate(await MessagesAnswer(asked(), JOBS).whole(played([last])))  # type: ignore[arg-type]
    assert (whole.stop_reason, whole.stop_sequence) == (reason, sequence)
    events = await streamed([last])
    assert (events[0].message.stop_reason, events[0].message.stop_sequence) == (None, None)
    delta = events[-2].delta
    assert (delta.stop_reason, delta.stop_sequence) == (reason, sequence)


async def test_a_call_that_broke_off_has_no_input() -> None:
    steps: list[Step] = [*tool_pieces()[:6], piece(finish="length")]
    whole = Message.model_validate(await MessagesAnswer(asked(), JOBS).whole(played(steps)))  # type: ignore[arg-type]
    assert (whole.stop_reason, whole.content[-1].input) == ("max_tokens", {})  # type: ignore[union-attr]


def test_errors_have_the_types_of_their_statuses() -> None:
    errors = [ApiError(status, "m") for status in (400, 401, 403, 404, 408, 413, 418, 504)]
    errors += [overloaded("m"), unavailable("m"), failed("m")]
    assert [error_body(error)["error"]["type"] for error in errors] == [
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "timeout_error",
        "request_too_large",
        "invalid_request_error",
        "timeout_error",
        "rate_limit_error",
        "overloaded_error",
        "api_error",
    ]


# The official client


def client_of(url: str) -> AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)  # loading certificates takes longer than a test
    return AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=20, http_client=http)


async def test_create_and_answer_tools() -> None:
    async with gateway(tool_pieces(), text_pieces("Sunny")) as served, client_of(served.url) as client:
        made = await client.messages.create(model=MODEL, max_tokens=10, messages=CHAT, tools=[WEATHER])
        assert [block.type for block in made.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert made.content[2].input == {"city": "Paris"}  # type: ignore[union-attr]
        assert made.stop_reason == "tool_use"
        results: Any = [{"type": "tool_result", "tool_use_id": block.id, "content": "x"} for block in made.content[2:]]  # type: ignore[union-attr]
        turns = [*CHAT, made.to_param(), {"role": "user", "content": results}]
        again = await client.messages.create(model=MODEL, max_tokens=10, messages=turns)
        assert again.content[0].text == "Sunny"  # type: ignore[union-attr]
        assert [message.role for message in served.service.asked[1].messages] == ["user", "assistant", "tool", "tool"]
        assert served.service.asked[1].messages[1].reasoning_content == "I need both."


@pytest.mark.parametrize("steps", [text_pieces("Hel", "lo"), tool_pieces(), text_pieces("", finish="length")])
async def test_whole_and_streamed_messages_agree(steps: list[Step]) -> None:
    async with gateway(steps) as served, client_of(served.url) as client:
        whole = await client.messages.create(model=MODEL, max_tokens=10, messages=CHAT)
        async with client.messages.stream(model=MODEL, max_tokens=10, messages=CHAT) as stream:
            final = await stream.get_final_message()
        ours, theirs = whole.to_dict(exclude_none=True), final.to_dict(exclude_none=True)
        ours.pop("id"), theirs.pop("id")
        assert ours == theirs


async def test_tokens_are_counted() -> None:
    async with gateway(text_pieces("Hello")) as served, client_of(served.url) as client:
        count = await client.messages.count_tokens(model=MODEL, messages=CHAT, system="Be kind", tools=[WEATHER])
        assert count.input_tokens == PROMPT_TOKENS
        assert served.service.closed == 0


async def test_errors_have_anthropics_shape() -> None:
    async with gateway([overloaded("full")], [piece("Hel"), unavailable("gone")]) as served:
        async with client_of(served.url) as client:
            with pytest.raises(anthropic.RateLimitError) as refused:
                await client.messages.create(model=MODEL, max_tokens=10, messages=CHAT, stream=True)
            assert refused.value.type == "rate_limit_error"
            assert refused.value.response.headers["retry-after"] == "1"
            with pytest.raises(anthropic.APIStatusError) as broken:
                async with client.messages.stream(model=MODEL, max_tokens=10, messages=CHAT) as stream:
                    await stream.until_done()
            assert broken.value.type == "overloaded_error"
            sent = broken.value.response.headers["x-request-id"]
            assert broken.value.body["request_id"] == sent  # type: ignore[index]
            with pytest.raises(anthropic.NotFoundError, match="other"):
                await client.messages.count_tokens(model="other", messages=CHAT)
            with pytest.raises(anthropic.BadRequestError, match="max_tokens: more than"):
                await client.messages.create(model=MODEL, max_tokens=2000, messages=CHAT)
        async with httpx.AsyncClient(base_url=served.url, verify=False) as http:
            answer = await http.post("/v1/messages", content=b"{")
            assert answer.status_code == 400
            MessagesError.model_validate(answer.json())
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert "not valid JSON" in answer.json()["error"]["message"]


async def test_nothing_is_taken_while_no_worker_is_ready() -> None:
    async with gateway(text_pieces("Hello"), ready=lambda: False) as served, client_of(served.url) as client:
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(model=MODEL, max_tokens=10, messages=CHAT)
        assert (refused.value.status_code, refused.value.type) == (503, "overloaded_error")
