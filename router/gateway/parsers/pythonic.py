"""Calls of Llama 4 and of Llama 3.2's small models, in Python's syntax: `[get_weather(city="Paris", days=3), f()]`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from router.gateway.parsers.base import ToolParser
from router.gateway.parsers.grammar import ToolSpec, calls_grammar, marker, quoted
from router.gateway.parsers.keywords import NAME, keyword_grammar, keywords_as_json
from router.gateway.parsers.source import SPACE, Reading, Sink

CLOSING = {"(": ")", "[": "]", "{": "}"}
START, END = "<|python_start|>", "<|python_end|>"
_PLAIN = re.compile(r"[^()\[\]{}\"']+")
_IN_STRING = re.compile(r"[^\\\"']+")


class PythonicParser(ToolParser):
    """The list stands at the start of the answer or after `<|python_start|>`. Each call is sent when it is complete."""

    name = "pythonic"
    special_tokens = (START, END)

    @classmethod
    def grammar(cls, tools: Sequence[ToolSpec], many: bool, marker_ids: Mapping[str, int]) -> str:
        bodies, rules = zip(*(keyword_grammar(tool, f"_{number}") for number, tool in enumerate(tools)), strict=True)
        start, end = (f"{marker(tag, marker_ids)}?" if tag in marker_ids else "" for tag in (START, END))
        return calls_grammar(
            bodies,
            one="call",
            separator=quoted(", ") if many else None,
            before=f"{start} {quoted('[')}",
            after=f"{quoted(']')} {end}",
            rules="\n".join(rules),
        )

    def _read(self) -> Reading[None]:
        source = self._source
        while True:
            source.record()
            yield from source.run(SPACE)
            yield from source.skip(START)
            yield from source.run(SPACE)
            if (yield from source.skip("[")):
                yield from self._read_list(self._read_call)
                source.record()
                yield from source.run(SPACE)
                if (yield from source.skip(END)):
                    source.forget()
            self._give_up()
            if not (yield from source.until((START,), self._say)):
                return

    def _read_call(self) -> Reading[bool]:
        """Read one call and send it. False, with nothing sent, where it is none."""
        name: list[str] = []
        yield from self._source.run(NAME, name.append)
        if not name or (yield from self._source.peek()) != "(":
            return False
        pieces: list[str] = []
        if not (yield from self._read_brackets(pieces.append)):
            return False
        arguments = keywords_as_json("".join(pieces)[1:-1])
        if arguments is None:
            return False
        self._begin_call("".join(name))
        self._argue(arguments)
        return True

    def _read_brackets(self, sink: Sink) -> Reading[bool]:
        """From an opening bracket to the one that closes it. False where another or none comes."""
        closing: list[str] = []
        while True:
            char = yield from self._source.peek()
            if not char:
                return False
            if char in "\"'":
                yield from self._read_string(char, sink)
                continue
            if char in CLOSING:
                sink(self._source.take(1))
                closing.append(CLOSING[char])
            elif char in ")]}":
                if char != closing.pop():
                    return False
                sink(self._source.take(1))
                if not closing:
                    return True
            yield from self._source.run(_PLAIN, sink)

    def _read_string(self, quote: str, sink: Sink) -> Reading[None]:
        source = self._source
        sink(source.take(1))
        end = quote
        if (yield from source.skip(quote * 2)):
            sink(quote * 2)
            end = quote * 3
        while True:
            yield from source.run(_IN_STRING, sink)
            if (yield from source.skip(end)):
                sink(end)
                return
            if (yield from source.peek()) == "\\":
                sink(source.take(1))
            if not (yield from source.peek()):
                return
            sink(source.take(1))
