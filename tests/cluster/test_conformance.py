"""What applications use: the official clients of OpenAI and Anthropic, with their helpers, on a real cluster."""

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from cluster.launch import Cluster
from tests.cluster.checks import assert_balance

MODEL = "smollm2-135m-instruct"
CHAT: Any = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
GREEDY: Any = {"model": MODEL, "temperature": 0}


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


WEATHER: Any = openai.pydantic_function_tool(Weather, name="weather")
TIME: Any = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
CLAUDES_WEATHER: Any = {"name": "weather", "description": "Look", "input_schema": WEATHER["function"]["parameters"]}
RESPONSES_WEATHER: Any = {"type": "function", **WEATHER["function"]}


@pytest.fixture(scope="module")
def client(pair: Cluster) -> OpenAI:
    return OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def waiting(pair: Cluster) -> AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)  # loading certificates takes longer than a test
    return AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=120, http_client=http)


@pytest.fixture(scope="module")
def claude(pair: Cluster) -> Anthropic:
    return Anthropic(base_url=pair.url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def waiting_claude(pair: Cluster) -> AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return AsyncAnthropic(base_url=pair.url, api_key="none", max_retries=0, timeout=120, http_client=http)


@pytest.fixture(autouse=True)
def at_rest(pair: Cluster) -> Iterator[None]:
    yield
    assert_balance(pair)


# Chat


async def test_chats_whole_and_streamed_by_both_clients(client: OpenAI, waiting: AsyncOpenAI) -> None:
    wanted: Any = {**GREEDY, "messages": CHAT, "max_tokens": 16}
    answers = [client.chat.completions.create(**wanted), await waiting.chat.completions.create(**wanted)]
    texts = [answer.choices[0].message.content for answer in answers]
    texts.append("".join(chunk.choices[0].delta.content or "" for chunk in _stream(client, wanted)))
    chunks = [chunk async for chunk in await waiting.chat.completions.create(**wanted, stream=True)]
    texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    assert texts == [PARIS] * 4
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def _stream(client: OpenAI, wanted: Any) -> Any:
    return client.chat.completions.create(**wanted, stream=True)


async def test_the_helpers_of_streams(client: OpenAI, waiting: AsyncOpenAI) -> None:
    wanted: Any = {**GREEDY, "messages": CHAT, "max_tokens": 16, "logprobs": True}
    wanted |= {"stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**wanted) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event for event in events if event.type == "content.delta"]
    assert "".join(event.delta for event in deltas) == deltas[-1].snapshot == PARIS
    (done,) = (event for event in events if event.type == "content.done")
    assert done.content == PARIS
    logprobs = final.choices[0].logprobs
    assert logprobs is not None
    assert bytes(byte for one in logprobs.content or [] for byte in one.bytes or []).decode() == PARIS
    assert final.usage is not None
    assert final.usage.completion_tokens == len(logprobs.content or [])
    async with waiting.chat.completions.stream(**wanted) as later:
        again = await later.get_final_completion()
    assert again.choices[0].message == final.choices[0].message
    assert again.usage.completion_tokens == final.usage.completion_tokens  # type: ignore[union-attr]


async def test_structured_output(client: OpenAI, waiting: AsyncOpenAI) -> None:
    wanted: Any = {**GREEDY, "messages": [{"role": "user", "content": "Name an animal"}], "response_format": Animal}
    whole = client.chat.completions.parse(**wanted, max_tokens=40)
    animal = whole.choices[0].message.parsed
    assert isinstance(animal, Animal)
    assert (await waiting.chat.completions.parse(**wanted, max_tokens=40)).choices[0].message.parsed == animal
    with client.chat.completions.stream(**wanted, max_tokens=40) as stream:
        (done,) = (event for event in stream if event.type == "content.done")
        assert done.parsed == stream.get_final_completion().choices[0].message.parsed == animal
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**wanted, max_tokens=3)


def test_several_choices(client: OpenAI) -> None:
    wanted: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 4, "n": 3, "seed": 5, "temperature": 0.9}
    whole = client.chat.completions.create(**wanted)
    texts = ["", "", ""]
    for chunk in _stream(client, wanted):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.message.content for choice in whole.choices] == texts
    assert len(set(texts)) == 3


# Tools


