"""Requests drawn from the served OpenAPI document, such that fit it and such that do not: every answer is one that the
document allows and that the official clients can read, and afterwards the cluster is at rest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import anthropic.types
import openai.types
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from openai.pagination import SyncCursorPage
from openai.types import chat, responses
from pydantic import TypeAdapter
from schemathesis import APIOperation, Case, GenerationMode, Response
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

from cluster.launch import Cluster
from tests.cluster.checks import assert_alive, assert_balance
from tests.model_zoo import VOCABULARY

LENGTHS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
"""Fields that say how long an answer may be."""
FEW_TOKENS, FEW_CHOICES = 4, 2
ELSEWHERE = [positive_data_acceptance, not_a_server_error]
"""Checks that are not made as they are: a request may fit the document and not the context, or name a deadline."""
ANSWERS: dict[str, Any] = {
    "/v1/models/{name}": openai.types.Model,
    "/v1/chat/completions": chat.ChatCompletion,
    "/v1/completions": openai.types.Completion,
    "/v1/embeddings": openai.types.CreateEmbeddingResponse,
    "/v1/responses": responses.Response,
    "/v1/responses/{name}": responses.Response,
    "/v1/responses/{name}/cancel": responses.Response,
    "/v1/files": openai.types.FileObject,
    "GET /v1/files": SyncCursorPage[openai.types.FileObject],
    "/v1/files/{file_id}": openai.types.FileObject,
    "/v1/batches": openai.types.Batch,
    "GET /v1/batches": SyncCursorPage[openai.types.Batch],
    "/v1/batches/{batch_id}": openai.types.Batch,
    "/v1/batches/{batch_id}/cancel": openai.types.Batch,
    "/v1/messages": anthropic.types.Message,
    "/v1/messages/count_tokens": anthropic.types.MessageTokensCount,
}
"""Types that the official clients have for answers, and for the events of streams."""
EVENTS: dict[str, Any] = {
    "/v1/chat/completions": chat.ChatCompletionChunk,
    "/v1/completions": openai.types.Completion,
    "/v1/responses": responses.ResponseStreamEvent,
    "/v1/messages": anthropic.types.RawMessageStreamEvent,
}
NO_TYPE_FOR = {"ping"}
"""Events that the clients skip."""


class Api:
    """Calls the operations of a gateway with what is drawn for them."""

    def __init__(self, url: str) -> None:
        self.schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations: list[APIOperation] = [one.ok() for one in self.schema.get_all_operations()]
        self.operations = sorted(operations, key=lambda one: one.method == "delete")
        self.model = self.schema["/v1/models"]["GET"].Case().call().json()["data"][0]["id"]
        self.statuses: Counter[tuple[str, int]] = Counter()
        body = {"model": self.model, "input": "Hi", "background": True, "max_output_tokens": FEW_TOKENS}
        self._stored = self.schema["/v1/responses"]["POST"].Case(body=body).call().json()["id"]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
        long = {"model": self.model, "prompt": "Hi", "max_tokens": 500, "ignore_eos": True}
        file = client.files.create(file=json.dumps({**line, "body": long}).encode(), purpose="batch")
        quick = client.files.create(file=b"{}\n", purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        client.batches.cancel(made.id)
        self._there = {"file_id": quick.id, "batch_id": made.id}

    def call(self, case: Case, fits: bool) -> None:
        """Call and check."""
        self._prepare(case, fits)
        answer = case.call(timeout=30)
        path = case.operation.path
        self.statuses[path, answer.status_code] += 1
        late = answer.status_code == 504 and isinstance(case.body, dict) and case.body.get("timeout") is not None
        assert answer.status_code < 500 or late, f"{answer.text}\n{case.as_curl_command()}"
        case.validate_response(answer, excluded_checks=ELSEWHERE)
        if answer.status_code == 200:
            self._read(case, answer)

    def _prepare(self, case: Case, fits: bool) -> None:
        """Most requests name what exists, and those that fit the document ask for little."""
        if "name" in case.path_parameters:
            exists = self.model if case.operation.path.startswith("/v1/models") else self._stored
            case.path_parameters["name"] = exists if len(case.path_parameters["name"]) % 4 else "none"
        for name, there in self._there.items():
            if name in case.path_parameters and len(case.path_parameters[name]) % 4:
                case.path_parameters[name] = there
        body = case.body
        if not isinstance(body, dict):
            return
        if "input_file_id" in body and len(str(body["input_file_id"])) % 4:
            body["input_file_id"] = self._there["file_id"]
        if isinstance(body.get("model"), str) and len(body["model"]) % 8 < 7:
            body["model"] = self.model
        if fits:
            body.update(_integers(body))
            body.update(_modest(body, case.operation.path))

    def _read(self, case: Case, answer: Response) -> None:
        path = case.operation.path
        if not answer.headers["content-type"][0].startswith("text/event-stream"):
            packed = isinstance(case.body, dict) and case.body.get("encoding_format") == "base64"
            kind = ANSWERS.get(f"{case.method} {path}") or ANSWERS.get(path)
            if kind is not None and case.method != "DELETE" and not packed:
                TypeAdapter(kind).validate_json(answer.content, strict=True)
            return
        event_kind: TypeAdapter[Any] = TypeAdapter(EVENTS[path])
        for line in answer.text.split("\n"):
            data = line.removeprefix("data: ")
            event = json.loads(data) if line.startswith("data: {") else None
            if event is None or "error" in event or event.get("type") in NO_TYPE_FOR:
                continue
            for choice in event.get("choices", []) if path == "/v1/completions" else []:
                choice["finish_reason"] = choice["finish_reason"] or "stop"  # null has no type there
            event_kind.validate_json(json.dumps(event), strict=True)


def _integers(value: Any) -> Any:
    """To JSON Schema 1.0 is an integer, to the gateway it is none."""
    if isinstance(value, dict):
        return {key: _integers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_integers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _modest(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Changes to a body: few tokens, few choices, tokens that the model has, and something to answer."""
    names = LENGTHS.get(path, ())
    given = [name for name in names if body.get(name) is not None]
    changes: dict[str, Any] = {name: min(body[name], FEW_TOKENS) for name in given}
    if not given:
        changes.update(dict.fromkeys(names[:1], FEW_TOKENS))
    for name in ("n", "best_of"):
        if body.get(name) is not None:
            changes[name] = min(body[name], FEW_CHOICES)
    for name in ("prompt", "input", "tokens"):
        if name in body:
            changes[name] = _in_vocabulary(body[name])
    if path.startswith("/v1/messages"):
        changes["messages"] = [*body["messages"], {"role": "user", "content": "Hi"}]
    return changes


