"""Tools, calls and results as plain text."""

import json

from router.gateway.parsers.hermes import HermesParser
from router.gateway.parsers.prompt import call_as_text, result_as_text, tools_as_text
from tests.router.parsers.drive import parse

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Über\n", "parameters": {"type": "object"}}}
    for name in ("f", "g")
]


def test_every_tool_is_one_line_of_json() -> None:
    lines = tools_as_text(TOOLS).splitlines()
    start, end = lines.index("<tools>"), lines.index("</tools>")
    assert [json.loads(line) for line in lines[start + 1 : end]] == TOOLS
    assert "Über" in lines[start + 1]


def test_the_example_and_calls_are_what_the_parser_reads() -> None:
    text = tools_as_text(TOOLS)
    example = text[text.index("<tool_call>") : text.index("</tool_call>") + len("</tool_call>")]
    assert parse(HermesParser, example) == ("", [("function", '{"parameter": "value"}')])
    assert parse(HermesParser, call_as_text('f "é"', '{"a": 1}')) == ("", [('f "é"', '{"a": 1}')])
    assert parse(HermesParser, call_as_text("f", "")) == ("", [("f", "{}")])


def test_results_stand_between_tags() -> None:
    assert result_as_text("21 °C") == "<tool_response>\n21 °C\n</tool_response>"
