"""Keyword arguments in Python's syntax as a JSON object, and the grammar of those that fit a tool's schema.

Values are turned into JSON token by token. Nothing is evaluated, nothing is recursive, and numbers stay as written.
"""

from __future__ import annotations

import json
import re
from typing import Any

from router.gateway.parsers.grammar import ToolSpec, json_value, quoted
from router.gateway.parsers.json_text import is_json

NAME = re.compile(r"[\w.-]+")
_KEY = re.compile(r"\s*([^\s=,:()\[\]{}\"'\\]+)\s*=\s*")
_TOKEN = re.compile(
    r"""(?P<space>\s+)
    | (?P<string> \"{3}(?:[^\\]|\\.)*?\"{3} | '{3}(?:[^\\]|\\.)*?'{3} | "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*')
    | (?P<number> -?[0-9][-+.0-9eE]*)
    | (?P<word> [A-Za-z]+)
    | (?P<open> [(\[{])
    | (?P<close> ,?\s*[)\]}])
    | (?P<separator> [,:])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:[\n\\'\"abfnrtv]|[0-3]?[0-7]{1,2}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}

# What a schema may ask of an object as a whole that keyword arguments written one by one do not show.
_WHOLE = "$ref allOf anyOf oneOf not if patternProperties propertyNames minProperties maxProperties dependentRequired"
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,31}/"


def keywords_as_json(text: str) -> str | None:
    """What is between the parentheses of a call, as text of a JSON object. None where it is anything but keywords with
    literals, in Python's words or JSON's (`None` or `null`)."""
    members: list[str] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        key = _KEY.match(text, at)
        value = _Value().read(text, key.end()) if key else None
        if key is None or value is None:
            return None
        members.append(f"{json.dumps(key[1])}: {value[0].strip()}")
        at = value[1] + 1
    arguments = "{" + ", ".join(members) + "}"
    return arguments if is_json(arguments) else None


class _Value:
    """One literal on its way to JSON. It may still be malformed: brackets that do not match, values without commas."""

    def __init__(self) -> None:
        self._out: list[str] = []
        self._open: list[int] = []  # where in `_out` the open brackets are
        self._tuples: list[bool] = []  # whether there is a comma in them

    def read(self, text: str, at: int) -> tuple[str, int] | None:
        """The JSON text, and where the comma or the end is that follows the value."""
        while at < len(text) and (self._open or text[at] != ","):
            token = _TOKEN.match(text, at)
            if not token or not self._add(str(token.lastgroup), token[0]):
                return None
            at = token.end()
        return "".join(self._out), at

    def _add(self, kind: str, token: str) -> bool:
        if kind == "open":
            self._open.append(len(self._out))
            self._tuples.append(False)
            token = "[" if token == "(" else token
        elif kind == "close":
            return self._close(token)
        elif kind == "separator" and token == ",":
            self._tuples[-1] = True
        elif kind == "string":
            token = _string_as_json(token)
        elif kind == "word":
            token = _WORDS.get(token, "")
        elif kind == "space":
            token = " "
        self._out.append(token)
        return bool(token)

    def _close(self, token: str) -> bool:
        if not self._open:
            return False
        start, is_tuple = self._open.pop(), self._tuples.pop() or token[0] == ","
        if token[-1] == ")" and not is_tuple and len(self._out) > start + 1:  # only parentheses around one value
            return False
        self._out.append("]" if token[-1] == ")" else token[-1])
        return True


def _string_as_json(token: str) -> str:
    quotes = 3 if token[:3] in ('"""', "'''") and len(token) >= 6 else 1
    try:
        return json.dumps(_ESCAPE.sub(_unescape, token[quotes:-quotes]))
    except UnicodeDecodeError:  # \U of a number that is no character
        return ""


def _unescape(escape: re.Match[str]) -> str:
    return escape[0].encode().decode("unicode_escape")


def keyword_grammar(tool: ToolSpec, suffix: str) -> tuple[str, str]:
    """A call's rule body, and the rules that it needs, whose names end in `suffix`. Arguments come in the order of the
    schema. Raises ValueError for names and schemas that cannot be written so."""
    schema = tool.parameters or {}
    if not NAME.fullmatch(tool.name):
        raise ValueError(f"the tool's name {tool.name!r} cannot be written as a call in Python's syntax")
    if whole := next((key for key in _WHOLE.split() if key in schema), None):
        raise ValueError(f"{whole!r} of the parameters of tool {tool.name!r} cannot be held in keyword arguments")
    opening = quoted(f"{tool.name}(")
    if "properties" not in schema and not schema.get("required"):
        return f'{opening} any{suffix} ")"', _any_keywords(schema.get("additionalProperties", True), suffix)
    required = schema.get("required", [])
    keys = list(dict.fromkeys([*schema.get("properties", {}), *required]))
    rules = [f'more{suffix}_{len(keys)}: ""', f'first{suffix}_{len(keys)}: ""']
    for number, key in enumerate(keys):
        if not _KEY.fullmatch(f"{key}="):
            raise ValueError(f"the parameter {key!r} of tool {tool.name!r} cannot be written as a keyword argument")
        key_rule, more = f"key{suffix}_{number}", f"more{suffix}_{number + 1}"
        optional = "" if key in required else "?"
        skipped = "" if key in required else f" | first{suffix}_{number + 1}"
        rules += [
            f"{key_rule}: {quoted(key + '=')} {_value_grammar(_schema_of(schema, key))}",
            f'more{suffix}_{number}: (", " {key_rule}){optional} {more}',
            f"first{suffix}_{number}: {key_rule} {more}{skipped}",
        ]
    return f'{opening} first{suffix}_0 ")"', "\n".join(rules)


def _any_keywords(value: Any, suffix: str) -> str:
    if value is False:
        return f'any{suffix}: ""'
    one = f'{_ANY_KEY} "=" {_value_grammar(value)}'
    return f'any{suffix}: (one{suffix} (", " one{suffix})*)?\none{suffix}: {one}'


def _value_grammar(schema: Any) -> str:
    return json_value(schema if isinstance(schema, dict) else {"allOf": [schema]})


def _schema_of(schema: dict[str, Any], key: str) -> Any:
    """The schema of one property, with all that its references lead to."""
    value = schema.get("properties", {}).get(key, schema.get("additionalProperties", True))
    if "$ref" not in json.dumps(value):
        return value
    return {"$ref": "#/$defs/tool/properties/" + _escaped(key), "$defs": {"tool": _moved(schema)}}


def _escaped(key: str) -> str:
    """As part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _moved(schema: Any) -> Any:
    """A schema whose references to itself lead to `#/$defs/tool`."""
    if isinstance(schema, list):
        return [_moved(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#/$defs/tool{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if key in ("const", "enum", "default", "examples")
        else _moved(value)
        for key, value in schema.items()
    }
