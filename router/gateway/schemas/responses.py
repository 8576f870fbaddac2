"""Request body of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, TypeAdapter, ValidationInfo, field_validator

from router.gateway.schemas.chat import Name
from router.gateway.schemas.common import (
    INT64,
    MAX_PRIORITY,
    MAX_TOP_LOGPROBS,
    Finite,
    Items,
    Metadata,
    Off,
    Parsed,
    Returned,
    Strict,
)
from router.gateway.schemas.tagged import by_type

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict):
    """Text of a user, a developer or the system."""

    type: Literal["input_text"]
    text: str


class OutputText(Returned):
    """Text of the assistant, as a response has it. Annotations and log-probabilities say nothing to the model."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]] | None = None
    logprobs: list[dict[str, Any]] | None = None
    parsed: Parsed = None


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")] | Annotated[OutputText, Tag("<output_text>")],
    by_type("input_text", "output_text"),
]


class MessageItem(Returned):
    """A message, of the client or of an earlier response."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[Part]
    id: str | None = None
    status: Status | None = None
    phase: None = None


class FunctionCallItem(Returned):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Parsed = None
    id: str | None = None
    status: Status | None = None


class FunctionOutputItem(Strict):
    """What the application's function answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[InputText]
    id: str | None = None
    status: Status | None = None


class SummaryText(Strict):
    """A piece of a reasoning item's summary."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(Strict):
    """A piece of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Returned):
    """What the model thought before it answered."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Items[SummaryText] | None = None
    content: Items[ReasoningText] | None = None
    encrypted_content: None = None
    status: Status | None = None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    by_type("message", "function_call", "function_call_output", "reasoning", default="message"),
]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Strict):
    """`tool_choice`: this function has to be called."""

    type: Literal["function"]
    name: str


class PlainFormat(Strict):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


Format = Annotated[
    Annotated[PlainFormat, Tag("<text>")]
    | Annotated[PlainFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    by_type("text", "json_object", "json_schema"),
]


class TextConfig(Strict):
    """`text`."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """`reasoning`: nothing can be chosen."""

    effort: None = None
    summary: None = None
    generate_summary: None = None


class ResponsesStreamOptions(Strict):
    """`stream_options`: nothing is added to events to hide their lengths."""

    include_obfuscation: Off | None = None


class ResponsesRequest(Strict):
    """`POST /v1/responses`. Fields that OpenAI publishes and Headwater does not support are accepted only at the value
    that means "off"."""

    model: str
    input: str | Annotated[Items[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=INT64)
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    user: str | None = None
    stream: bool | None = None
    background: bool | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    stream_options: ResponsesStreamOptions | None = None
    include: Items[Literal["message.output_text.logprobs"]] | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    max_tool_calls: None = None
    conversation: None = None
    prompt: None = None

    @field_validator("background")
    @classmethod
    def _is_asked_for_later(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("store") is False:
            raise ValueError("a response that is not stored could never be asked for")
        if value and info.data.get("stream"):
            raise ValueError("such a response is asked for with GET, it cannot be streamed")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _is_beside_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("include"):
            raise ValueError("only with message.output_text.logprobs in include")
        return value

    @property
    def wants_logprobs(self) -> bool:
        """Whether messages show the log-probabilities of their tokens."""
        return bool(self.include)

    @property
    def kept(self) -> bool:
        """Whether the response can be asked for later, and continued."""
        return self.store is not False
