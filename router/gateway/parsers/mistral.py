"""Calls of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or in newer models one after another as
`[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from router.gateway.parsers.grammar import ToolSpec, arguments_of, calls_grammar, json_call, marker, quoted
from router.gateway.parsers.json_calls import JsonToolParser, is_name
from router.gateway.parsers.source import SPACE, Reading

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\s\[\]{}]+")
_ID = re.compile(r"\w+")


class MistralParser(JsonToolParser):
    """Calls follow `[TOOL_CALLS]`, in a list or as a name and an object. Ids that the model writes are left out."""

    name = "mistral"
    special_tokens = (CALLS, CALL_ID, ARGS)

    @classmethod
    def grammar(cls, tools: Sequence[ToolSpec], many: bool, marker_ids: Mapping[str, int]) -> str:
        start = marker(CALLS, marker_ids)
        if ARGS in marker_ids:  # a model of the newer format
            named = [f"{quoted(_named(tool))} {marker(ARGS, marker_ids)} {arguments_of(tool)}" for tool in tools]
            return calls_grammar(named, one=f"{start} call", separator="" if many else None)
        return calls_grammar(
            [json_call(tool, "arguments") for tool in tools],
            one="call",
            separator=quoted(", ") if many else None,
            before=f"{start} {quoted('[')}",
            after=quoted("]"),
        )

    def _read(self) -> Reading[None]:
        source = self._source
        while (yield from source.until((CALLS,), self._say)):
            source.record()
            source.take(len(CALLS))
            yield from source.run(SPACE)
            if (yield from source.skip("[")):
                yield from self._read_list(lambda: self._read_call(CALLS))
            else:
                yield from self._read_named()

    def _read_named(self) -> Reading[None]:
        source = self._source
        pieces: list[str] = []
        yield from source.run(_NAME, pieces.append)
        if (yield from source.skip(CALL_ID)):
            yield from source.run(_ID)
        marked = yield from source.skip(ARGS)
        name = "".join(pieces)
        if not is_name(name) or not (marked or (yield from source.peek()) == "{"):
            return self._give_up()
        self._begin_call(name)
        yield from source.run(SPACE)
        if not (yield from self._read_arguments(self._argue)):
            yield from source.until((CALLS,), self._argue)
        return None


def _named(tool: ToolSpec) -> str:
    if not _NAME.fullmatch(tool.name) or not is_name(tool.name):
        raise ValueError(f"the tool's name {tool.name!r} cannot be written in Mistral's format")
    return tool.name
