"""Follows JSON through text that comes in pieces, without building its values and without recursion."""

from __future__ import annotations

import json
import re

from router.gateway.parsers.source import SPACE, Reading, Sink, Source

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_CONTROL = re.compile(r"[\x00-\x1f]+")
_HEX = frozenset("0123456789abcdefABCDEF")
_WORD = re.compile(r"[-+.\w]+")
_ATOM = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_CLOSING = {"{": "}", "[": "]"}


def read_string(source: Source, sink: Sink) -> Reading[bool]:
    """Read one JSON string; its text goes to `sink` as it comes. False where it is none: the text is read up to the
    first character that does not fit. Control characters, which models write though JSON forbids them, come out
    escaped."""
    if (yield from source.peek()) != '"':
        return False
    sink(source.take(1))
    while True:
        yield from source.run(_PLAIN, sink)
        char = yield from source.peek()
        if char == '"':
            sink(source.take(1))
            return True
        if char == "\\":
            sink(source.take(1))
            if not (yield from _escape(source, sink)):
                return False
        elif char:
            yield from source.run(_CONTROL, lambda piece: sink(json.dumps(piece)[1:-1]))
        else:
            return False


def _escape(source: Source, sink: Sink) -> Reading[bool]:
    """What follows a backslash."""
    char = yield from source.peek()
    if not char or char not in '"\\/bfnrtu':
        return False
    sink(source.take(1))
    for _ in range(4 if char == "u" else 0):
        if (yield from source.peek()) not in _HEX:
            return False
        sink(source.take(1))
    return True


def read_value(source: Source, sink: Sink) -> Reading[bool]:
    """Read one JSON value; like `read_string`."""
    closing: list[str] = []  # what closes the objects and arrays that are open
    state = "value"  # what may come next: "value", "item" (or an end), "key", "first key" (or an end), "colon", "more"
    while closing or state != "more":
        yield from source.run(SPACE, sink)
        char = yield from source.peek()
        if state in ("item", "first key", "more") and closing[-1] == char:
            sink(source.take(1))
            closing.pop()
            state = "more"
        elif state == "more" and char == ",":
            sink(source.take(1))
            state = "key" if closing[-1] == "}" else "value"
        elif state == "colon" and char == ":":
            sink(source.take(1))
            state = "value"
        elif state in ("more", "colon"):
            return False
        elif state in ("key", "first key"):
            if not (yield from read_string(source, sink)):
                return False
            state = "colon"
        elif char in _CLOSING:
            sink(source.take(1))
            closing.append(_CLOSING[char])
            state = "first key" if char == "{" else "item"
        elif not (yield from (read_string if char == '"' else _read_atom)(source, sink)):
            return False
        else:
            state = "more"
    return True


def _read_atom(source: Source, sink: Sink) -> Reading[bool]:
    """A number, true, false or null: known only where it ends."""
    pieces: list[str] = []
    yield from source.run(_WORD, pieces.append)
    atom = "".join(pieces)
    sink(atom)
    return _ATOM.fullmatch(atom) is not None


def is_json(text: str) -> bool:
    """Whether a whole text is one JSON value."""
    source = Source()
    source.feed(text)
    source.end()
    try:
        next(read_value(source, lambda piece: None))
    except StopIteration as result:
        return bool(result.value) and source.at_end()
    return False
