"""Reasoning between `<think>` and `</think>`."""

from __future__ import annotations

from router.gateway.parsers.base import ReasoningParser
from router.gateway.parsers.source import SPACE, Reading

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser(ReasoningParser):
    """Reasoning comes first, once. White space next to the tags belongs to them."""

    name = "think"
    special_tokens = (OPEN, CLOSE)

    @staticmethod
    def opened_by(prompt: str) -> bool:
        return prompt.rstrip().endswith(OPEN)

    def _read(self) -> Reading[None]:
        source = self._source
        source.record()
        yield from source.run(SPACE)
        opened = yield from source.skip(OPEN)
        before = source.forget()
        if opened or self._open:
            self.thinking = True
            yield from source.run(SPACE)
            if (yield from source.until((CLOSE,), self._reasoning.add)):
                source.take(len(CLOSE))
                self.thinking = False
                self._reasoning.drop_space()
                yield from source.run(SPACE)
        else:
            self._text.add(before)
        yield from source.until((), self._text.add)
