"""However output is cut, the same comes out; nothing is lost; the work grows with the length and no faster."""

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.parsers import TOOL_PARSERS, ReasoningParser, ToolParser
from router.gateway.parsers.think import ThinkParser
from tests.router.parsers.drive import make, run

KINDS: dict[str, Callable[[], ToolParser | ReasoningParser]] = {
    **{name: lambda kind=kind: make(kind) for name, kind in TOOL_PARSERS.items()},  # type: ignore[misc]
    "think": lambda: ThinkParser(False),
    "think open": lambda: ThinkParser(True),
}
MARKERS = [marker for kind in TOOL_PARSERS.values() for marker in kind.special_tokens] + ["<think>", "</think>"]
CALLS = [
    '<tool_call>\n{"name": "f", "arguments": {"a": "\\u00e9\\n", "b": [1, -2.5e3, null]}}\n</tool_call>',
    '{"name": "f", "parameters": {"a": {"b": true}}}; {"name": "g", "parameters": {}}',
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": [[]]}}, {"arguments": {}, "name": "g"}]',
    '[TOOL_CALLS]f[CALL_ID]123[ARGS]{"a": "x"}[TOOL_CALLS]g[ARGS]{}',
    """[f(a='x', b=[1, {"k": None}]), g(c=\"\"\"y\"\"\", d='\\'')]""",
    "<think>Hm. \n</think>\n\n",
]
FRAGMENTS = ['{"name"', ': "f"', ', "arguments": ', "{", "}", "[", "]", '"', "'", "\\", "\\u12", ",", ";", "(", ")"]
FRAGMENTS += [" ", "\n", "f(a=", "1.5", "-", "true", "nul", "x", "é", "\x00", "<", "f[ARGS]"]

parts = st.sampled_from(MARKERS) | st.sampled_from(CALLS) | st.sampled_from(FRAGMENTS) | st.text(max_size=3)


@st.composite
def broken(draw: st.DrawFn) -> str:
    """A call with something cut out or put in."""
    call = draw(st.sampled_from(CALLS))
    start = draw(st.integers(0, len(call)))
    end = draw(st.integers(start, min(len(call), start + 3)))
    return call[:start] + draw(st.sampled_from(["", *FRAGMENTS])) + call[end:]


outputs = st.lists(parts | broken(), max_size=8).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(output=outputs, cuts=st.lists(st.integers(0, 400), max_size=6))
def test_any_split_gives_the_same(kind: str, output: str, cuts: list[int]) -> None:
    whole = run(KINDS[kind](), [output])
    assert run(KINDS[kind](), output) == whole
    borders = [0, *sorted(min(cut, len(output)) for cut in cuts), len(output)]
    assert run(KINDS[kind](), [output[a:b] for a, b in pairwise(borders)]) == whole
    if not whole.calls and not kind.startswith("think"):
        assert whole.text == output


LONG = 100_000
LONG_OUTPUTS = [
    ("hermes", "<tool_call> < [ { " * (LONG // 18)),
    ("hermes", " " * LONG),
    ("hermes", '<tool_call>{"a": ' + "[" * LONG),
    ("hermes", '<tool_call>{"' + "k" * LONG),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * LONG),
    ("llama3", '{"name": "f", "parameters": {"a": "' + "x\\n" * (LONG // 3)),
    ("llama3", "<|python_tag|>" * (LONG // 14)),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {' + '"a": [1, "b"], ' * (LONG // 15)),
    ("mistral", "[TOOL_CALLS]" + "n" * LONG),
    ("mistral", "[TOOL_CALLS]f[ARGS]{" + "[TOOL_CALL " * (LONG // 11)),
    ("pythonic", "[f(a=[" + '"x", 1, (2,), ' * (LONG // 14) + "])]"),
    ("pythonic", "[f(a=" + '""' * (LONG // 2) + ")]"),
    ("pythonic", "[f(a=" + "(" * (LONG // 2) + ")" * (LONG // 2) + ")]"),
    ("pythonic", "[" + "f(a=1), " * (LONG // 8)),
    ("think", "<think>" + " </thin" * (LONG // 7)),
]


@pytest.mark.parametrize(("kind", "output"), LONG_OUTPUTS, ids=lambda value: value[:20])
def test_the_work_is_linear(kind: str, output: str) -> None:
    """100,000 characters take a fraction of a second, in one piece or in many; scanned again and again, minutes."""
    for size in (len(output), 4):
        parser = KINDS[kind]()
        start = time.process_time()
        for at in range(0, len(output), size):
            parser.push(output[at : at + size])
        parser.finish()
        assert time.process_time() - start < 3
