"""A chat as its template wants it: roles and tools that the template does not know are put in words that it does."""

from __future__ import annotations

import json
from typing import Any

from router.gateway.parsers.prompt import call_as_text, result_as_text, tools_as_text
from router.gateway.schemas.chat import ChatRequest

Message = dict[str, Any]


def conversation(request: ChatRequest, template: str) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Messages and tools for a chat template."""
    messages = [message.plain() for message in request.messages]
    tools = [tool.model_dump(exclude_none=True) for tool in shown_tools(request)]
    if "developer" not in template:
        for message in messages:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    if "tools" in template:
        return messages, tools or None
    return _without_tools(messages, tools), None


def shown_tools(request: ChatRequest) -> list[Any]:
    """The tools that the model is to know of."""
    return [] if request.tool_choice == "none" else list(request.tools or [])


def _without_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """The same as plain text in messages of system, user and assistant."""
    plain = [_in_words(message) for message in messages]
    if tools:
        text = tools_as_text([tool["function"] for tool in tools])
        if plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain


def _in_words(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": result_as_text(message["content"])}
    if calls := message.pop("tool_calls", None):
        functions = [call["function"] for call in calls]
        texts = [call_as_text(one["name"], _as_json(one["arguments"])) for one in functions]
        message["content"] = "\n".join([*filter(None, [message["content"]]), *texts])
    return message


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
