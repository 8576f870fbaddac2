"""What an answer has to look like, as a grammar in llguidance's form: from response formats, guidance and tools."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from router.gateway.errors import invalid
from router.gateway.parsers.grammar import COMPACT
from router.gateway.schemas.chat import ChatRequest, JsonObject, JsonSchemaFormat
from router.gateway.schemas.common import Sampling

MAX_GRAMMAR_CHARS = 200_000
MAX_GBNF_CHARS = 20_000
"""The converter's time grows with the square of the rules, and it keeps other threads waiting."""
SHOWN = 300
"""Characters of a message: some repeat the whole grammar."""
JSON_STYLE: Any = COMPACT


def grammar(request: Sampling, tools: str = "") -> tuple[str, str]:
    """The grammar of a request's answers and the field that it comes from; empty where they are free. `tools` is that
    of calls which have to be made. Raises ApiError where there is more than one, and for what is none."""
    found = {field: made for field, made in _given(request) if made}
    if tools:
        found["tools"] = tools
    if len(found) > 1:
        first, second, *_ = found
        raise invalid(f"{second}: not together with {first}: an answer can only follow one of them", second)
    for field, made in found.items():
        if len(made) > MAX_GRAMMAR_CHARS:
            raise invalid(f"{field}: {len(made)} characters, at most {MAX_GRAMMAR_CHARS} are allowed", field)
        return made, field
    return "", ""


def _given(request: Sampling) -> list[tuple[str, str]]:
    given = [
        ("guided_json", _json(request.guided_json, "guided_json") if request.guided_json is not None else ""),
        ("guided_regex", LLMatcher.grammar_from_regex(request.guided_regex) if request.guided_regex else ""),
        ("guided_choice", _choice(request.guided_choice) if request.guided_choice else ""),
        ("guided_grammar", _lark(request.guided_grammar) if request.guided_grammar else ""),
    ]
    form = request.response_format if isinstance(request, ChatRequest) else None
    if isinstance(form, JsonObject):
        given.append(("response_format", _json({"type": "object"}, "response_format")))
    elif isinstance(form, JsonSchemaFormat):
        given.append(("response_format", _json(form.json_schema.schema_, "response_format.json_schema.schema")))
    return given


def _json(schema: dict[str, Any] | str, field: str) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise invalid(f"{field}: not a JSON schema: {error}", field) from None
    if not isinstance(schema, dict):
        raise invalid(f"{field}: a JSON schema is an object, got {type(schema).__name__}", field)
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)
    except (ValueError, RecursionError) as error:  # of nesting
        raise invalid(f"{field}: not a schema that can be read: {error}", field) from None


def _choice(choices: list[str]) -> str:
    if not all(choices):
        raise invalid("guided_choice: must not contain an empty string", "guided_choice")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


def _lark(text: str) -> str:
    """Lark as it is; GBNF, which llama.cpp made common, is converted."""
    if "::=" not in text:
        return LLMatcher.grammar_from_lark(text)
    if len(text) > MAX_GBNF_CHARS:
        what = f"{len(text)} characters of GBNF, at most {MAX_GBNF_CHARS} are allowed (of Lark {MAX_GRAMMAR_CHARS})"
        raise invalid(f"guided_grammar: {what}", "guided_grammar")
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(text))
    except Exception as error:  # the converter raises no narrower one for a rule that does not exist
        raise invalid(f"guided_grammar: not a GBNF grammar: {str(error)[:SHOWN]}", "guided_grammar") from None
