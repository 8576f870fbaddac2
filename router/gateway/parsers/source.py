"""Text that comes in pieces, read as if it were whole.

What reads it is written as a generator that walks over the text and yields where it needs more. Its decisions rest on
the text alone, never on where a piece ended, so any split of a text is read the same way. What is waited for is never
longer than a marker, so every character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]  # yields where it waits for more text
Sink: TypeAlias = Callable[[str], None]

SPACE = re.compile(r"[ \t\r\n]+")  # the white space of JSON


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")


class Source:
    """The text that has come and was not read yet. What was read can be recorded, to be given back as it was."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._recorded: list[str] | None = None

    def feed(self, text: str) -> None:
        """Add text at the end."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """There will be no more text."""
        self._ended = True

    def at_end(self) -> bool:
        """Whether everything was read that has come."""
        return self._at == len(self._text)

    def record(self) -> None:
        """From here on keep what is read."""
        self._recorded = []

    def forget(self) -> str:
        """Stop keeping it; returns what was kept."""
        kept, self._recorded = self._recorded or [], None
        return "".join(kept)

    def take(self, count: int) -> str:
        """Read so many characters, which must be there."""
        piece = self._text[self._at : self._at + count]
        self._at += count
        if self._recorded is not None:
            self._recorded.append(piece)
        return piece

    def peek(self) -> Reading[str]:
        """The next character, not read; "" at the end."""
        while self.at_end() and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def skip(self, marker: str) -> Reading[bool]:
        """Read `marker` if it comes next."""
        while not self._text.startswith(marker, self._at):
            rest = len(self._text) - self._at
            if self._ended or rest >= len(marker) or not self._text.endswith(marker[:rest]):
                return False
            yield
        self.take(len(marker))
        return True

    def run(self, pattern: re.Pattern[str], sink: Sink | None = None) -> Reading[None]:
        """Read characters as long as `pattern` (one or more of a set of characters) matches."""
        while (yield from self.peek()) and (found := pattern.match(self._text, self._at)):
            piece = self.take(found.end() - self._at)
            if sink:
                sink(piece)

    def until(self, markers: tuple[str, ...], sink: Sink) -> Reading[str]:
        """Read up to the first of `markers`, or to the end; returns that marker, not read, or ""."""
        while True:
            found = _any_of(markers).search(self._text, self._at)
            rest = len(self._text) - self._at
            if found:
                rest = found.start() - self._at
            elif not self._ended:
                rest -= self._held_back(markers)
            if rest:
                sink(self.take(rest))
            if found or self._ended:
                return found.group() if found else ""
            yield

    def _held_back(self, markers: tuple[str, ...]) -> int:
        """Length of the longest end of the text that is the beginning of a marker."""
        longest = max(map(len, markers), default=1) - 1
        for length in range(min(longest, len(self._text) - self._at), 0, -1):
            if any(marker.startswith(self._text[-length:]) for marker in markers):
                return length
        return 0
