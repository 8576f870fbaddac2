"""Pushes output through a parser and collects what comes out."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from router.gateway.parsers import Parsed, ReasoningParser, ToolParser


@dataclass
class Outcome:
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments

    def add(self, parsed: Parsed) -> None:
        self.text += parsed.text
        self.reasoning += parsed.reasoning
        for delta in parsed.calls:
            if delta.name is None:
                assert delta.id is None
                assert delta.index == len(self.calls) - 1
                assert delta.arguments
            else:
                assert delta.id == f"id{delta.index}"
                assert delta.index == len(self.calls)
                self.calls.append((delta.name, ""))
            name, arguments = self.calls[-1]
            self.calls[-1] = name, arguments + delta.arguments


def make(kind: type[ToolParser]) -> ToolParser:
    """A parser that numbers its calls' ids."""
    ids = (f"id{number}" for number in range(10**9))
    return kind(lambda: next(ids))


def run(parser: ToolParser | ReasoningParser, pieces: Iterable[str]) -> Outcome:
    """Everything that comes out for output in these pieces."""
    outcome = Outcome()
    for piece in pieces:
        outcome.add(parser.push(piece))
    outcome.add(parser.finish())
    return outcome


def parse(kind: type[ToolParser], output: str) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls; whole and character by character, which must be the same."""
    whole = run(make(kind), [output])
    assert run(make(kind), output) == whole
    return whole.text, whole.calls
