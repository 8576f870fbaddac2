"""Own: what one gateway knows by itself of its requests, as JSON has it. Gateways ask each other for it."""

from __future__ import annotations

from typing import Any

from router.gateway.dashboard.viewer import Viewer
from router.gateway.dispatch import Dispatcher
from router.gateway.recent import Record
from router.gateway.text import Text
from transfer.messages import unpack_tokens

MAX_RUNNING = 64
"""Running requests that are shown."""
LABEL_CHARS = 90


class Own:
    """The requests of the gateway `name`."""

    def __init__(self, name: str, dispatcher: Dispatcher, text: Text) -> None:
        self.name = name
        self._dispatcher = dispatcher
        self._recent = dispatcher.recent
        self._text = text
        self._labels: dict[int, str] = {}

    def lately(self, viewer: Viewer, since: int) -> dict[str, Any]:
        """The seconds from `since` on, what it did in all, and what runs now."""
        running = [one for one in self._recent.records(viewer.tenant) if not one.ended][:MAX_RUNNING]
        return {
            "name": self.name,
            "in_flight": self._dispatcher.in_flight,
            "total": self._recent.history.total(),
            "seconds": self._recent.history.since(since),
            "running": [self._line(one, viewer) for one in running],
        }

    def requests(self, viewer: Viewer) -> list[dict[str, Any]]:
        """The last requests, the latest first."""
        return [self._line(one, viewer) for one in self._recent.records(viewer.tenant)]

    def request(self, viewer: Viewer, number: int) -> dict[str, Any] | None:
        """All of one; None for what is not there, or not to be seen."""
        record = self._recent.find(number, viewer.tenant)
        if record is None:
            return None
        head = self._decoded(record.head) if viewer.tenant is None else None
        tail = (
            self._decoded(record.tail)
            if viewer.tenant is None and len(record.head) < 4 * record.prompt_tokens
            else None
        )
        return self._line(record, viewer) | record.whole() | {"head": head, "tail": tail}

    def _line(self, record: Record, viewer: Viewer) -> dict[str, Any]:
        label = self._label(record) if viewer.tenant is None else None
        return record.summary() | {"gateway": self.name, "label": label}

    def _label(self, record: Record) -> str:
        """How its prompt ends: what it begins with is often the same for all."""
        if (known := self._labels.get(record.number)) is None:
            kept = {one.number for one in self._recent.records(None)}
            self._labels = {number: text for number, text in self._labels.items() if number in kept}
            known = self._labels[record.number] = self._last_words(unpack_tokens(record.tail).tolist())[-LABEL_CHARS:]
        return known

    def _last_words(self, tokens: list[int]) -> str:
        """What stands between the last special tokens, without the single words, on lines of their own, by which chat
        templates say who speaks."""
        specials = set(self._text.specials.values())
        parts: list[list[int]] = [[]]
        for token in tokens:
            if token in specials:
                parts.append([])
            else:
                parts[-1].append(token)
        texts = [self._text.decode(part).strip() for part in parts]
        last = next((text for text in reversed(texts) if len(text.split()) > 1), texts[-1])
        first, _, rest = last.partition("\n")
        return " ".join((last if " " in first or not rest.strip() else rest).split())

    def _decoded(self, packed: bytes) -> str:
        return self._text.decode(unpack_tokens(packed).tolist())
