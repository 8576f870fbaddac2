"""Calls of Hermes and Qwen: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, as many as there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.gateway.parsers.grammar import ToolSpec, calls_grammar, json_call, marker, quoted
from router.gateway.parsers.json_calls import JsonToolParser
from router.gateway.parsers.source import SPACE, Reading

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonToolParser):
    """Calls may stand anywhere in the text."""

    name = "hermes"
    special_tokens = (OPEN, CLOSE)

    @classmethod
    def grammar(cls, tools: Sequence[ToolSpec], many: bool, marker_ids: Mapping[str, int]) -> str:
        opening = f"{marker(OPEN, marker_ids)} {quoted(chr(10))}"
        closing = f"{quoted(chr(10))} {marker(CLOSE, marker_ids)}"
        return calls_grammar(
            [json_call(tool, "arguments") for tool in tools],
            one=f"{opening} call {closing}",
            separator=quoted("\n") if many else None,
        )

    def _read(self) -> Reading[None]:
        markers: tuple[str, ...] = (OPEN,)
        while found := (yield from self._source.until(markers, self._say)):
            if found == CLOSE:
                self._source.take(len(CLOSE))
                self._text.drop_space()
                markers = (OPEN,)
                continue
            self._source.record()
            self._source.take(len(OPEN))
            yield from self._source.run(SPACE)
            if (yield from self._read_call(CLOSE)):
                markers = (OPEN, CLOSE)
            else:
                self._give_up()
                markers = (OPEN,)
