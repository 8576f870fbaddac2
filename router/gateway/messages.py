"""Anthropic's Messages API: from its blocks to a chat request, and from pieces to its objects, events and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from router.gateway.answers import Answer
from router.gateway.choice import Piece
from router.gateway.errors import ApiError, invalid
from router.gateway.jobs import Job
from router.gateway.request_id import current
from router.gateway.schemas.chat import ChatRequest
from router.gateway.schemas.messages import (
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    NamedTool,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)
from router.gateway.sections import Section, Sections, Step
from router.gateway.translate import chat_request, named, new_id, typed_event
from router.gateway.usage import Usage

FIELDS = {"stop": "stop_sequences", "user": "metadata.user_id"}
"""The names that fields of the chat request have here."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
DELTAS = {"reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
"""Type of a section's deltas, and the field that they extend; a call's are `input_json_delta` and `partial_json`."""


def to_chat(request: CountTokensRequest) -> ChatRequest:
    """The chat request of a conversation. Raises ApiError 400."""
    sampling: dict[str, Any] = {"max_tokens": 1}
    if isinstance(request, MessagesRequest):
        sampling = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop": request.stop_sequences,
            "user": request.metadata.user_id if request.metadata is not None else None,
        }
    choice = request.tool_choice
    with named(FIELDS):
        return chat_request(
            model=request.model,
            messages=_messages(request),
            tools=[_chat_tool(tool) for tool in request.tools] if request.tools else None,
            tool_choice=_chat_choice(request),
            parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
            **sampling,
        )


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    if request.messages[-1].role == "assistant":
        raise invalid("messages: the last one must be the user's, an answer cannot be begun for the model", "messages")
    messages = [{"role": "system", "content": _text(request.system)}] if request.system else []
    calls: set[str] = set()
    for number, message in enumerate(request.messages):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(number, message, calls))
        else:
            messages.extend(_user(number, message, calls))
    return messages


def _assistant(number: int, message: InputMessage, calls: set[str]) -> dict[str, Any]:
    """Thinking, text and calls are one message."""
    chat: dict[str, Any] = {"role": "assistant"}
    for place, block in enumerate(message.content):
        if isinstance(block, ThinkingBlock):
            chat["reasoning_content"] = chat.get("reasoning_content", "") + block.thinking
        elif isinstance(block, TextBlock):
            chat["content"] = chat.get("content", "") + block.text
        elif isinstance(block, ToolUseBlock):
            calls.add(block.id)
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            chat.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
        else:
            raise _misplaced(number, place, message)
    return chat


def _user(number: int, message: InputMessage, calls: set[str]) -> list[dict[str, Any]]:
    """Texts that follow one another are one message, each tool result is one of its own."""
    chats: list[dict[str, Any]] = []
    for place, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            if not chats or chats[-1]["role"] != "user":
                chats.append({"role": "user", "content": ""})
            chats[-1]["content"] += block.text
        elif isinstance(block, ToolResultBlock):
            if block.tool_use_id not in calls:
                param = f"messages.{number}.content.{place}.tool_use_id"
                raise invalid(f"{param}: no tool_use block before has the id {block.tool_use_id!r}", param)
            result = _text(block.content or "")
            content = f"Error: {result}" if block.is_error else result
            chats.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        else:
            raise _misplaced(number, place, message)
    return chats


def _misplaced(number: int, place: int, message: InputMessage) -> ApiError:
    param = f"messages.{number}.content.{place}"
    block: Any = message.content[place]
    return invalid(f"{param}: a {block.type} block cannot be in a message of role {message.role}", param)


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _chat_tool(tool: Tool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description is not None else {}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _chat_choice(request: CountTokensRequest) -> Any:
    if request.tool_choice is None:
        return None
    if isinstance(request.tool_choice, NamedTool):
        return {"type": "function", "function": {"name": request.tool_choice.name}}
    return CHOICES[request.tool_choice.type]


def error_body(error: ApiError) -> dict[str, Any]:
    """An error as Anthropic's clients expect it."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": current.get() or None}


class MessagesAnswer(Answer):
    """`/v1/messages`."""

    def __init__(self, request: MessagesRequest, jobs: Sequence[Job]) -> None:
        self._id = new_id("msg")
        self._model = request.model
        self._sections = Sections()
        self._usage = Usage(jobs)
        self._stop_reason: str | None = None
        self._stop: str | None = None

    async def whole(self, pieces: AsyncGenerator[Piece, None]) -> dict[str, Any]:
        """The message object, once everything is there."""
        async for piece in pieces:
            self._take(piece)
        return self._object([_block(section) for section in self._sections.all])

    async def stream(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[bytes, None]:
        """Server-sent events. The first waits for the first piece, which tells how much of the prompt was cached."""
        begun = False
        try:
            async for piece in pieces:
                steps = self._take(piece)
                if not begun:
                    begun = True
                    yield typed_event({"type": "message_start", "message": {**self._object([]), **NOT_STOPPED}})
                    yield typed_event({"type": "ping"})
                for step in steps:
                    yield typed_event(_event(step))
        except ApiError as error:
            yield typed_event(error_body(error))
            return
        stopped = {"stop_reason": self._stop_reason, "stop_sequence": self._stop}
        yield typed_event({"type": "message_delta", "delta": stopped, "usage": self._usage_object()})
        yield typed_event({"type": "message_stop"})

    def _take(self, piece: Piece) -> list[Step]:
        self._usage.add(piece)
        if piece.finish_reason is not None:
            self._stop = piece.stop
            self._stop_reason = "stop_sequence" if piece.stop is not None else STOP_REASONS[piece.finish_reason]
        return self._sections.push(piece)

    def _object(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop,
            "usage": self._usage_object(),
        }

    def _usage_object(self) -> dict[str, Any]:
        """Prompt tokens that were cached are not among the input tokens."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


NOT_STOPPED: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
"""Of a message that begins, even where its first piece is its last."""


def _event(step: Step) -> dict[str, Any]:
    section = step.section
    if step.what == "open":
        return {"type": "content_block_start", "index": section.number, "content_block": _block(section, begun=True)}
    if step.what == "close":
        return {"type": "content_block_stop", "index": section.number}
    kind, name = DELTAS.get(section.kind, ("input_json_delta", "partial_json"))
    return {"type": "content_block_delta", "index": section.number, "delta": {"type": kind, name: step.text}}


def _block(section: Section, begun: bool = False) -> dict[str, Any]:
    """A section as a content block; one that has only begun is empty."""
    text = "" if begun else section.text
    if section.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if section.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": section.call_id, "name": section.name, "input": _input(text)}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; nothing of those of a call that broke off."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
