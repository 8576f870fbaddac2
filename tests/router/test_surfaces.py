"""The Responses and Messages APIs over the real service: templates, tokens, stop strings and tool calls."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.config import GatewayConfig
from router.gateway.text import Text
from tests.router import test_messages, test_responses
from tests.router.serving import MODEL, Play, Played, application, serving
from transfer.messages import Request

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CHAT: list[Any] = [{"role": "user", "content": "Weather?"}]


def says(text: Text, words: str) -> Play:
    """A worker that says this, a token at a time."""
    tokens = text.encode(words)

    async def play(directory: Played, request: Request) -> None:
        for place, token in enumerate(tokens):
            last = place == len(tokens) - 1
            directory.deliver(request, place, (token,), "stop" if last else None)

    return play


@asynccontextmanager
async def serving_words(text: Text, words: str) -> AsyncIterator[str]:
    config = GatewayConfig()
    async with serving(application(text, Played(says(text, words)), config), config) as (port, _):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_ends_at_its_stop_sequence(text: Text, stream: bool) -> None:
    async with serving_words(text, "Hello there END and more") as url, test_messages.client_of(url) as client:
        wanted: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "messages": CHAT, "stop_sequences": ["X", "END"]}
        if stream:
            async with client.messages.stream(**wanted) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**wanted)
        assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (  # type: ignore[union-attr]
            "Hello there ",
            "stop_sequence",
            "END",
        )
        count = await client.messages.count_tokens(model=MODEL, messages=CHAT)
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == count.input_tokens


async def test_messages_with_tools(text: Text) -> None:
    async with serving_words(text, CALL) as url, test_messages.client_of(url) as client:
        wanted: dict[str, Any] = {"model": MODEL, "max_tokens": 99, "tools": [test_messages.WEATHER]}
        message = await client.messages.create(messages=CHAT, **wanted)
        (call,) = message.content
        assert (message.stop_reason, call.name, call.input) == (  # type: ignore[union-attr]
            "tool_use",
            "weather",
            {"city": "Paris"},
        )
        results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]  # type: ignore[union-attr]
        turns = [*CHAT, message.to_param(), {"role": "user", "content": results}]
        async with client.messages.stream(messages=turns, **wanted) as events:
            again = await events.get_final_message()
        assert again.content[0].input == call.input  # type: ignore[union-attr]
        assert again.usage.input_tokens > message.usage.input_tokens


async def test_responses_with_tools(text: Text) -> None:
    async with serving_words(text, CALL) as url, test_responses.client_of(url) as client:
        wanted: dict[str, Any] = {"model": MODEL, "tools": [test_responses.WEATHER]}
        first = await client.responses.create(input="Weather?", **wanted)
        (call,) = first.output
        assert (call.type, call.name, call.arguments) == (  # type: ignore[union-attr]
            "function_call",
            "weather",
            '{"city": "Paris"}',
        )
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]  # type: ignore[union-attr]
        async with client.responses.stream(input=output, previous_response_id=first.id, **wanted) as events:
            second = await events.get_final_response()
        assert second.output[0].arguments == call.arguments  # type: ignore[union-attr]
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens


async def test_a_response_of_text(text: Text) -> None:
    async with serving_words(text, "Hello there") as url, test_responses.client_of(url) as client:
        made = await client.responses.create(model=MODEL, input=CHAT, instructions="Be kind")
        assert (made.status, made.output_text) == ("completed", "Hello there")
        assert made.usage is not None
        assert made.usage.output_tokens == len(text.encode("Hello there"))
