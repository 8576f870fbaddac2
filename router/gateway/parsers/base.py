"""What parsers have in common: pieces of text go in, pieces of text, reasoning and calls come out."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from router.gateway.parsers.grammar import ToolSpec
from router.gateway.parsers.source import SPACE, Reading, Source


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a tool call: `id` and `name` come with its first part, and only there; `arguments` is the next piece of
    the JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """What has become certain with a piece of output."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class TrimmedText:
    """Text whose trailing white space is kept until something follows: next to a marker it belongs to the format, and a
    chat template writes it again."""

    def __init__(self) -> None:
        self._certain: list[str] = []
        self._space: list[str] = []

    def add(self, piece: str) -> None:
        """Add text at the end."""
        body = piece.rstrip(" \t\r\n")
        if body:
            self.keep_space()
            self._certain.append(body)
        self._space.append(piece[len(body) :])

    def keep_space(self) -> None:
        """The white space at the end is text like any other."""
        self._certain += self._space
        self._space.clear()

    def drop_space(self) -> None:
        """A marker follows."""
        self._space.clear()

    def take(self) -> str:
        """What is certain and was not taken yet."""
        text = "".join(self._certain)
        self._certain.clear()
        return text


class Parser(ABC):
    """Parses the output of one choice. How it is cut into pieces makes no difference to what comes out in all."""

    def __init__(self) -> None:
        self._source = Source()
        self._text = TrimmedText()
        self._reading = self._read()

    def push(self, text: str) -> Parsed:
        """The next piece of output; returns what is certain by now."""
        self._source.feed(text)
        next(self._reading, None)
        return self._take()

    def finish(self) -> Parsed:
        """The output has ended, complete or not; returns the rest."""
        self._source.end()
        next(self._reading, None)
        self._at_end()
        return self._take()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Reads the source to its end."""

    def _at_end(self) -> None:
        """What becomes certain because the output has ended."""
        self._text.keep_space()

    def _take(self) -> Parsed:
        return Parsed(text=self._text.take())


class ReasoningParser(Parser):
    """Splits reasoning from the answer. `open`: the prompt's end has already opened the reasoning. `thinking`: the
    output is inside reasoning, as far as is known."""

    name: str
    special_tokens: tuple[str, ...]  # texts of special tokens that have to be visible in the decoded text

    def __init__(self, open: bool) -> None:
        self._open = open
        self.thinking = open
        self._reasoning = TrimmedText()
        super().__init__()

    @staticmethod
    @abstractmethod
    def opened_by(prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning."""

    def _at_end(self) -> None:
        super()._at_end()
        self._reasoning.keep_space()

    def _take(self) -> Parsed:
        return Parsed(text=self._text.take(), reasoning=self._reasoning.take())


def new_call_id() -> str:
    """An id as OpenAI's clients expect it."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class _Part:
    index: int
    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)


class ToolParser(Parser):
    """Finds tool calls.

    What is no call comes out as text, unchanged; only white space next to a call is left out. A call is sent whatever
    its name: whether such a tool exists is for the application to judge. Arguments are a JSON object if the output is
    well formed; from where it is not they come as the model wrote them, so that nobody takes them for valid ones.
    """

    name: str
    special_tokens: tuple[str, ...]  # texts of special tokens that have to be visible in the decoded text

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._count = 0
        self._after_call = False  # a call is the last that there was
        self._parts: list[_Part] = []
        super().__init__()

    @classmethod
    @abstractmethod
    def grammar(cls, tools: Sequence[ToolSpec], many: bool, marker_ids: Mapping[str, int]) -> str:
        """A Lark grammar, as llguidance reads it, of one call of these tools, or with `many` of one or more, in the
        format that this parser reads. `marker_ids`: the tokenizer's added tokens, special or not; a marker that is
        among them is written as that token. Raises ValueError for a tool that this format cannot call."""

    def _say(self, text: str) -> None:
        """Text that belongs to no call."""
        self._text.add(text)
        if text.strip(" \t\r\n"):
            self._after_call = False

    def _give_up(self) -> None:
        """What was recorded turned out to be no call."""
        self._say(self._source.forget())

    def _begin_call(self, name: str) -> None:
        """What was recorded is the beginning of a call."""
        self._source.forget()
        self._text.drop_space()
        self._after_call = True
        self._parts.append(_Part(self._count, self._new_id(), name))
        self._count += 1

    def _argue(self, piece: str) -> None:
        """The next piece of the call's arguments."""
        if piece and not self._parts:
            self._parts.append(_Part(self._count - 1))
        if piece:
            self._parts[-1].arguments.append(piece)

    def _read_list(self, read_call: Callable[[], Reading[bool]]) -> Reading[None]:
        """Calls with commas between them, from after the bracket that opens their list to the one that closes it."""
        source = self._source
        while True:
            yield from source.run(SPACE)
            if not (yield from read_call()):
                return self._give_up()
            source.record()
            yield from source.run(SPACE)
            if (yield from source.skip("]")):
                source.forget()
                return None
            if not (yield from source.skip(",")):
                return self._give_up()

    def _at_end(self) -> None:
        if self._after_call:
            self._text.drop_space()
        super()._at_end()

    def _take(self) -> Parsed:
        parts, self._parts = self._parts, []
        calls = tuple(CallDelta(part.index, part.id, part.name, "".join(part.arguments)) for part in parts)
        return Parsed(text=self._text.take(), calls=calls)
