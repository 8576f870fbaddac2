"""Calls in Python's syntax."""

import json
from typing import Any

import pytest

from router.gateway.parsers.pythonic import PythonicParser
from tests.router.parsers.drive import make, parse


@pytest.mark.parametrize(
    ("output", "text", "calls"),
    [
        ("[f()]", "", [("f", {})]),
        ('[get_weather(city="Paris", days=3), f()]', "", [("get_weather", {"city": "Paris", "days": 3}), ("f", {})]),
        ("\n<|python_start|>[f(a=1,)]<|python_end|>\n", "", [("f", {"a": 1})]),
        ("Well: <|python_start|>[f(a=1)] <|python_end|> so", "Well: so", [("f", {"a": 1})]),
        ("[a.b-c(a=-1.5e3)]", "", [("a.b-c", {"a": -1500.0})]),
        (
            "[f(a=True, b=False, c=None, d=true, e=null)]",
            "",
            [("f", {"a": True, "b": False, "c": None, "d": True, "e": None})],
        ),
        ("[f(a=[1, [2,], {'k': (3, 4)}], b={}, c=())]", "", [("f", {"a": [1, [2], {"k": [3, 4]}], "b": {}, "c": []})]),
        ("""[f(a='it"s', b="it's)]", c='\\'')]""", "", [("f", {"a": 'it"s', "b": "it's)]", "c": "'"})]),
        ('''[f(a="""x"y\n'z""", b='')]''', "", [("f", {"a": "x\"y\n'z", "b": ""})]),
        (r'[f(a="\n\t\x41\u00e9\U0001F600\101\q\/")]', "", [("f", {"a": "\n\tAé😀A\\q\\/"})]),
        (r'[f(a="\ud83d\ude00")]', "", [("f", {"a": "😀"})]),
        ("[f(class=1, from = 'x')]", "", [("f", {"class": 1, "from": "x"})]),
        ("[f(a=1)] Good?", " Good?", [("f", {"a": 1})]),
        ("[f(a=1), g(b=", ", g(b=", [("f", {"a": 1})]),
        ("[f(a=1), g(b)]", ", g(b)]", [("f", {"a": 1})]),
    ],
)
def test_calls_and_text(output: str, text: str, calls: list[tuple[str, Any]]) -> None:
    found_text, found = parse(PythonicParser, output)
    assert (found_text, [(name, json.loads(arguments)) for name, arguments in found]) == (text, calls)


@pytest.mark.parametrize(
    "output",
    [
        "See [f(a=1)].\n",
        "[1, 2]",
        "[link](http://x)",
        "[f]",
        "[f (a=1)]",
        "[]",
        "[f(1)]",
        "[f(a=b)]",
        "[f(a=b())]",
        "[f(a=1+1)]",
        "[f(a=1 2)]",
        "[f(a='x' 'y')]",
        "[f(a=f'x')]",
        "[f(a=(1))]",
        "[f(a=[1})]",
        "[f(a={1: 2})]",
        "[f(a={1})]",
        "[f(a=lambda: 1)]",
        "[f(a=0x10)]",
        "[f(a=1}, b={1)]",
        "[f(a=1])]",
        "[f(a=1}",
        r"[f(a='\Uffffffff')]",
        "[f(**{'a': 1})]",
        "[f(a=,)]",
        "[f(a=1",
        "[f(a='x",
        "[f(a='x\\",
        "<|python_start|>[f(a=1",
        "<|python_start|>print(1)<|python_end|>",
    ],
)
def test_what_is_no_call_is_text_unchanged(output: str) -> None:
    assert parse(PythonicParser, output) == (output, [])


def test_numbers_stay_as_written() -> None:
    digits = "9" * 5000
    assert parse(PythonicParser, f"[f(a={digits}, b=1e999)]") == ("", [("f", f'{{"a": {digits}, "b": 1e999}}')])


def test_a_call_comes_when_it_is_complete() -> None:
    parser = make(PythonicParser)
    assert parser.push("[f(a=1").calls == ()
    assert parser.push(")").calls[0].arguments == '{"a": 1}'
    assert parser.push(", g()").calls[0].name == "g"


def test_an_answer_that_is_no_list_is_not_held_back() -> None:
    parser = make(PythonicParser)
    assert parser.push("[1").text == ""
    assert parser.push(",").text == "[1,"
    assert parser.push(" [f(").text == " [f("
