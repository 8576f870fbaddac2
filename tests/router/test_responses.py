"""OpenAI's Responses API: conversions, objects and events as the official client's types have them, and the client."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from router.gateway.errors import ApiError, failed, overloaded
from router.gateway.parsers import CallDelta
from router.gateway.response_items import listed, own_items, to_chat
from router.gateway.responses import ResponsesAnswer
from router.gateway.schemas.common import parse
from router.gateway.schemas.responses import ResponsesRequest
from tests.router.scripted import (
    JOBS,
    MODEL,
    PROMPT_TOKENS,
    TEXT,
    Step,
    events_of,
    gateway,
    piece,
    played,
    text_pieces,
    tool_pieces,
)
from transfer.messages import TokenLogprobs

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


def asked(**fields: Any) -> ResponsesRequest:
    return parse(ResponsesRequest, json.dumps({"model": MODEL, "input": "Hi", **fields}).encode())


def chat_of(**fields: Any) -> dict[str, Any]:
    wanted = asked(**fields)
    return to_chat(wanted, own_items(wanted)).model_dump(exclude_none=True, by_alias=True)


def answer(**fields: Any) -> tuple[ResponsesAnswer, list[ResponsesAnswer]]:
    kept: list[ResponsesAnswer] = []
    return ResponsesAnswer(asked(**fields), JOBS, TEXT, b"[]", kept.append), kept


async def streamed(steps: list[Step], **fields: Any) -> list[Any]:
    """The events, all of them valid in the official client's types and numbered from 0 on."""
    data = [data async for data in answer(**fields)[0].stream(played(steps))]  # type: ignore[arg-type]
    events = events_of(b"".join(data))
    parsed = [EVENTS.validate_json(text) for _, text in events]
    assert [name for name, _ in events] == [event.type for event in parsed]
    assert [event.sequence_number for event in parsed] == list(range(len(parsed)))
    return parsed


# Input


def test_a_string_is_a_message_of_the_user() -> None:
    assert chat_of(instructions="Be kind")["messages"] == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Hi"},
    ]


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Wait", "annotations": [], "logprobs": []}],
        },
        CALL,
        {**CALL, "call_id": "c2"},
        OUTPUT,
        {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "assistant", "content": "Both"},
        {"role": "assistant", "content": "indeed"},
        {"role": "user", "content": "Thanks"},
    ]
    assert chat_of(input=items)["messages"] == [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "reasoning_content": "Hm",
            "content": "Wait",
            "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
        {"role": "assistant", "content": "Both"},
        {"role": "assistant", "content": "indeed"},
        {"role": "user", "content": "Thanks"},
    ]


def test_parameters_become_those_of_a_chat() -> None:
    schema = {"type": "object"}
    chat = chat_of(
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        user="me",
    )
    assert {name: chat[name] for name in chat if name not in ("model", "messages")} == {
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "tools": [{"type": "function", "function": {k: WEATHER[k] for k in ("name", "description", "parameters")}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        "user": "me",
    }
    assert chat_of(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": "a", "name": "b"}]}, "input.0.name"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
        ({"input": [{**CALL, "arguments": {}}]}, "input.0.arguments"),
        ({"input": [OUTPUT]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["reasoning.encrypted_content"]}, "include.0"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"truncation": "auto"}, "truncation"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"temperature": 2.5}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"conversation": "x"}, "conversation"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_of(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(param)


@pytest.mark.parametrize("fields", [{"store": False}, {"stream": True}])
def test_a_background_response_is_stored_and_not_streamed(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="background"):
        asked(background=True, **fields)


def test_listed_items_are_those_of_the_official_client() -> None:
    wanted = asked(input=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, CALL, OUTPUT])
    items = listed(own_items(wanted))
    assert [item["content"] for item in items[:2]] == [
        [{"type": "input_text", "text": "a"}],
        [{"type": "output_text", "text": "b", "annotations": []}],
    ]
    assert len({item["id"] for item in items}) == 4
    again = asked(input=items)
    assert listed(own_items(again)) == items


# Output


async def test_events_of_a_text() -> None:
    events = await streamed(text_pieces("Hel", "lo"))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0].response.status == "in_progress"
    assert events[2].item.content == []
    assert [event.delta for event in events[4:6]] == ["Hel", "lo"]
    assert events[6].text == events[7].part.text == "Hello"
    response = events[-1].response
    assert (response.status, response.output_text) == ("completed", "Hello")
    assert response.output[0] == events[-2].item
    assert response.usage.model_dump(exclude_none=True) == {
        "input_tokens": PROMPT_TOKENS,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": PROMPT_TOKENS + 2,
    }


