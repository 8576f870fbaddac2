"""Errors name the field that is at fault, inside of unions, too."""

import json
from typing import Any

import pytest

from router.gateway.errors import ApiError
from router.gateway.schemas.chat import MAX_TOOLS, ChatRequest
from router.gateway.schemas.common import parse
from router.gateway.schemas.messages import MessagesRequest
from router.gateway.schemas.responses import ResponsesRequest
from router.gateway.schemas.tokens import TokenizeRequest

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}}, "tool_choice.function.x"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"tools": [TOOL, {**TOOL, "strict": True}]}, "tools.1.strict"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
        ({"store": True}, "store"),
        ({"store": 0}, "store"),  # to Python it is False
        ({"temperature": float("inf")}, "temperature"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),  # a logit divided by it is infinite
        ({"messages": [{"role": "user", "content": "Hi", "later": 0}]}, "messages.0.later"),
        ({"later": None}, "later"),
    ],
)
def test_the_field_at_fault(fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    with pytest.raises(ApiError) as refused:
        parse(ChatRequest, json.dumps(body).encode())
    assert refused.value.param == param
    assert refused.value.message.startswith(f"{param}: ")


def test_tools_have_the_same_bound_everywhere() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL] * (MAX_TOOLS + 1)}
    for kind in (ChatRequest, TokenizeRequest):
        with pytest.raises(ApiError, match=f"at most {MAX_TOOLS} items") as refused:
            parse(kind, json.dumps(body).encode())
        assert refused.value.param == "tools"


CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}
SAID = {
    "role": "assistant",
    "content": "Hi",
    "tool_calls": [CALL],
    "parsed": {"a": 1},
    "annotations": [],
    "later": None,
}
ITEMS = [
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hi", "parsed": 1, "later": None}],
    },
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "parsed_arguments": {}, "async_": None},
]
BLOCKS = [
    {"type": "text", "text": "Hi", "later": None},
    {"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": None},
]


def test_what_the_official_clients_add_to_their_objects_says_nothing() -> None:
    """Their helpers add what they parsed, and each version has fields of its own, which are null."""
    hi = {"role": "user", "content": "Hi"}
    chat = parse(ChatRequest, json.dumps({"model": "m", "messages": [hi, SAID]}).encode())
    plain = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert chat.messages[1].plain() == {"role": "assistant", "content": "Hi", "tool_calls": [plain]}
    responses = parse(ResponsesRequest, json.dumps({"model": "m", "input": ITEMS}).encode())
    dumped = json.dumps([item.model_dump(exclude_none=True) for item in responses.input])  # type: ignore[union-attr]
    assert "parsed" not in dumped
    blocks = [hi, {"role": "assistant", "content": BLOCKS}, hi]
    assert parse(MessagesRequest, json.dumps({"model": "m", "max_tokens": 1, "messages": blocks}).encode())
