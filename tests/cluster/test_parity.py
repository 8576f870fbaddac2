"""An answer is a function of its request: whole or streamed, cold or warm, by one worker, a pair or two pairs."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.launch import Cluster
from tests.cluster.checks import assert_balance
from tests.cluster.conftest import TINY, Launch

CHAT = [{"role": "user", "content": "Say something about rivers, mills and boats."}]
PROMPT = "The river runs past the mill and the boats"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "animal", "description": "Draw it", "parameters": SCHEMA}}]
DRAWN = {"temperature": 0.9, "seed": 7}
CHATS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one token": {"max_tokens": 1, "logprobs": True},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 9},
    "drawn": {**DRAWN, "logprobs": True, "top_logprobs": 3},
    "n": {**DRAWN, "n": 3, "logprobs": True},
    "top_p, top_k, min_p": {**DRAWN, "top_p": 0.8, "top_k": 40, "min_p": 0.05},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {"70": 4.0, "71": -100}, "logprobs": True},
    "min_tokens": {"min_tokens": 12, "ignore_eos": False, "logit_bias": {"256": 8.0}, "logprobs": True},
    "stop": {**DRAWN, "max_tokens": 40, "stop": ["e", "a", "1>"]},
    "token ids": {"return_token_ids": True},
    "schema": {"response_format": FORMAT, "max_tokens": 60, "logprobs": True},
    "drawn schema": {**DRAWN, "response_format": FORMAT, "max_tokens": 60, "n": 2},
    "json_object": {"response_format": {"type": "json_object"}, **DRAWN},
    "guided_json": {"guided_json": SCHEMA, "max_tokens": 60},
    "guided_regex": {"guided_regex": "[a-c]{4}-[0-9]{3}", "max_tokens": 20},
    "guided_choice": {"guided_choice": ["blue", "green"], **DRAWN},
    "guided_grammar": {"guided_grammar": 'start: "x" /[0-9]{2}/ "y"', **DRAWN},
    "tools": {"tools": TOOLS, "tool_choice": "auto"},
    "required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120},
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "animal"}}, "max_tokens": 120},
    "others": {"user": "me", "metadata": {"a": "b"}, "priority": 0, "timeout": 60.0},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "prompts": {"prompt": [PROMPT, PROMPT[:20]], "n": 2, "logprobs": 2, "echo": True, **DRAWN},
    "scored": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "echo": {"echo": True},
    "best_of": {"best_of": 3, "n": 2, **DRAWN, "stream": False},
    "prompt_logprobs": {"prompt_logprobs": 2, "stream": False},
    "ids": {"prompt": [5, 9, 300, 17, 41, 42, 43]},
}


class Api:
    """One cluster's, asked in ways that must not matter."""

    def __init__(self, cluster: Cluster, model: Path) -> None:
        self._http = httpx.Client(base_url=cluster.url, timeout=60)
        self._model = self._http.get("/v1/models").json()["data"][0]["id"]

    def ask(self, route: str, body: dict[str, Any], salt: str, stream: bool) -> dict[str, Any]:
        """What the answer comes to. Another `salt` is another cache."""
        body = {
            "model": self._model,
            "temperature": 0,
            "max_tokens": 16,
            "ignore_eos": True,
            **body,
            "cache_salt": salt,
        }
        if not stream:
            answer = self._http.post(route, json={**body, "stream": False})
            assert answer.status_code == 200, answer.text
            whole = answer.json()
            return {"usage": counted(whole["usage"]), "choices": [_whole(choice) for choice in whole["choices"]]}
        choices: dict[int, dict[str, Any]] = {}
        usage = None
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with self._http.stream("POST", route, json={**body, **options}) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    usage = chunk["usage"] or usage
                    for choice in chunk["choices"]:
                        _add(choices.setdefault(choice["index"], {}), choice)
        assert usage is not None
        return {"usage": counted(usage), "choices": [choices[index] for index in sorted(choices)]}