async def test_events_of_reasoning_text_and_calls() -> None:
    events = await streamed(tool_pieces(), tools=[WEATHER])
    kinds = [event.type.removeprefix("response.") for event in events]
    text = ["content_part.added", "output_text.delta", "output_text.delta", "output_text.done", "content_part.done"]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        *(kind.replace("output_text", "reasoning_text") for kind in text),
        "output_item.done",
        "output_item.added",
        *text,
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    indices = [event.output_index for event in events if hasattr(event, "output_index")]
    assert indices == sorted(indices)
    added = {event.output_index: event.item.id for event in events if event.type == "response.output_item.added"}
    assert all(event.item_id == added[event.output_index] for event in events if hasattr(event, "item_id"))
    reasoning, message, weather, clock = events[-1].response.output
    assert reasoning.content[0].text == "I need both."
    assert message.content[0].text == "\n\nLet me look.\n"
    assert (weather.name, weather.call_id, weather.arguments) == ("weather", "call_a", '{"city": "Paris"}')
    assert (clock.name, clock.arguments, clock.status) == ("time", "{}", "completed")
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens == 2


@pytest.mark.parametrize("steps", [text_pieces("Hel", "lo"), tool_pieces(), text_pieces("", finish="length")])
async def test_whole_and_streamed_responses_agree(steps: list[Step]) -> None:
    fields: dict[str, Any] = {"metadata": {"a": "b"}, "tools": [WEATHER], "max_output_tokens": 9, "instructions": "Hm"}
    one, kept = answer(**fields)
    whole = await one.whole(played(steps))  # type: ignore[arg-type]
    assert kept == [one]
    last = (await streamed(steps, **fields))[-1]
    theirs = last.response.model_dump()
    ours = Response.model_validate(whole).model_dump()
    for response in (theirs, ours):
        for name in ("id", "created_at", "completed_at"):
            response.pop(name)
        for item in response["output"]:
            item.pop("id")
    assert ours == theirs


async def test_an_answer_that_broke_off_is_incomplete() -> None:
    events = await streamed([piece("Hel"), piece("lo", "length")], max_output_tokens=2)
    assert events[-1].type == "response.incomplete"
    response = events[-1].response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert response.completed_at is None


async def test_a_failure_in_a_stream_ends_it_with_an_error() -> None:
    events = await streamed([piece("Hel"), failed("a worker died")])
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert (events[-2].code, events[-2].message) == ("failed", "a worker died")
    response = events[-1].response
    assert (response.status, response.error.code) == ("failed", "server_error")
    assert response.output[0].status == "incomplete"
    assert response.output_text == "Hel"


def spelled(text: str, finish: str | None = None, **more: Any) -> Any:
    return piece(text, finish, logprobs=(TokenLogprobs(ord(text or "$"), -0.5, ((65, -0.1),)),), **more)


async def logprobs_of(*steps: Any) -> list[Any]:
    """The events, in which deltas and whole texts show the same tokens."""
    events = await streamed(list(steps), include=["message.output_text.logprobs"], top_logprobs=1)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    texts = [item.content[0] for item in events[-1].response.output if item.type == "message"]
    entries = [entry for text in texts for entry in text.logprobs]
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in entries]
    assert "".join(entry.token for entry in entries) == events[-1].response.output_text
    return entries


