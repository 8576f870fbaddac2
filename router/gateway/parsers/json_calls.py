"""Calls written as JSON objects: `{"name": ..., "arguments": {...}}`. Formats differ in what is around them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from router.gateway.parsers.base import ToolParser
from router.gateway.parsers.json_text import read_string, read_value
from router.gateway.parsers.source import SPACE, Reading, Sink


def is_name(name: str) -> bool:
    """Whether a text can name a function: no control characters, no halves of surrogate pairs."""
    return bool(name) and name.isprintable()


@dataclass(slots=True)
class _Call:
    name: str | None = None
    begun: bool = False  # sent
    argued: bool = False  # its arguments have begun
    complete: bool = False  # and ended
    held: list[str] = field(default_factory=list)  # arguments that came before the name


class JsonToolParser(ToolParser):
    """Reads calls that are JSON objects. Members other than name and arguments are left out."""

    name_is_enough = True  # whether an object with a name is a call, or only one that has arguments, too

    def _read_call(self, *ends: str) -> Reading[bool]:
        """Read one object and send it. False, with nothing sent, where it is no call. What is malformed goes into the
        arguments up to one of `ends`."""
        call = _Call()
        whole = yield from self._members(call)
        if not call.begun:
            return False
        rest = self._source.forget()
        if whole and not call.argued:
            self._argue("{}")
        if whole or not (yield from self._source.peek()):
            return True
        if call.complete:
            self._say(rest)
        else:
            self._argue(rest)
            yield from self._source.until(ends, self._argue)
        return True

    def _members(self, call: _Call) -> Reading[bool]:
        """The object from its brace to its end. False where it is malformed or ends too early."""
        source = self._source
        if (yield from source.peek()) != "{":
            return False
        while True:
            first = source.take(1) == "{"
            yield from source.run(SPACE)
            if first and (yield from source.skip("}")):
                return True
            if not (yield from self._member(call)):
                return False
            yield from source.run(SPACE)
            if (yield from source.skip("}")):
                return True
            if (yield from source.peek()) != ",":
                return False

    def _member(self, call: _Call) -> Reading[bool]:
        source = self._source
        key: list[str] = []
        if not (yield from read_string(source, key.append)):
            return False
        yield from source.run(SPACE)
        if not (yield from source.skip(":")):
            return False
        yield from source.run(SPACE)
        member = json.loads("".join(key))
        if member == "name":
            return (yield from self._name(call))
        if member in ("arguments", "parameters"):  # models take one for the other
            return (yield from self._arguments(call))
        return (yield from read_value(source, lambda piece: None))

    def _name(self, call: _Call) -> Reading[bool]:
        text: list[str] = []
        if call.name is not None or not (yield from read_string(self._source, text.append)):
            return False
        call.name = json.loads("".join(text))
        if not is_name(call.name):
            return False
        self._begin_if_certain(call)
        return True

    def _arguments(self, call: _Call) -> Reading[bool]:
        if call.argued:
            return False
        call.argued = True
        self._begin_if_certain(call)
        if call.begun:
            self._source.forget()
        call.complete = yield from self._read_arguments(self._argue if call.begun else call.held.append)
        if call.begun:
            self._source.record()
        return call.complete

    def _read_arguments(self, sink: Sink) -> Reading[bool]:
        """The arguments, as text of an object. Some models write null for none, or the object as a string."""
        if (yield from self._source.peek()) == "{":
            return (yield from read_value(self._source, sink))
        pieces: list[str] = []
        whole = yield from read_value(self._source, pieces.append)
        text = "".join(pieces)
        if whole and text == "null":
            text = "{}"
        elif whole and text.startswith('"'):
            text = json.loads(text).encode(errors="replace").decode()
        sink(text)
        return whole

    def _begin_if_certain(self, call: _Call) -> None:
        if not call.begun and call.name is not None and (call.argued or self.name_is_enough):
            self._begin_call(call.name)
            call.begun = True
            for piece in call.held:
                self._argue(piece)
            self._source.record()  # what belongs to no member is not lost if the object turns out to be malformed