def _in_vocabulary(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_vocabulary(one) for one in value]
    return value % VOCABULARY if isinstance(value, int) else value


@pytest.fixture(autouse=True)
def at_rest(tiny_pair: Cluster) -> Iterator[None]:
    yield
    assert_balance(tiny_pair)


def draw(api: Api, operation: APIOperation, fits: bool, options: dict[str, Any]) -> None:
    """Call one operation with what is drawn."""
    mode = GenerationMode.POSITIVE if fits else GenerationMode.NEGATIVE
    health = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

    @settings(deadline=None, suppress_health_check=health, **options)
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        api.call(case, fits)

    run()


def draw_all(cluster: Cluster, **options: Any) -> Api:
    api = Api(cluster.url)
    for operation in api.operations:
        draw(api, operation, True, options)
        if operation.body or operation.query:
            draw(api, operation, False, options)
    assert_balance(cluster)
    assert_alive(cluster, api.model)
    served = {path for path, status in api.statuses if status == 200}
    assert served == {operation.path for operation in api.operations}
    return api


def test_some_hundred_requests(tiny_pair: Cluster) -> None:
    """Always the same ones."""
    api = draw_all(tiny_pair, max_examples=12, derandomize=True, database=None, phases=[Phase.generate])
    assert sum(api.statuses.values()) >= 250


@pytest.mark.long
@pytest.mark.timeout(900)
def test_thousands_of_requests(tiny_pair: Cluster) -> None:
    api = draw_all(tiny_pair, max_examples=240)
    assert sum(api.statuses.values()) >= 5000