async def test_log_probabilities_are_those_of_the_text() -> None:
    thought = spelled("", reasoning="Hm", reasoning_tokens=1)
    entries = await logprobs_of(thought, spelled("\n"), spelled("H"), spelled("i"), spelled("", "stop"))
    assert (entries[0].logprob, entries[0].top_logprobs[0].token) == (-0.5, "A")
    call = [spelled("", calls=(CallDelta(0, "a", "f", "{"),)), spelled("", calls=(CallDelta(0, None, None, "}"),))]
    entries = await logprobs_of(spelled(" "), *call, spelled("H"), spelled("", "tool_calls"))
    assert [entry.token for entry in entries] == ["H"]


def test_parameters_are_repeated_in_the_response() -> None:
    choice = {"type": "function", "name": "weather"}
    response = Response.model_validate(answer(tools=[WEATHER], tool_choice=choice, top_p=0.5)[0].response())
    assert response.tools[0].name == response.tool_choice.name == "weather"
    assert (response.temperature, response.top_p, response.truncation) == (1.0, 0.5, "disabled")
    assert response.text.format.type == "text"
    assert response.parallel_tool_calls


# The official client


def client_of(url: str) -> AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)  # loading certificates takes longer than a test
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20, http_client=http)


async def test_create_retrieve_list_and_delete() -> None:
    async with gateway(text_pieces("Hello")) as served, client_of(served.url) as client:
        made = await client.responses.create(model=MODEL, input="Hi", metadata={"a": "b"})
        assert (made.status, made.output_text) == ("completed", "Hello")
        again = await client.responses.retrieve(made.id)
        assert again == made
        items = await client.responses.input_items.list(made.id)
        assert [item.content[0].text for item in items.data] == ["Hi"]
        more = await client.responses.create(model=MODEL, input="Bye", previous_response_id=made.id)
        items = await client.responses.input_items.list(more.id)
        assert [item.content[0].text for item in items.data] == ["Bye", "Hello", "Hi"]
        await client.responses.delete(made.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError) as refused:
                await call(made.id)
            assert "whole input" in refused.value.message


async def test_a_conversation_goes_on_from_a_stored_response() -> None:
    async with gateway(tool_pieces(), text_pieces("Sunny")) as served, client_of(served.url) as client:
        first = await client.responses.create(model=MODEL, input="Weather?", tools=[WEATHER], instructions="Be kind")
        outputs = [
            {"type": "function_call_output", "call_id": call, "output": call.upper()} for call in ("call_a", "call_b")
        ]
        second = await client.responses.create(model=MODEL, input=outputs, previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert [message.role for message in served.service.asked[1].messages] == ["user", "assistant", "tool", "tool"]
        said = served.service.asked[1].messages[1]
        assert said.reasoning_content == "I need both."
        assert said.content == "\n\nLet me look.\n"
        assert [call.id for call in said.tool_calls] == ["call_a", "call_b"]
        await client.responses.delete(first.id)  # the second holds the whole conversation
        await client.responses.create(model=MODEL, input="Thanks", previous_response_id=second.id)
        assert [message.role for message in served.service.asked[2].messages][-3:] == ["tool", "assistant", "user"]
        page = await client.responses.input_items.list(second.id, limit=4, order="asc")
        everything = [item async for item in page]
        assert [item.type for item in everything] == [
            "message",
            "reasoning",
            "message",
            "function_call",
            "function_call",
            "function_call_output",
            "function_call_output",
        ]
        with pytest.raises(openai.NotFoundError) as refused:
            await client.responses.create(model=MODEL, input="Hi", previous_response_id=first.id)
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id"


async def test_the_client_streams_and_can_go_on() -> None:
    async with gateway(tool_pieces(), text_pieces("Sunny")) as served, client_of(served.url) as client:
        async with client.responses.stream(model=MODEL, input="Hi", tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[-1] == "response.completed"
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
        assert await client.responses.retrieve(final.id)
        outputs = [{"type": "function_call_output", "call_id": call, "output": "x"} for call in ("call_a", "call_b")]
        resent = [*final.output, *outputs]
        again = await client.responses.create(model=MODEL, input=resent, store=False)  # type: ignore[arg-type]
        assert again.output_text == "Sunny"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(again.id)


async def test_the_client_parses_structured_output() -> None:
    class City(BaseModel):
        name: str

    async with gateway(text_pieces('{"name": ', '"Paris"}')) as served, client_of(served.url) as client:
        made = await client.responses.parse(model=MODEL, input="Where?", text_format=City)
        assert made.output_parsed == City(name="Paris")
        assert served.service.asked[0].response_format is not None


async def test_errors_name_the_clients_own_fields() -> None:
    async with gateway(text_pieces("Hello")) as served, client_of(served.url) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=MODEL, input="Hi", max_output_tokens=2000)
        assert refused.value.param == "max_output_tokens"
        assert refused.value.body["message"].startswith("max_output_tokens: ")  # type: ignore[index]
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="other", input="Hi")
        with pytest.raises(openai.BadRequestError, match="starting_after"):
            await client.responses.retrieve("resp_1", starting_after=3)
    async with gateway([overloaded("full")]) as served, client_of(served.url) as client:
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model=MODEL, input="Hi", stream=True)


