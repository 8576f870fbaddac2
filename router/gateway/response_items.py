"""Items of OpenAI's Responses API: to a chat request, and as clients get them back."""

from __future__ import annotations

import json
from typing import Any

from router.gateway.errors import invalid
from router.gateway.schemas.chat import ChatRequest
from router.gateway.schemas.responses import (
    ITEMS,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    InputText,
    Item,
    MessageItem,
    OutputText,
    PlainFormat,
    ReasoningItem,
    ResponsesRequest,
    TextConfig,
)
from router.gateway.store import Stored
from router.gateway.translate import chat_request, named, new_id

FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""The names that fields of the chat request have here."""
ID_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Of the ids of items, by type."""
GOES_ON = ("completed", "incomplete")
"""Statuses of responses that can be continued."""


def own_items(request: ResponsesRequest) -> list[Item]:
    """The request's input as items."""
    if isinstance(request.input, str):
        return [MessageItem(role="user", content=request.input)]
    return list(request.input)


def stored_items(stored: Stored) -> list[Item]:
    """The conversation of a stored response: the items that it answers, and its own. Raises ApiError 400."""
    response = json.loads(stored.response)
    if response["status"] not in GOES_ON:
        name = "previous_response_id"
        raise invalid(f"{name}: the response {response['id']} is {response['status']}, there is nothing to go on", name)
    return ITEMS.validate_python([*json.loads(stored.input), *response["output"]])


def to_chat(request: ResponsesRequest, items: list[Item]) -> ChatRequest:
    """The chat request of a conversation. Raises ApiError 400."""
    with named(FIELDS):
        return chat_request(
            model=request.model,
            messages=_messages(request.instructions, items),
            max_completion_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            tools=[_chat_tool(tool) for tool in request.tools] if request.tools else None,
            tool_choice=_chat_choice(request),
            parallel_tool_calls=request.parallel_tool_calls,
            response_format=_chat_format(request.text),
            user=request.user,
            priority=request.priority,
            logprobs=request.wants_logprobs or None,
            top_logprobs=request.top_logprobs,
        )


def _messages(instructions: str | None, items: list[Item]) -> list[dict[str, Any]]:
    """Reasoning, text and calls that follow one another are one message of the assistant."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    calls: set[str] = set()
    assistant: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, FunctionOutputItem):
            if item.call_id not in calls:
                raise invalid(f"input: no function_call has the call_id {item.call_id!r} of an output", "input")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            assistant = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
            assistant = None
        else:
            if assistant is None or not _continues(assistant, item):
                assistant = {"role": "assistant"}
                messages.append(assistant)
            _extend(assistant, item)
            if isinstance(item, FunctionCallItem):
                calls.add(item.call_id)
    return messages


def _continues(assistant: dict[str, Any], item: Item) -> bool:
    """Whether the item belongs to the assistant's message: text and reasoning do where there is only reasoning yet."""
    return isinstance(item, FunctionCallItem) or assistant.keys() <= {"role", "reasoning_content"}


def _extend(assistant: dict[str, Any], item: Item) -> None:
    if isinstance(item, ReasoningItem):
        thoughts = "".join(part.text for part in item.content or item.summary or [])
        assistant["reasoning_content"] = assistant.get("reasoning_content", "") + thoughts
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        assistant.setdefault("tool_calls", []).append(call)
    elif isinstance(item, MessageItem):
        assistant["content"] = _text(item.content)


def _text(content: str | list[InputText | OutputText] | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _chat_choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice.name}}


def _chat_format(text: TextConfig | None) -> dict[str, Any] | None:
    wanted = text.format if text is not None else None
    if wanted is None or isinstance(wanted, PlainFormat):
        return {"type": wanted.type} if wanted is not None else None
    return {
        "type": "json_schema",
        "json_schema": wanted.model_dump(exclude={"type"}, exclude_none=True, by_alias=True),
    }


def listed(items: list[Item]) -> list[dict[str, Any]]:
    """Items as a client may ask for them: each with an id and a status, texts as parts."""
    return [_listed(item) for item in items]


def _listed(item: Item) -> dict[str, Any]:
    data = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem):
        parts = [{"text": item.content}] if isinstance(item.content, str) else data["content"]
        data["content"] = [_listed_part(item.role, part) for part in parts]
    if isinstance(item, ReasoningItem):
        data.setdefault("summary", [])
    return {"id": new_id(ID_PREFIX[item.type]), "status": "completed", **data}


def _listed_part(role: str, part: dict[str, Any]) -> dict[str, Any]:
    if role == "assistant":
        return {"annotations": [], **part, "type": "output_text"}
    return {"type": "input_text", "text": part["text"]}
