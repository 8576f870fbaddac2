"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from router.gateway.schemas.common import INT64, MAX_TOP_LOGPROBS, Items, Off, Parsed, Returned, Sampling, Strict

MAX_TOOLS = 128
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(Strict):
    """A piece of message content; only text is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(Returned):
    """The function of a call that the assistant made, its arguments as JSON text."""

    name: str
    arguments: str
    parsed_arguments: Parsed = None


class ToolCall(Returned):
    """A call that the assistant made; one that was streamed has an index."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Returned):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: Items[dict[str, Any]] | None = None  # of the text: they say nothing to the model
    parsed: Parsed = None

    @property
    def text(self) -> str:
        """Text parts joined, absent content as empty text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def plain(self) -> dict[str, Any]:
        """What a chat template gets. Arguments of calls are objects there, where they can be."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        for field in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, field)) is not None:
                message[field] = value
        if self.tool_calls:
            message["tool_calls"] = [_plain_call(call) for call in self.tool_calls]
        return message


def _plain_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:
        arguments = call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


class Function(Strict):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


Tools = Annotated[Items[Tool], Field(max_length=MAX_TOOLS)]


class NamedFunction(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """A schema that the answer has to follow."""

    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class AnyText(Strict):
    """No format."""

    type: Literal["text"]


class JsonObject(Strict):
    """The answer is a JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """The answer follows a JSON schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[AnyText | JsonObject | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(Sampling):
    """A chat."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    audio: None = None
    functions: None = None
    function_call: None = None
    prediction: None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None
    store: Off | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def logprobs_wanted(self) -> int | None:
        """`top_logprobs` where `logprobs` are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None