async def test_a_background_response_is_polled() -> None:
    begin, end = asyncio.Event(), asyncio.Event()
    async with gateway([begin, piece("Hel"), end, piece("lo", "stop")]) as served, client_of(served.url) as client:
        made = await client.responses.create(model=MODEL, input="Hi", background=True)
        assert (made.status, made.background) == ("queued", True)
        with pytest.raises(openai.BadRequestError, match="queued"):
            await client.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)
        assert (await client.responses.input_items.list(made.id)).data[0].content[0].text == "Hi"  # type: ignore[union-attr]
        begin.set()
        while (now := await client.responses.retrieve(made.id)).status == "queued":
            await asyncio.sleep(0.005)
        assert now.status == "in_progress"
        end.set()
        while (now := await client.responses.retrieve(made.id)).status == "in_progress":
            await asyncio.sleep(0.005)
        assert (now.status, now.output_text) == ("completed", "Hello")
        assert (await client.responses.cancel(made.id)).status == "completed"
        assert served.service.closed == 1


async def test_a_background_response_is_cancelled_and_what_runs_for_it_ends() -> None:
    steps: list[Step] = [piece("Hel"), asyncio.Event()]
    async with gateway(steps) as served, client_of(served.url) as client:
        for _ in range(2):
            made = await client.responses.create(model=MODEL, input="Hi", background=True)
            while (await client.responses.retrieve(made.id)).status == "queued":
                await asyncio.sleep(0.005)
            gone = await client.responses.cancel(made.id)
            assert (gone.status, gone.output_text) == ("cancelled", "Hel")
            assert await client.responses.cancel(made.id) == gone
            assert await client.responses.retrieve(made.id) == gone
        assert served.service.closed == 2
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await client.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)
        running = await client.responses.create(model=MODEL, input="Hi", background=True)
        await client.responses.delete(running.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(running.id)


async def test_a_background_response_that_fails_says_why() -> None:
    async with gateway([piece("Hel"), failed("a worker died")]) as served, client_of(served.url) as client:
        made = await client.responses.create(model=MODEL, input="Hi", background=True)
        while (now := await client.responses.retrieve(made.id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.005)
        assert now.status == "failed"
        assert now.error is not None
        assert now.error.message == "a worker died"


async def test_a_stream_that_fails_is_not_stored() -> None:
    async with gateway([piece("Hel"), failed("a worker died")]) as served, client_of(served.url) as client:
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(events[-1].response.id)


async def test_only_background_responses_are_cancelled() -> None:
    async with gateway(text_pieces("Hello")) as served, client_of(served.url) as client:
        made = await client.responses.create(model=MODEL, input="Hi")
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(made.id)
