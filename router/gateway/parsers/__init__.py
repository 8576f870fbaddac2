"""Parsers of model output: tool calls and reasoning, piece by piece.

Every model family writes tool calls its own way. A parser reads one of these formats, and its grammar makes a model
write it. Parsers know nothing of requests, tokens or sockets: text goes in, text and calls come out.
"""

from __future__ import annotations

import re

from router.gateway.parsers.base import CallDelta, Parsed, ReasoningParser, ToolParser
from router.gateway.parsers.grammar import ToolSpec
from router.gateway.parsers.hermes import HermesParser
from router.gateway.parsers.llama3 import Llama3Parser
from router.gateway.parsers.mistral import MistralParser
from router.gateway.parsers.pythonic import PythonicParser
from router.gateway.parsers.think import ThinkParser

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "CallDelta",
    "Parsed",
    "ReasoningParser",
    "ToolParser",
    "ToolSpec",
    "reasoning_parser",
    "tool_parser",
]

_TOOL_CLASSES: tuple[type[ToolParser], ...] = (HermesParser, Llama3Parser, MistralParser, PythonicParser)
_REASONING_CLASSES: tuple[type[ReasoningParser], ...] = (ThinkParser,)
TOOL_PARSERS = {parser.name: parser for parser in _TOOL_CLASSES}
REASONING_PARSERS = {parser.name: parser for parser in _REASONING_CLASSES}

# What a chat template shows of the format that its model was trained on; the first that fits counts. Llama 4's template
# has the role "ipython", too, and shows its calls as `[func_name1(params_name1=...`.
_SIGNS = (
    (re.compile(r"<tool_call>"), HermesParser),
    (re.compile(r"\[TOOL_CALLS\]"), MistralParser),
    (re.compile(r"<\|python_start\|>|\[\w+\(\w+="), PythonicParser),
    (re.compile(r"<\|python_tag\|>|ipython"), Llama3Parser),
)


def tool_parser(name: str, template: str | None) -> type[ToolParser]:
    """The parser of that name; "auto" takes the one that fits the chat template, or Hermes's. Raises ValueError for a
    name that no parser has."""
    if name == "auto":
        return next((parser for sign, parser in _SIGNS if sign.search(template or "")), HermesParser)
    if name not in TOOL_PARSERS:
        raise ValueError(f"unknown tool parser {name!r}; known are: auto, {', '.join(TOOL_PARSERS)}")
    return TOOL_PARSERS[name]


def reasoning_parser(name: str, template: str | None) -> type[ReasoningParser] | None:
    """The parser of that name; None for "none", and for "auto" with a chat template that shows no reasoning. Raises
    ValueError for a name that no parser has."""
    if name == "none":
        return None
    if name == "auto":
        return ThinkParser if "think>" in (template or "") else None  # some write only the end tag
    if name not in REASONING_PARSERS:
        raise ValueError(f"unknown reasoning parser {name!r}; known are: auto, none, {', '.join(REASONING_PARSERS)}")
    return REASONING_PARSERS[name]
