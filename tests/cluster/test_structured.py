"""Structured output through a real cluster: what ends with "stop" is valid, what cannot be served is refused by name,
and no grammar holds others up."""

import asyncio
import itertools
import json
import random
import re
import string
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from cluster.launch import Cluster
from router.gateway.guides import JSON_STYLE
from tests.cluster.checks import assert_balance
from tests.cluster.schemas import Drawn
from transfer.guide import Guides

EOS = 2
MODEL = "smollm2-135m-instruct"
ROUTE = "/v1/chat/completions"
LIMIT_S = 5.0
WAYS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 1.0})
TOKENS = 4
"""Of the answers to extremes, and of those beside them."""
FORMATS = jsonschema.FormatChecker(["date", "ipv4", "ipv6", "uuid", "email"])
TIME = r"\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)"
"""RFC 3339, which `jsonschema` checks only with more packages."""


@FORMATS.checks("time")
def is_time(value: object) -> bool:
    return not isinstance(value, str) or re.fullmatch(TIME, value, re.IGNORECASE) is not None


@FORMATS.checks("date-time")
def is_date_time(value: object) -> bool:
    return not isinstance(value, str) or re.fullmatch(rf"\d{{4}}-\d\d-\d\dT{TIME}", value, re.IGNORECASE) is not None


def chat(tokens: int, **more: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Make up an example, as short as can be."}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, **more}


def schema_format(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}}


def run(cluster: Cluster, work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=600) as client:
            await work(client)

    asyncio.run(main())


async def judge(client: httpx.AsyncClient, drawn: Drawn, tokens: int, ways: Sequence[dict[str, Any]]) -> list[str]:
    """What came of each way to ask for it; fails where that is wrong."""
    found = []
    for way in ways:
        answer = await client.post(ROUTE, json=chat(tokens, seed=drawn.seed, **way, **schema_format(drawn.schema)))
        if answer.status_code == 400:
            message = answer.json()["error"]["message"]
            assert drawn.beyond, f"{drawn.seed}: {message}"
            assert any(word in message for word in drawn.beyond), f"{drawn.seed}: {message}"
            found.append("refused")
            continue
        assert answer.status_code == 200, f"{drawn.seed}: {answer.text}"
        assert not drawn.beyond, f"{drawn.seed}: {drawn.beyond}"
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            validate(json.loads(choice["message"]["content"]), drawn.schema)
        found.append(choice["finish_reason"])
    return found


def check_schemas(cluster: Cluster, seeds: range, tokens: int, both: bool) -> None:
    """Ask for each greedily and by chance; if not `both`, in turns."""
    found: Counter[str] = Counter()

    async def work(client: httpx.AsyncClient) -> None:
        gate = asyncio.Semaphore(16)

        async def one(seed: int) -> None:
            async with gate:
                found.update(await judge(client, Drawn(seed), tokens, WAYS if both else WAYS[seed % 2 :][:1]))

        await asyncio.gather(*map(one, seeds))

    run(cluster, work)
    print(dict(found))  # noqa: T201
    served = found["stop"] + found["length"]
    assert served >= 0.8 * found.total(), found
    assert found["stop"] >= 0.8 * served, found
    assert_balance(cluster)


def test_answers_are_valid(pair: Cluster) -> None:
    check_schemas(pair, range(12), 64, both=False)


@pytest.mark.long
def test_answers_to_many_schemas_are_valid(pair: Cluster) -> None:
    check_schemas(pair, range(200), 200, both=True)


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 400), marks=pytest.mark.long)], ids=str)
def test_any_answer_that_a_grammar_lets_end_is_valid(smollm: Path, seeds: range) -> None:
    """Of tokens drawn at random from those that may follow, with nothing else around it."""
    tokenizer = Tokenizer.from_file(str(smollm / "tokenizer.json"))
    guides = Guides(smollm, tokenizer.get_vocab_size(), frozenset([EOS]))
    ended = 0
    for drawn in map(Drawn, seeds):
        if drawn.beyond:
            continue
        guide = guides.compile(LLMatcher.grammar_from_json_schema(drawn.schema, overrides=JSON_STYLE))
        draws, tokens = np.random.default_rng(drawn.seed), []
        while not guide.complete and tokens[-1:] != [EOS] and len(tokens) < 400:
            tokens.append(int(draws.choice(np.flatnonzero(guide.allowed()))))
            guide.accept(tokens[-1:])
        if len(tokens) < 400:
            ended += 1
            text = tokenizer.decode([token for token in tokens if token != EOS], skip_special_tokens=False)
            validate(json.loads(text), drawn.schema)
    assert ended > 0.6 * len(seeds)


