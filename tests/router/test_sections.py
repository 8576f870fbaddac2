"""Answers as sections, whatever the borders of pieces are."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.gateway.parsers import CallDelta
from router.gateway.sections import Sections
from tests.router.scripted import piece, tool_pieces


def sections_of(pieces: list) -> list[tuple[str, str, str, str]]:
    """Kind, id, name and text of every section, from the steps alone."""
    sections = Sections()
    shown: list[list[str]] = []
    open_one = None
    for one in pieces:
        for step in sections.push(one):
            if step.what == "open":
                assert open_one is None
                assert step.section.number == len(shown)
                open_one = step.section
                shown.append([open_one.kind, open_one.call_id, open_one.name, ""])
            elif step.what == "grow":
                assert step.section is open_one
                assert step.text
                shown[-1][3] += step.text
            else:
                assert step.section is open_one
                open_one = None
    assert open_one is None
    assert [one.text for one in sections.all] == [one[3] for one in shown]
    return [tuple(one) for one in shown]  # type: ignore[misc]


def test_an_answer_of_every_kind() -> None:
    assert sections_of(tool_pieces()) == [
        ("reasoning", "", "", "I need both."),
        ("text", "", "", "\n\nLet me look.\n"),
        ("call", "call_a", "weather", '{"city": "Paris"}'),
        ("call", "call_b", "time", "{}"),
    ]


def test_white_space_alone_is_no_section_unless_there_is_nothing_else() -> None:
    call = piece(" \n", calls=(CallDelta(0, "a", "f", "{}"),))
    assert [kind for kind, *_ in sections_of([piece("\n"), call, piece("\n"), piece(finish="tool_calls")])] == ["call"]
    assert sections_of([piece(" "), piece("\n", "stop")]) == [("text", "", "", " \n")]
    assert sections_of([piece("", "length")]) == [("text", "", "", "")]
    assert sections_of([piece(" "), piece(" a "), piece(" ", "stop")]) == [("text", "", "", "  a  ")]


def test_reasoning_alone_is_followed_by_an_empty_text_unless_it_broke_off() -> None:
    thought = piece(reasoning="Hm", reasoning_tokens=1)
    assert sections_of([thought, piece("", "stop")]) == [("reasoning", "", "", "Hm"), ("text", "", "", "")]
    assert sections_of([thought, piece("", "length")]) == [("reasoning", "", "", "Hm")]


def test_text_between_two_calls() -> None:
    calls = [piece(calls=(CallDelta(0, "a", "f", "{"),)), piece(" and ", calls=(CallDelta(0, None, None, "}"),))]
    calls.append(piece(finish="tool_calls", calls=(CallDelta(1, "b", "g", "{}"),)))
    assert sections_of(calls) == [("call", "a", "f", "{}"), ("text", "", "", " and "), ("call", "b", "g", "{}")]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="ab \n", max_size=3), min_size=1, max_size=8), st.booleans())
def test_text_is_never_lost(texts: list[str], thinks: bool) -> None:
    pieces = [piece(reasoning="x")] if thinks else []
    shown = sections_of([*pieces, *(piece(text) for text in texts), piece("", "stop")])
    assert shown[-1][3] == "".join(texts)
