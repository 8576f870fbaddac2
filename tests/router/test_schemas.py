"""Errors name the field that is at fault, inside of unions, too."""

import json
from typing import Any

import pytest

from router.gateway.errors import ApiError
from router.gateway.schemas.chat import MAX_TOOLS, ChatRequest
from router.gateway.schemas.common import parse
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
