"""Sections: an answer as a row of parts of one kind each, as the formats with typed items show it: reasoning, text, and
every tool call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from router.gateway.choice import Piece


@dataclass(slots=True)
class Section:
    """One part of an answer. `number` is its place; a call has an id and a name, and its text is its arguments."""

    kind: Literal["reasoning", "text", "call"]
    number: int
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to a section next; `text` is what it grows by."""

    what: Literal["open", "grow", "close"]
    section: Section
    text: str = ""


class Sections:
    """Divides the pieces of one answer. One section is open at a time.

    White space alone is no section: it comes out at the head of the text that follows it, and not at all before a call
    or at the end.
    """

    def __init__(self) -> None:
        self.all: list[Section] = []
        self._open: Section | None = None
        self._blank = ""

    def push(self, piece: Piece) -> list[Step]:
        """The steps of one piece; with its `finish_reason` everything is closed, and an answer has a text if it has
        nothing else to show."""
        steps: list[Step] = []
        if piece.reasoning:
            self._to("reasoning", piece.reasoning, steps)
        begun = next((place for place, call in enumerate(piece.calls) if call.id is not None), len(piece.calls))
        for call in piece.calls[:begun]:  # the rest of the call that is open, before any text of this piece
            self._grow(call.arguments, steps)
        if piece.text:
            self._say(piece.text, steps)
        for call in piece.calls[begun:]:
            if call.id is not None:
                self._begin("call", steps, call.id, call.name or "")
            self._grow(call.arguments, steps)
        if piece.finish_reason is not None:
            self._end(piece.finish_reason, steps)
        return steps

    def stop(self) -> list[Step]:
        """The steps of an answer that goes no further."""
        steps: list[Step] = []
        self._close(steps)
        return steps

    def _say(self, text: str, steps: list[Step]) -> None:
        if self._open is None or self._open.kind != "text":
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
        self._to("text", text, steps)

    def _to(self, kind: Literal["reasoning", "text"], text: str, steps: list[Step]) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(kind, steps)
        self._grow(text, steps)

    def _begin(
        self, kind: Literal["reasoning", "text", "call"], steps: list[Step], call_id: str = "", name: str = ""
    ) -> None:
        self._close(steps)
        self._blank = ""
        self._open = Section(kind, len(self.all), call_id, name)
        self.all.append(self._open)
        steps.append(Step("open", self._open))

    def _grow(self, text: str, steps: list[Step]) -> None:
        if text and self._open is not None:
            self._open.parts.append(text)
            steps.append(Step("grow", self._open, text))

    def _close(self, steps: list[Step]) -> None:
        if self._open is not None:
            steps.append(Step("close", self._open))
            self._open = None

    def _end(self, finish_reason: str, steps: list[Step]) -> None:
        thought_only = bool(self.all) and self.all[-1].kind == "reasoning"
        if not self.all or (thought_only and finish_reason != "length"):
            blank = self._blank
            self._begin("text", steps)
            self._grow(blank, steps)
        self._close(steps)
