"""Grammars of tool calls in llguidance's variant of Lark. Pure text: what reads them is elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Exactly one way to write white space: where any is allowed a small model may never write anything else.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that can be called. `parameters`: the JSON schema of its arguments; None or {}: any JSON object."""

    name: str
    parameters: dict[str, Any] | None


def quoted(text: str) -> str:
    """A literal."""
    return json.dumps(text)


def marker(text: str, marker_ids: Mapping[str, int]) -> str:
    """A marker: one token where the tokenizer has it as an added one, special or not, else its text. llguidance takes
    all added tokens in angle brackets for special ones, which do not match as text."""
    return f"<[{marker_ids[text]}]>" if text in marker_ids else quoted(text)


def json_value(schema: Mapping[str, Any]) -> str:
    """A value of a schema, which is the root of its own references (`#/$defs/...`)."""
    return f"%json {json.dumps({**schema, 'x-guidance': COMPACT})}"


def arguments_of(tool: ToolSpec) -> str:
    """The arguments of a call, as a JSON object."""
    return json_value({**(tool.parameters or {}), "type": "object"})


def json_call(tool: ToolSpec, arguments_key: str) -> str:
    """A call as a JSON object."""
    opening = f"{{{json.dumps('name')}: {json.dumps(tool.name, ensure_ascii=False)}, {json.dumps(arguments_key)}: "
    return f"{quoted(opening)} {arguments_of(tool)} {quoted('}')}"


def calls_grammar(
    calls: Sequence[str], one: str, separator: str | None, before: str = "", after: str = "", rules: str = ""
) -> str:
    """The grammar of one of `calls`, each the body of a rule, in the frame `one`, where it is named `call`. With a
    separator there may be more such frames."""
    many = "" if separator is None else f" ({separator} one)*"
    names = " | ".join(f"call_{number}" for number in range(len(calls)))
    bodies = "\n".join(f"call_{number}: {body}" for number, body in enumerate(calls))
    return f"%llguidance {{}}\nstart: {before} one{many} {after}\none: {one}\ncall: {names}\n{bodies}\n{rules}"
