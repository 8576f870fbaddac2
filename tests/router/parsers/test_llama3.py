"""Bare JSON objects as calls."""

import pytest

from router.gateway.parsers.llama3 import Llama3Parser
from tests.router.parsers.drive import Outcome, make, parse

ONE = '{"name": "f", "parameters": {"a": "; {"}}'
CALL = ("f", '{"a": "; {"}')


@pytest.mark.parametrize(
    ("output", "text", "calls"),
    [
        (ONE, "", [CALL]),
        (f"\n {ONE}\n", "", [CALL]),
        (f"<|python_tag|>{ONE}", "", [CALL]),
        (f"Wait.\n<|python_tag|> {ONE}", "Wait.", [CALL]),
        (f"{ONE}; {ONE};\n{ONE}", "", [CALL] * 3),
        (f"{ONE}\n<|python_tag|>{ONE}", "", [CALL] * 2),
        (f"{ONE} Done; {ONE}", f" Done; {ONE}", [CALL]),
        ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"parameters": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
        ('{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('{"name": "f", "parameters": {"a": 1}', "", [("f", '{"a": 1}')]),
        ('{"name": "f", "parameters": {"a": 1', "", [("f", '{"a": 1')]),
    ],
)
def test_calls_and_text(output: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert parse(Llama3Parser, output) == (text, calls)


@pytest.mark.parametrize(
    "output",
    [
        "Hello {world}; \n",
        f"See: {ONE}",
        '{"city": "Paris", "name": 3}',
        '{"name": "Alice", "age": 5}',
        '{"name": "Alice"}\n',
        '{"name": "f", "parameters"',
        '<|python_tag|>brave_search.call(query="x")',
        "<|python_tag|>",
        "<|python",
        "{",
        "; x",
    ],
)
def test_what_is_no_call_is_text_unchanged(output: str) -> None:
    assert parse(Llama3Parser, output) == (output, [])


def test_the_name_comes_where_the_parameters_begin() -> None:
    parser, outcome = make(Llama3Parser), Outcome()
    outcome.add(parser.push('{"name": "f", "parameters":'))
    assert outcome.calls == []
    outcome.add(parser.push(' {"a'))
    assert outcome.calls == [("f", '{"a')]


def test_an_answer_that_is_no_object_is_not_held_back() -> None:
    parser = make(Llama3Parser)
    assert parser.push("Well").text == "Well"
    assert parser.push(", {").text == ", {"
