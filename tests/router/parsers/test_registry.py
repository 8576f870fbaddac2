"""Parsers by name, and by what chat templates look like."""

import pytest

from router.gateway.parsers import REASONING_PARSERS, TOOL_PARSERS, reasoning_parser, tool_parser

# Lines of the templates that models of these families come with.
QWEN = "{{- '\\n<tool_call>\\n{\"name\": \"' + tool_call.name }} ... {% if '</think>' in content %}<think>"
LLAMA_31 = "{%- if message.role == 'ipython' %} {{- '<|python_tag|>' + tool_call.name + '.call(' }} [loop.index0 - 1]"
LLAMA_32 = (
    '{{- \'{"name": "\' + tool_call.name + \'", \' }} {%- elif message.role == "tool" or message.role == "ipython" %}'
)
LLAMA_4 = "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)] {'ipython'}"
MISTRAL = '{{- "[TOOL_CALLS] [" }} {%- for tool_call in message.tool_calls %}'


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN, "hermes"),
        (LLAMA_31, "llama3"),
        (LLAMA_32, "llama3"),
        (LLAMA_4, "pythonic"),
        (MISTRAL, "mistral"),
        ("{{ message.content }}", "hermes"),
        (None, "hermes"),
    ],
)
def test_the_template_shows_the_tool_parser(template: str | None, name: str) -> None:
    assert tool_parser("auto", template) is TOOL_PARSERS[name]


def test_the_template_shows_whether_there_is_reasoning() -> None:
    assert reasoning_parser("auto", QWEN) is REASONING_PARSERS["think"]
    assert reasoning_parser("auto", "content.split('</think>')[-1]") is REASONING_PARSERS["think"]
    assert reasoning_parser("auto", LLAMA_31) is None
    assert reasoning_parser("auto", None) is None


def test_names_count_more_than_the_template() -> None:
    assert set(TOOL_PARSERS) == {"hermes", "llama3", "mistral", "pythonic"}
    assert all(tool_parser(name, QWEN) is kind for name, kind in TOOL_PARSERS.items())
    assert reasoning_parser("think", None) is REASONING_PARSERS["think"]
    assert reasoning_parser("none", QWEN) is None


def test_an_unknown_name_is_an_error_that_shows_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'hermis'; known are: auto, hermes, llama3, mistral, pythonic"):
        tool_parser("hermis", QWEN)
    with pytest.raises(ValueError, match="'thunk'; known are: auto, none, think"):
        reasoning_parser("thunk", QWEN)
