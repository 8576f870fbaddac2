"""Calls of Llama 3: `{"name": ..., "parameters": {...}}`, several with `;` between them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from router.gateway.parsers.grammar import ToolSpec, calls_grammar, json_call, marker, quoted
from router.gateway.parsers.json_calls import JsonToolParser
from router.gateway.parsers.source import SPACE, Reading

TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"[; \t\r\n]+")


class Llama3Parser(JsonToolParser):
    """Calls stand at the start of the answer or after `<|python_tag|>`. Nothing else marks them, and an answer may be a
    JSON object itself: only one with a name and parameters is a call. So the name is sent where these begin."""

    name = "llama3"
    special_tokens = (TAG,)
    name_is_enough = False

    @classmethod
    def grammar(cls, tools: Sequence[ToolSpec], many: bool, marker_ids: Mapping[str, int]) -> str:
        return calls_grammar(
            [json_call(tool, "parameters") for tool in tools],
            one="call",
            separator=quoted("; ") if many else None,
            before=f"{marker(TAG, marker_ids)}?" if TAG in marker_ids else "",
        )

    def _read(self) -> Reading[None]:
        source = self._source
        while True:
            source.record()
            yield from source.run(_BETWEEN)
            yield from source.skip(TAG)
            yield from source.run(SPACE)
            if not (yield from self._read_call(TAG)):
                self._give_up()
                if not (yield from source.until((TAG,), self._say)):
                    return
