"""Bodies of Anthropic's Messages API: of requests, and of errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from router.gateway.schemas.chat import Name
from router.gateway.schemas.common import INT64, Finite, Items, Returned, Strict
from router.gateway.schemas.tagged import by_type


class CacheControl(Strict):
    """`cache_control`: accepted, since whatever prompts have in common is cached anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cacheable(Strict):
    """A part that a client may mark for caching."""

    cache_control: CacheControl | None = None


class TextBlock(Cacheable, Returned):
    """Text."""

    type: Literal["text"]
    text: str
    citations: None = None


class ToolUseBlock(Cacheable, Returned):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Cacheable):
    """What the application's tool answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Returned):
    """What the model thought before it answered."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")],
    by_type("text", "tool_use", "tool_result", "thinking"),
]


class InputMessage(Strict):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: str | Items[Block]


class Tool(Cacheable):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Strict):
    """`tool_choice`."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedTool(Strict):
    """`tool_choice`: this tool has to be called."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


Choice = Annotated[
    Annotated[ToolChoice, Tag("<auto>")]
    | Annotated[ToolChoice, Tag("<any>")]
    | Annotated[ToolChoice, Tag("<none>")]
    | Annotated[NamedTool, Tag("<tool>")],
    by_type("auto", "any", "none", "tool"),
]


class Metadata(Strict):
    """`metadata`."""

    user_id: str | None = None


class CountTokensRequest(Cacheable):
    """`POST /v1/messages/count_tokens`."""

    model: str
    messages: Annotated[Items[InputMessage], Field(min_length=1)]
    system: str | Items[TextBlock] | None = None
    tools: Items[Tool] | None = None
    tool_choice: Choice | None = None


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1, lt=INT64)
    stop_sequences: Items[str] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=1)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: int | None = Field(None, ge=0, lt=INT64)
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class MessagesErrorObject(Strict):
    """What went wrong."""

    type: str
    message: str


class MessagesError(Strict):
    """The body of every answer that is an error, and of an event that is one."""

    type: Literal["error"]
    error: MessagesErrorObject
    request_id: str | None
