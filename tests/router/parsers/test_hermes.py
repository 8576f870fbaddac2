"""Calls between <tool_call> tags."""

import json

import pytest

from router.gateway.parsers.hermes import HermesParser
from tests.router.parsers.drive import Outcome, make, parse

ONE = '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}]"}]}}\n</tool_call>'
ARGUMENTS = '{"a": [1, {"b": "}]"}]}'


@pytest.mark.parametrize(
    ("output", "text", "calls"),
    [
        ("Hello, 1 < 2 <b>there</b>. \n", "Hello, 1 < 2 <b>there</b>. \n", []),
        ("", "", []),
        (ONE, "", [("f", ARGUMENTS)]),
        (f"Sure.\n\n{ONE}\n{ONE}\n", "Sure.", [("f", ARGUMENTS)] * 2),
        (f"{ONE} And more. ", " And more. ", [("f", ARGUMENTS)]),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"arguments": {"a": 1}, "id": [2], "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}</tool_call>', "", [("f", '{"a": "\\n"}')]),
        ('<tool_call>{"name": "h\\u00e9 \\"x\\"", "arguments": {}}</tool_call>', "", [('hé "x"', "{}")]),
        # Written without a brace, with one too many, without a closing tag.
        ('<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {}}}\n</tool_call> end', "} end", [("f", "{}")]),
        (f'<tool_call>{{"name": "f", "arguments": {{}}}}\n{ONE}', "", [("f", "{}"), ("f", ARGUMENTS)]),
        # Not JSON from within the arguments on: what the model wrote, up to the end of the call.
        (r'<tool_call>{"name": "f", "arguments": {"a": "\d"}}</tool_call>!', "!", [("f", r'{"a": "\d"}}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>', "", [("f", '{"a": 01}}')]),
        ('<tool_call>{"name": "f" oops}</tool_call>', "", [("f", " oops}")]),
        ('<tool_call>{"name": "f", "x": {y}}</tool_call>', "", [("f", ', "x": {y}}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>', "", [("f", '{"a": [1}}')]),
        (r'<tool_call>{"name": "f", "arguments": {"a": "\u123"}}</tool_call>', "", [("f", r'{"a": "\u123"}}')]),
        # Not JSON after the arguments: text.
        ('<tool_call>{"name": "f", "arguments": {}, "x": y}</tool_call>', ', "x": y}', [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}, "arguments": {"a": 1}}', ', "arguments": {"a": 1}}', [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}, "x', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "argu', "", [("f", "")]),
        # A tag that is no call's after a call that was not closed.
        (f"{ONE[:-12]}<tool_call>x</tool_call>", "\n<tool_call>x</tool_call>", [("f", ARGUMENTS)]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [("f", '{"a": 1}')]),
        # Control characters in strings are escaped.
        ('<tool_call>{"name": "f", "arguments": {"a": "x\n\ty"}}</tool_call>', "", [("f", '{"a": "x\\n\\ty"}')]),
    ],
)
def test_calls_and_text(output: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert parse(HermesParser, output) == (text, calls)


@pytest.mark.parametrize(
    "output",
    [
        "<tool_call>",
        " <tool_call> \n x ",
        "<tool_call>\nno JSON\n</tool_call>\n",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": ""}</tool_call>',
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        '<tool_call>{"name": "f',
        '<tool_call>{"arguments": {"a": 1}, "name": "f',
        "<tool_call><tool_call",
        "[1] <tool",
        "</tool_call>",
    ],
)
def test_what_is_no_call_is_text_unchanged(output: str) -> None:
    assert parse(HermesParser, output) == (output, [])


def test_a_second_opening_tag_begins_the_call() -> None:
    assert parse(HermesParser, f"<tool_call>\n{ONE}") == ("<tool_call>", [("f", ARGUMENTS)])


def test_name_and_arguments_come_as_soon_as_they_are_known() -> None:
    parser, outcome = make(HermesParser), Outcome()
    outcome.add(parser.push('Let me see.\n<tool_call>\n{"name": "get_weather'))
    assert (outcome.text, outcome.calls) == ("Let me see.", [])
    outcome.add(parser.push('"'))
    assert outcome.calls == [("get_weather", "")]
    outcome.add(parser.push(', "arguments": {"city": "Par'))
    assert outcome.calls == [("get_weather", '{"city": "Par')]
    outcome.add(parser.push('is"}'))
    assert json.loads(outcome.calls[0][1]) == {"city": "Paris"}


def test_output_that_breaks_off_keeps_what_was_sent() -> None:
    output = f'{ONE}\n<tool_call>\n{{"name": "g", "arguments": {{"a": "xy'
    assert parse(HermesParser, output) == ("", [("f", ARGUMENTS), ("g", '{"a": "xy')])


def test_text_that_cannot_begin_a_call_is_not_held_back() -> None:
    parser = make(HermesParser)
    assert parser.push("a <tool_").text == "a"
    assert parser.push("box>").text == " <tool_box>"
    assert parser.push("b").text == "b"


def test_ids_are_random_and_as_long_as_openai_has_them() -> None:
    ids = {HermesParser().push(ONE).calls[0].id for _ in range(20)}
    assert len(ids) == 20
    assert all(i and i.startswith("call_") and len(i) == 29 and int(i[5:], 16) >= 0 for i in ids)