@pytest.mark.parametrize("choice", ["required", "weather"])
async def test_tools_and_their_results(client: OpenAI, waiting: AsyncOpenAI, choice: str) -> None:
    named = {"type": "function", "function": {"name": choice}}
    wanted: Any = {**GREEDY, "tools": [WEATHER], "max_tokens": 60, "parallel_tool_calls": False}
    forced = {"tool_choice": choice if choice == "required" else named}
    question: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
    whole = client.chat.completions.parse(messages=question, **forced, **wanted).choices[0]
    (call,) = whole.message.tool_calls or []
    assert (whole.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert isinstance(call.function.parsed_arguments, Weather)
    async with waiting.chat.completions.stream(messages=question, **forced, **wanted) as stream:
        events = [event async for event in stream]
        streamed = (await stream.get_final_completion()).choices[0]
    (done,) = (event for event in events if event.type == "tool_calls.function.arguments.done")
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == done.arguments == call.function.arguments
    assert (streamed.finish_reason, done.parsed_arguments) == ("tool_calls", call.function.parsed_arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
    forms = [whole.message, whole.message.model_dump(), streamed.message, streamed.message.to_dict()]
    for said in forms if choice == "required" else forms[:1]:
        last = client.chat.completions.create(
            messages=[*question, said, result], **{**wanted, "max_tokens": 2}, tool_choice="none"
        )
        assert last.choices[0].message.content


def test_tools_that_may_be_called(client: OpenAI) -> None:
    """Whether this model does so is its own affair; what comes has to be consistent, streamed or not."""
    wanted: Any = {**GREEDY, "messages": CHAT, "tools": [WEATHER, TIME], "tool_choice": "auto", "max_tokens": 12}
    whole = client.chat.completions.create(**wanted).choices[0]
    deltas = [chunk.choices[0] for chunk in _stream(client, wanted)]
    assert "".join(one.delta.content or "" for one in deltas) == (whole.message.content or "")
    assert deltas[-1].finish_reason == whole.finish_reason
    assert (whole.finish_reason == "tool_calls") == bool(whole.message.tool_calls)
    assert whole.message.content or whole.message.tool_calls


# Completions, embeddings, models


def test_a_batch_of_prompts(client: OpenAI) -> None:
    prompts = ["One two three", "The sky is", "Bees make"]
    wanted: Any = {**GREEDY, "prompt": prompts, "max_tokens": 3, "n": 2, "logprobs": 1, "echo": True}
    whole = client.completions.create(**wanted)
    texts, reasons = [""] * 6, [""] * 6
    for chunk in client.completions.create(**wanted, stream=True):
        for choice in chunk.choices:
            assert not reasons[choice.index]
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or ""
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert [(choice.text, choice.finish_reason) for choice in whole.choices] == list(zip(texts, reasons, strict=True))
    assert all(text.startswith(prompts[index // 2]) for index, text in enumerate(texts))
    assert "".join(whole.choices[0].logprobs.tokens or []) == texts[0]  # type: ignore[union-attr]


async def test_embeddings(client: OpenAI, waiting: AsyncOpenAI) -> None:
    """The client asks for base64 and decodes it, unless it is told otherwise."""
    words = ["A cat sleeps", "A dog barks"]
    packed = client.embeddings.create(model=MODEL, input=words)
    plain = await waiting.embeddings.create(model=MODEL, input=words, encoding_format="float")
    alone = client.embeddings.create(model=MODEL, input=words[1])
    vectors = [one.embedding for one in packed.data]
    assert [one.index for one in packed.data] == [0, 1]
    for vector, other in zip(vectors, [one.embedding for one in plain.data], strict=True):
        assert vector == pytest.approx(other, abs=1e-5)
        assert sum(value * value for value in vector) == pytest.approx(1, abs=1e-4)
    assert vectors[1] == pytest.approx(alone.data[0].embedding, abs=1e-4)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-2)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > alone.usage.prompt_tokens


async def test_models(client: OpenAI, waiting: AsyncOpenAI) -> None:
    """Everything that is listed can be used."""
    names = [one.id for one in client.models.list()]
    assert names == [one.id async for one in waiting.models.list()] == [MODEL]
    for name in names:
        assert client.models.retrieve(name).id == name
        assert client.completions.create(model=name, prompt="x", max_tokens=1).usage.completion_tokens == 1  # type: ignore[union-attr]


# Responses


async def test_responses(client: OpenAI, waiting: AsyncOpenAI) -> None:
    wanted: Any = {**GREEDY, "input": "What is the capital of France?", "max_output_tokens": 16}
    first = client.responses.create(**wanted)
    assert (first.output_text, first.status) == (PARIS, "completed")
    assert client.responses.retrieve(first.id) == first
    (asked,) = client.responses.input_items.list(first.id)
    assert asked.content[0].text == wanted["input"]  # type: ignore[union-attr]
    async with waiting.responses.stream(**wanted) as stream:
        kinds = [event.type async for event in stream]
        assert (await stream.get_final_response()).output_text == PARIS
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    then = client.responses.create(**{**wanted, "input": "And of Italy?"}, previous_response_id=first.id)
    assert then.usage.input_tokens > first.usage.input_tokens  # type: ignore[union-attr]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_of_a_type_and_with_tools(client: OpenAI) -> None:
    wanted: Any = {**GREEDY, "max_output_tokens": 60}
    parsed = client.responses.parse(**wanted, input="Name an animal", text_format=Animal)
    assert isinstance(parsed.output_parsed, Animal)
    with client.responses.stream(**wanted, input="Name an animal", text_format=Animal) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    wanted |= {"tools": [RESPONSES_WEATHER], "parallel_tool_calls": False}
    question: Any = {"role": "user", "content": "How is it in Paris?"}
    asked = client.responses.create(**wanted, input=[question], tool_choice="required")
    (call,) = asked.output
    assert call.type == "function_call"
    assert Weather.model_validate_json(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    wanted |= {"tool_choice": "none", "max_output_tokens": 4}
    told = client.responses.create(**wanted, input=[result], previous_response_id=asked.id)
    again = [client.responses.create(**wanted, input=[question, one, result]) for one in (call, call.model_dump())]
    assert told.output_text
    assert {one.output_text for one in again} == {told.output_text}


# Messages


async def test_messages(claude: Anthropic, waiting_claude: AsyncAnthropic) -> None:
    wanted: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 16, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**wanted)
    assert (whole.content[0].text, whole.stop_reason) == (PARIS, "end_turn")  # type: ignore[union-attr]
    with claude.messages.stream(**wanted) as stream:
        assert "".join(stream.text_stream) == PARIS
    async with waiting_claude.messages.stream(**wanted) as later:
        kinds = [event.type async for event in later]
        final = await later.get_final_message()
    assert (kinds[0], kinds[-1], final.content[0].text) == ("message_start", "message_stop", PARIS)  # type: ignore[union-attr]
    count = await waiting_claude.messages.count_tokens(model=MODEL, messages=CHAT)
    for usage in (whole.usage, final.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count.input_tokens
    assert whole.usage.output_tokens == final.usage.output_tokens


def test_messages_with_tools(claude: Anthropic) -> None:
    wanted: Any = {"model": MODEL, "max_tokens": 60, "tools": [CLAUDES_WEATHER], "extra_body": {"temperature": 0}}
    forced: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    whole = claude.messages.create(messages=CHAT, **wanted, tool_choice=forced)
    with claude.messages.stream(messages=CHAT, **wanted, tool_choice=forced) as stream:
        streamed = stream.get_final_message()
    (call,) = whole.content
    assert call.type == "tool_use"
    assert (whole.stop_reason, call.name, bool(Weather.model_validate(call.input))) == ("tool_use", "weather", True)
    assert [block.input for block in streamed.content] == [call.input]  # type: ignore[union-attr]
    for said in (whole.content, [block.model_dump() for block in streamed.content]):
        asked: Any = said[0]
        name = asked["id"] if isinstance(asked, dict) else asked.id
        result = {"type": "tool_result", "tool_use_id": name, "content": "Sunny"}
        turns: Any = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        told = claude.messages.create(messages=turns, **{**wanted, "max_tokens": 2}, tool_choice={"type": "none"})
        assert told.content[0].type == "text"


# Errors


def test_errors_have_their_types(client: OpenAI, claude: Anthropic) -> None:
    messages: Any = CHAT
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=messages, temperature=9)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="context"):
            client.chat.completions.create(model=MODEL, messages=messages, max_tokens=10**6, stream=stream)
        with pytest.raises(anthropic.BadRequestError, match="context"):
            claude.messages.create(model=MODEL, messages=messages, max_tokens=10**6, stream=stream)
        with pytest.raises(openai.NotFoundError, match="none-such"):
            client.responses.create(model="none-such", input="Hi", stream=stream)
        with pytest.raises(anthropic.NotFoundError, match="none-such"):
            claude.messages.create(model="none-such", messages=messages, max_tokens=1, stream=stream)
    with pytest.raises(openai.NotFoundError, match="none-such"):
        client.embeddings.create(model="none-such", input="Hi")
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(model=MODEL, messages=messages, max_tokens=1, extra_body={"temperature": 2})


@pytest.mark.parametrize("helper", [False, True])
def test_a_deadline_in_mid_stream_raises(client: OpenAI, helper: bool) -> None:
    """Sooner or later, but never as the end of an answer."""
    body = {"timeout": 0.5, "ignore_eos": True}
    wanted: Any = {**GREEDY, "messages": CHAT, "max_tokens": 1900, "extra_body": body}

    def read() -> None:
        if helper:
            with client.chat.completions.stream(**wanted) as stream:
                stream.until_done()
        else:
            list(_stream(client, wanted))

    with pytest.raises(openai.APIError, match=r"no complete answer within 0\.5 s"):
        read()
