"""Calls after [TOOL_CALLS], in a list or one by one."""

import pytest

from router.gateway.parsers.mistral import MistralParser
from tests.router.parsers.drive import Outcome, make, parse


@pytest.mark.parametrize(
    ("output", "text", "calls"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}]', "", [("f", '{"a": "]"}')]),
        (
            'Now. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "123456789"},\n{"name": "g"}] ',
            "Now.",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        ('[TOOL_CALLS]f[ARGS]{"a": {}}', "", [("f", '{"a": {}}')]),
        ('[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
        ('[TOOL_CALLS]f[CALL_ID]Ab3[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        ('[TOOL_CALLS]a.f[ARGS] {"a": 1}\n[TOOL_CALLS]g[ARGS]{} x', " x", [("a.f", '{"a": 1}'), ("g", "{}")]),
        # Broken off, or not well formed.
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"nam', ', {"nam', [("f", "{}")]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}} oops]', " oops]", [("f", "{}")]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, 5]', ", 5]", [("f", "{}")]),
        ("[TOOL_CALLS]f[ARGS]{a}[TOOL_CALLS]g[ARGS]{}", "", [("f", "{a}"), ("g", "{}")]),
        ("[TOOL_CALLS]f[ARGS]", "", [("f", "")]),
    ],
)
def test_calls_and_text(output: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert parse(MistralParser, output) == (text, calls)


@pytest.mark.parametrize(
    "output",
    [
        "[1] [TOOL_CALL] ",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS]name",
        "[TOOL_CALLS]two words[ARGS]{}",
        "[TOOL_CALLS]f[CALL_ID]x",
        '[TOOL_CALLS]{"name": "f"}',
        "[TOOL_CALLS][TOOL_CALLS",
    ],
)
def test_what_is_no_call_is_text_unchanged(output: str) -> None:
    assert parse(MistralParser, output) == (output, [])


def test_name_and_arguments_come_as_soon_as_they_are_known() -> None:
    parser, outcome = make(MistralParser), Outcome()
    outcome.add(parser.push("[TOOL_CALLS]get_weather"))
    assert outcome.calls == []
    outcome.add(parser.push("[ARGS]"))
    assert outcome.calls == [("get_weather", "")]
    outcome.add(parser.push('{"city": "P'))
    assert outcome.calls == [("get_weather", '{"city": "P')]
