"""Tools as plain text, for chat templates that do not know them: written as `HermesParser` reads it."""

from __future__ import annotations

import json
from typing import Any

from router.gateway.parsers.hermes import CLOSE, OPEN

_BEFORE = "You can call functions. These exist, one a line, each with the JSON schema of its parameters:"
_AFTER = "To call one, write its name and arguments as one JSON object between tags. Call several one after another:"
_LAST = "The results come back in <tool_response> tags. Call nothing where you can answer without."


def tools_as_text(tools: list[dict[str, Any]]) -> str:
    """What a system message says of the tools of a request (OpenAI's objects)."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = f'{OPEN}\n{{"name": "function", "arguments": {{"parameter": "value"}}}}\n{CLOSE}'
    return f"{_BEFORE}\n<tools>\n{lines}\n</tools>\n{_AFTER}\n{example}\n{_LAST}"


def call_as_text(name: str, arguments: str) -> str:
    """A call that the assistant made; `arguments` is JSON text."""
    return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments or "{}"}}}\n{CLOSE}'


def result_as_text(content: str) -> str:
    """What a call returned."""
    return f"<tool_response>\n{content}\n</tool_response>"
