"""What the grammars let a model write, its parser reads as calls that fit the tools. Walks of random allowed tokens."""

import json
import random
from typing import Any

import jsonschema
import llguidance
import llguidance.hf
import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cluster.models import DEFAULT_MODEL, resolve
from router.gateway.parsers import TOOL_PARSERS, ToolSpec
from tests.router.parsers.drive import parse

MARKERS = sorted({marker for kind in TOOL_PARSERS.values() for marker in kind.special_tokens})
MAX_TOKENS = 100

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["°C", "°F", None]},
        "from": {"type": "number"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {
        "root": {"$ref": "#/$defs/Node"},
        "again": {"$ref": "#/properties/flag"},
        "flag": {"type": "boolean"},
    },
    "required": ["root", "again"],
    "additionalProperties": False,
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "label": {"type": "string", "maxLength": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "maxItems": 2},
            },
            "required": ["label", "children"],
            "additionalProperties": False,
        }
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    ToolSpec("get_weather", WEATHER),
    ToolSpec("get_weather_tree", TREE),
    ToolSpec("nothing", NOTHING),
    ToolSpec("anything", None),
]
SCHEMAS: dict[str, dict[str, Any]] = {tool.name: tool.parameters or {"type": "object"} for tool in TOOLS}


@pytest.fixture(scope="module", params=["texts", "tokens"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """The default model's, where all markers are plain text, and one in which each is a token of its own. As in Qwen's
    tokenizers <tool_call> is not a special one."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(resolve(DEFAULT_MODEL))
    if request.param == "tokens":
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
        tokenizer.add_special_tokens({"additional_special_tokens": [mark for mark in MARKERS if "tool_" not in mark]})
    return tokenizer


@pytest.fixture(scope="module")
def marker_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return tokenizer.get_added_vocab()


@pytest.fixture(scope="module")
def compiled(tokenizer: PreTrainedTokenizerFast) -> llguidance.LLTokenizer:
    return llguidance.hf.from_tokenizer(tokenizer)


@pytest.fixture(scope="module")
def ends(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """For every token whether it may end a string or a list."""
    return np.array([token[0] in '"]})<' for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))])


def matcher_of(compiled: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(compiled, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def walk(matcher: llguidance.LLMatcher, eos: int, ends: np.ndarray, rng: random.Random) -> list[int]:
    """Random allowed tokens until the grammar is satisfied; often those that end something, late only those."""
    tokens: list[int] = []
    while not matcher.is_stopped():
        bias = np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8) > 0
        late = len(tokens) > MAX_TOKENS
        if bias[eos] and (late or rng.random() < 0.5):
            break
        allowed = np.flatnonzero(bias)
        allowed = allowed[allowed != eos]
        if late or rng.random() < 0.3:
            ending = allowed[ends[allowed]]
            allowed = ending if len(ending) else allowed
        assert len(allowed), matcher.get_error()
        assert len(tokens) < 10 * MAX_TOKENS
        tokens.append(int(allowed[rng.randrange(len(allowed))]))
        assert matcher.consume_token(tokens[-1]), matcher.get_error()
    return tokens


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_random_walks_are_read_back_as_valid_calls(
    tokenizer: PreTrainedTokenizerFast,
    compiled: llguidance.LLTokenizer,
    marker_ids: dict[str, int],
    ends: np.ndarray,
    name: str,
    many: bool,
) -> None:
    kind = TOOL_PARSERS[name]
    most = 0
    for number, tools in enumerate([[tool] for tool in TOOLS] + [TOOLS] * 3):
        matcher = matcher_of(compiled, kind.grammar(tools, many, marker_ids))
        tokens = walk(matcher, tokenizer.eos_token_id, ends, random.Random(f"{number} {name} {many}"))
        output = tokenizer.decode(tokens)
        text, calls = parse(kind, output)
        assert text == "", output
        assert calls if many else len(calls) == 1, output
        for function, arguments in calls:
            jsonschema.validate(json.loads(arguments), {tool.name: SCHEMAS[tool.name] for tool in tools}[function])
        most = max(most, len(calls))
    assert (most > 1) == many


def accepts(compiled: llguidance.LLTokenizer, grammar: str, tokens: list[int]) -> bool:
    matcher = matcher_of(compiled, grammar)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


EXAMPLES = {
    "hermes": ('<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>', "\n"),
    "llama3": ('{"name": "nothing", "parameters": {}}', "; "),
    "pythonic": ("nothing()", ", "),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_only_many_allows_many(
    tokenizer: PreTrainedTokenizerFast, compiled: llguidance.LLTokenizer, marker_ids: dict[str, int], name: str
) -> None:
    one, separator = EXAMPLES[name]
    frame = "[{}]" if name == "pythonic" else "{}"
    for many in (False, True):
        grammar = TOOL_PARSERS[name].grammar(TOOLS, many, marker_ids)
        assert accepts(compiled, grammar, tokenizer.encode(frame.format(one)))
        assert accepts(compiled, grammar, tokenizer.encode(frame.format(one + separator + one))) == many
        assert not accepts(compiled, grammar, tokenizer.encode(frame.format(one.replace("nothing", "something"))))
        assert not accepts(compiled, grammar, tokenizer.encode(frame.format("")))


OPTIONAL = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (OPTIONAL, ["", "a=1", "b=1", "c=1", "a=1, c=3", "a=1, b=2, c=3"], ["b=1, a=1", "a=x", "a=1, ", "d=1"]),
        ({**OPTIONAL, "required": ["b"]}, ["b=1", "a=1, b=1", "b=1, c=1", "a=1, b=1, c=1"], ["", "a=1", "a=1, c=1"]),
        ({**OPTIONAL, "required": ["d"]}, ["d=null", "b=1, d=[{}, 1.5e7]"], ["", "a=1"]),
        (None, ["", 'x={"a": [1, true]}, y="z"'], ["1", "a=b", "a = 1"]),
        ({"additionalProperties": {"type": "string"}}, ["", 'x="y"'], ["x=1"]),
        ({"additionalProperties": False}, [""], ["x=1"]),
    ],
)
def test_keyword_arguments_follow_the_schema(
    tokenizer: PreTrainedTokenizerFast,
    compiled: llguidance.LLTokenizer,
    schema: dict[str, Any] | None,
    allowed: list[str],
    refused: list[str],
) -> None:
    grammar = TOOL_PARSERS["pythonic"].grammar([ToolSpec("f", schema)], False, {})
    assert [
        keywords for keywords in allowed if not accepts(compiled, grammar, tokenizer.encode(f"[f({keywords})]"))
    ] == []
    assert [keywords for keywords in refused if accepts(compiled, grammar, tokenizer.encode(f"[f({keywords})]"))] == []


def test_mistral_has_the_newer_format_where_the_tokenizer_has_its_token(
    tokenizer: PreTrainedTokenizerFast, compiled: llguidance.LLTokenizer, marker_ids: dict[str, int]
) -> None:
    grammar = TOOL_PARSERS["mistral"].grammar(TOOLS, True, marker_ids)
    old = '[TOOL_CALLS][{"name": "nothing", "arguments": {}}, {"name": "nothing", "arguments": {}}]'
    new = "[TOOL_CALLS]nothing[ARGS]{}[TOOL_CALLS]nothing[ARGS]{}"
    assert accepts(compiled, grammar, tokenizer.encode(old)) != ("[ARGS]" in marker_ids)
    assert accepts(compiled, grammar, tokenizer.encode(new)) == ("[ARGS]" in marker_ids)


def test_white_space_is_written_one_way(
    tokenizer: PreTrainedTokenizerFast, compiled: llguidance.LLTokenizer, marker_ids: dict[str, int]
) -> None:
    loose = ToolSpec("f", {"properties": {"a": {}}, "x-guidance": {"whitespace_flexible": True}})
    grammar = TOOL_PARSERS["llama3"].grammar([loose], False, marker_ids)
    for arguments, allowed in [
        ('{"a": [1, 2], "b": 3}', True),
        ('{"a":1}', False),
        ('{ "a": 1}', False),
        ("[]", False),
    ]:
        call = f'{{"name": "f", "parameters": {arguments}}}'
        assert accepts(compiled, grammar, tokenizer.encode(call)) == allowed


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (ToolSpec("get weather", None), "'get weather'"),
        (ToolSpec("f", {"anyOf": [{}]}), "'anyOf' of the parameters of tool 'f'"),
        (ToolSpec("f", {"properties": {"a b": {}}}), "the parameter 'a b' of tool 'f'"),
    ],
)
def test_what_python_cannot_write_is_refused(tool: ToolSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TOOL_PARSERS["pythonic"].grammar([tool], False, {})