def validate(value: object, schema: dict[str, Any]) -> None:
    jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=FORMATS)


def word(length: int) -> str:
    return "".join(draw.choice(string.ascii_lowercase) for _ in range(length))


draw = random.Random(4)


def nested(levels: int) -> str:
    begin = '{"type":"object","properties":{"a":' * levels
    return begin + '{"type":"string"}' + '},"required":["a"]}' * levels


def definitions(number: int) -> dict[str, Any]:
    """Each an object that has the next."""
    links = {f"a{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}}} for n in range(number)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{number}": {"type": "string"}}}


def big() -> dict[str, Any]:
    """150 kB."""
    properties = {word(20): {"type": "string", "description": word(100)} for _ in range(900)}
    return {"type": "object", "properties": properties, "required": list(properties)[:3]}


EXTREME: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "unknown type": (lambda: schema_format({"type": "foo"}), 400),
    "broken pattern": (lambda: schema_format({"type": "string", "pattern": "("}), 400),
    "cycle": (lambda: schema_format({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}), 400),
    "150 kB": (lambda: schema_format(big()), 200),
    "40 levels": (lambda: schema_format(json.loads(nested(40))), 200),
    "10,000 values": (lambda: schema_format({"enum": [word(9) for _ in range(10_000)]}), 200),
    "1,000 levels": (lambda: {"guided_json": nested(1000)}, 400),
    "2,000 definitions": (lambda: schema_format(definitions(2000)), 400),
    "12,000 rules": (
        lambda: {"guided_grammar": "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(12_000)) + 'r12000: "a"'},
        400,
    ),
    "9,000 rules of GBNF": (
        lambda: {"guided_grammar": "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(9000))},
        400,
    ),
    "a large divisor": (lambda: schema_format({"type": "number", "multipleOf": 999_983}), 400),
    "repetitions": (lambda: {"guided_regex": "(x+x+)+y{1,30000}(.{3,3000}z){2,900}"}, 200),
    "many states": (lambda: {"guided_regex": "(.*a.{30}){3}"}, 200),
    "ambiguous": (lambda: {"guided_grammar": "start: s\ns: /[a-z]/ | s s | s s s | s s s s"}, 200),
}


@pytest.mark.long
def test_extremes_are_answered_soon_and_others_meanwhile(pair: Cluster) -> None:
    """One extreme after another, and JSON that is deeper than a body may have, beside short requests in a row."""

    async def work(client: httpx.AsyncClient) -> None:
        await client.post(ROUTE, json=chat(TOKENS, guided_regex="a+"))  # the tokenizers of the grammars are loaded
        stop = asyncio.Event()
        beside = asyncio.create_task(short_requests(client, stop))
        for name, (body, status) in EXTREME.items():
            begun = time.monotonic()
            answer = await client.post(ROUTE, json=chat(TOKENS, temperature=0, **body()))
            assert answer.status_code == status, f"{name}: {answer.text[:300]}"
            assert time.monotonic() - begun < LIMIT_S, name
        text = json.dumps(chat(16, **schema_format("HERE"))).replace('"HERE"', nested(1000))
        answer = await client.post(ROUTE, content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        stop.set()
        assert max(await beside) < LIMIT_S

    run(pair, work)
    assert_balance(pair)


async def short_requests(client: httpx.AsyncClient, stop: asyncio.Event) -> list[float]:
    """Until told to stop; how long each took."""
    took = []
    for number in itertools.count():
        if stop.is_set():
            return took
        begun = time.monotonic()
        answer = await client.post(ROUTE, json=chat(TOKENS, temperature=0, user=f"{number}"))
        assert answer.status_code == 200, answer.text
        took.append(time.monotonic() - begun)
    raise AssertionError
