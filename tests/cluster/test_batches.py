"""`/v1/files` and `/v1/batches` on a real cluster, by the official client."""

import json
import time

import openai
import pytest
from openai.types import Batch

from cluster.config import load, with_batches
from cluster.launch import Cluster
from router.batch.lines import RESPONSES
from tests.cluster.checks import assert_balance, post
from tests.cluster.test_batch import BODIES, alike, answer_of, body_of, without_ids


def over(client: openai.OpenAI, batch: Batch) -> Batch:
    until = time.monotonic() + 60
    while (found := client.batches.retrieve(batch.id)).status not in ("completed", "failed", "cancelled", "expired"):
        assert time.monotonic() < until, found
        time.sleep(0.02)
    return found


def test_batches_of_every_route_answer_as_the_routes_do(tiny_pair: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{tiny_pair.url}/v1", api_key="none", max_retries=0)
    made = []
    for url in BODIES:
        lines = [
            {"custom_id": f"{number}", "method": "POST", "url": url, "body": body_of(url, number)}
            for number in range(4)
        ]
        file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        made.append(
            client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")  # type: ignore[arg-type]
        )
    for url, batch in zip(BODIES, made, strict=True):
        done = over(client, batch)
        assert (done.status, done.endpoint, done.error_file_id) == ("completed", url, None)
        rows = [json.loads(one) for one in client.files.content(done.output_file_id or "").text.splitlines()]
        found = {row["custom_id"]: row["response"]["body"] for row in rows}
        assert sorted(found) == ["0", "1", "2", "3"]
        direct = post(f"{tiny_pair.url}{url}", body_of(url, 2)).json()
        assert alike(without_ids(answer_of(found["2"])), without_ids(answer_of(direct)))
        assert found["2"].get("store") is (False if url == RESPONSES else None)
    assert_balance(tiny_pair)


@pytest.mark.parametrize(
    ("flags", "on"),
    [
        ({}, True),
        ({"gateway.host": "0.0.0.0"}, False),
        ({"gateway.batch_path": "/x"}, True),
        ({"gateway.batch_path": "/x", "gateway.host": "0.0.0.0"}, True),
    ],
)
def test_a_machine_of_ones_own_has_batches_without_a_setting(flags: dict[str, str], on: bool) -> None:
    found = with_batches(load(None, flags, {})).gateway.batch_path
    assert (found is not None) == on
    assert found is None or found.is_absolute()
    off = load(None, {}, {"HEADWATER__GATEWAY__BATCH_PATH": "null"})
    assert with_batches(off).gateway.batch_path is None
