"""Reasoning between tags."""

import pytest

from router.gateway.parsers.think import ThinkParser
from tests.router.parsers.drive import run


@pytest.mark.parametrize(
    ("open", "output", "reasoning", "text"),
    [
        (False, "<think>\nHm. <b> \n</think>\n\nYes. \n", "Hm. <b>", "Yes. \n"),
        (False, "\n<think></think>Yes", "", "Yes"),
        (False, " No tags <think> here</think>.", "", " No tags <think> here</think>."),
        (False, "<thin", "", "<thin"),
        (False, "<think>broken off \n", "broken off \n", ""),
        (False, "", "", ""),
        (True, "Hm.\n</think>\nYes", "Hm.", "Yes"),
        (True, "<think>Hm</think>Yes</think>", "Hm", "Yes</think>"),
        (True, "never ends </thi", "never ends </thi", ""),
        (True, "</think>", "", ""),
    ],
)
def test_reasoning_and_text(open: bool, output: str, reasoning: str, text: str) -> None:
    whole = run(ThinkParser(open), [output])
    assert (whole.reasoning, whole.text) == (reasoning, text)
    assert run(ThinkParser(open), output) == whole


def test_reasoning_is_streamed() -> None:
    parser = ThinkParser(False)
    assert parser.push("<think>one t").reasoning == "one t"
    assert parser.push("wo</th").reasoning == "wo"
    last = parser.push("ink>three")
    assert (last.reasoning, last.text) == ("", "three")


def test_whether_a_prompt_ends_inside_reasoning() -> None:
    assert ThinkParser.opened_by("<|im_start|>assistant\n<think>\n")
    assert not ThinkParser.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not ThinkParser.opened_by("<|im_start|>assistant\n")