def counted(usage: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the cache."""
    details = usage.pop("prompt_tokens_details")
    assert 0 <= details["cached_tokens"] < usage["prompt_tokens"]
    return usage


def _whole(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message", {"content": choice.get("text")})
    calls = [one["function"] for one in message.get("tool_calls", [])]
    return {
        "text": message["content"] or "",
        "calls": calls,
        "reasoning": message.get("reasoning_content", ""),
        "finish": choice["finish_reason"],
        "ids": choice.get("token_ids", []),
        "logprobs": _entries(choice["logprobs"]),
        "prompt": choice.get("prompt_logprobs"),
    }


def _add(into: dict[str, Any], choice: dict[str, Any]) -> None:
    """A chunk's part of a choice."""
    if not into:
        into.update(text="", calls=[], reasoning="", finish=None, ids=[], logprobs=[], prompt=None)
    assert into["finish"] is None, "something came behind the end"
    delta = choice.get("delta", {"content": choice.get("text")})
    into["text"] += delta.get("content") or ""
    into["reasoning"] += delta.get("reasoning_content", "")
    into["ids"] += choice.get("token_ids", [])
    into["logprobs"] += _entries(choice["logprobs"])
    into["finish"] = choice["finish_reason"]
    for call in delta.get("tool_calls", []):
        if call["index"] == len(into["calls"]):
            into["calls"].append({"name": call["function"]["name"], "arguments": ""})
        into["calls"][call["index"]]["arguments"] += call["function"]["arguments"]


def _entries(logprobs: dict[str, Any] | None) -> list[Any]:
    """One an output token, comparable whatever the API."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return logprobs["content"]
    return [list(one) for one in zip(*(logprobs[key] for key in sorted(logprobs)), strict=True)]


def near(one: Any, other: Any) -> bool:
    """Equal, numbers of log-probabilities to 1e-3."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(near(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(near, one, other))
    return bool(one == other)


def requests() -> list[tuple[str, str, dict[str, Any]]]:
    chats = [(name, "/v1/chat/completions", {"messages": CHAT, **body}) for name, body in CHATS.items()]
    return chats + [(name, "/v1/completions", {"prompt": PROMPT, **body}) for name, body in COMPLETIONS.items()]


@pytest.fixture(scope="module")
def clusters(launch: Launch, tiny: Path, tiny_pair: Cluster) -> dict[str, Cluster]:
    roles = {"prefill__replicas": 0, "decode__replicas": 0, "both__replicas": 1}
    return {"both": launch(tiny, **roles, **TINY), "pair": tiny_pair}


@pytest.fixture(scope="module")
def apis(clusters: dict[str, Cluster], tiny: Path) -> dict[str, Api]:
    return {name: Api(cluster, tiny) for name, cluster in clusters.items()}


@pytest.fixture(autouse=True)
def at_rest(clusters: dict[str, Cluster]) -> Iterator[None]:
    yield
    for one in clusters.values():
        assert_balance(one)


@pytest.mark.parametrize(("name", "route", "body"), requests(), ids=[name for name, _, _ in requests()])
def test_the_answer_is_the_same(apis: dict[str, Api], name: str, route: str, body: dict[str, Any]) -> None:
    compare(apis, name, route, body)


def compare(apis: dict[str, Api], name: str, route: str, body: dict[str, Any]) -> None:
    expected = None
    for deployment, api in apis.items():
        salts = [uuid.uuid4().hex for _ in range(2)]
        ways = [
            (salt, stream) for salt, first in zip(salts, (False, True), strict=True) for stream in (first, not first)
        ]
        for salt, stream in ways:
            if stream and body.get("stream") is False:
                continue
            found = api.ask(route, body, salt, stream)
            expected = expected or found
            assert near(found, expected), f"{name}: {deployment}, {stream=}: {found} is not {expected}"
    assert expected is not None
    _check(name, expected)


def _check(name: str, answer: dict[str, Any]) -> None:
    """That the parameter did what it is for."""
    choices, usage = answer["choices"], answer["usage"]
    first = choices[0]
    assert all(choice["finish"] in ("stop", "length", "tool_calls") for choice in choices)
    if "schema" in name or name == "guided_json":
        assert all(json.loads(choice["text"])["kind"] in ("cat", "dog") for choice in choices)
    elif name in ("required", "named"):
        assert first["finish"] == "tool_calls"
        assert [call["name"] for call in first["calls"]] == ["animal"]
        assert json.loads(first["calls"][0]["arguments"])["kind"] in ("cat", "dog")
    elif name == "guided_choice":
        assert first["text"] in ("blue", "green")
    elif name in ("n", "prompts"):
        assert len({choice["text"] for choice in choices}) == len(choices) == {"n": 3, "prompts": 4}[name]
        assert usage["completion_tokens"] == 16 * len(choices)
    elif name == "min_tokens":
        assert first["finish"] == "stop"
        assert len(first["logprobs"]) == usage["completion_tokens"] == 13
    elif name == "stop":
        assert first["finish"] == "stop"
        assert not any(stop in first["text"] for stop in CHATS["stop"]["stop"])
    elif name == "scored":
        assert (usage["completion_tokens"], first["text"], first["finish"]) == (0, PROMPT, "length")
        assert len(first["logprobs"]) == usage["prompt_tokens"]
    elif name == "best_of":
        assert len(choices) == 2
        assert usage["completion_tokens"] == 48
    elif name == "prompt_logprobs":
        assert len(first["prompt"]) == usage["prompt_tokens"]
    elif name == "token ids":
        assert len(first["ids"]) == usage["completion_tokens"]


@pytest.mark.long
def test_two_pairs_of_the_default_model(launch: Launch, smollm: Path) -> None:
    shape = {"worker__kv_memory": "256MiB", "worker__max_model_len": 2048}
    two = launch(smollm, prefill__replicas=2, decode__replicas=2, **shape)
    one = launch(smollm, prefill__replicas=0, decode__replicas=0, both__replicas=1, **shape)
    apis = {"two pairs": Api(two, smollm), "both": Api(one, smollm)}
    for name, route, body in requests():
        if name not in ("ids", "min_tokens", "stop"):  # these are about the tiny model's tokens
            compare(apis, name, route, body)
    assert_balance(two)
    assert_balance(one)
