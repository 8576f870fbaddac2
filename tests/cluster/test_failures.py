"""What clients see when they leave, and when all of a role or the gateway die: no wrong token, no hang, no leak.

Workers that die one at a time are in test_faults.py.
"""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import ray
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from cluster.launch import Cluster
from tests.cluster.checks import assert_alive, assert_balance, statuses
from tests.cluster.conftest import Launch

MODEL = "tiny-llama"
VOCABULARY = 512
LIMIT_OVER_BUDGET = int(1.2 * 2**30)


def body(prompt: list[int], tokens: int, **more: object) -> dict:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def pid(cluster: Cluster, name: str) -> int:
    return next(one.pid for one in statuses(cluster) if one.name == name)


@pytest.fixture(scope="module")
def quads(launch: Launch, tiny: Path) -> Cluster:
    """The test that kills its workers comes last."""
    return launch(tiny, prefill__replicas=2, decode__replicas=2, worker__kv_memory="48MiB")


@pytest.fixture(scope="module")
def narrow(launch: Launch, tiny: Path) -> Cluster:
    """One request at a time on each worker, and one that waits. The last test kills its gateway."""
    return launch(tiny, worker__kv_memory="64MiB", worker__max_waiting=1, worker__max_running=1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_during_prefill_stops_the_work(pair: Cluster, stream: bool) -> None:
    draw = random.Random(stream)
    wanted = {"model": "smollm2-135m-instruct", "prompt": [draw.randrange(9000) for _ in range(2000)], "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{pair.url}/v1/completions", json=wanted, timeout=0.7)
    assert_balance(pair, within_s=2)


class Judge:
    """Greedy answers of the tiny model, by transformers. A near-tie may go either way."""

    def __init__(self, model: Path) -> None:
        self._module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")

    def right(self, prompt: list[int], ids: list[int]) -> bool:
        with torch.inference_mode():
            logits = self._module(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        return bool((logits.max(dim=1).values - chosen < 1e-3).all())


def test_random_requests_get_right_answers_or_proper_errors(quads: Cluster, tiny: Path) -> None:
    """300 requests of 1 to 1,800 tokens, a third cut by their clients, a fifth invalid; memory stays in its budget."""
    check_random_requests(quads, MODEL, VOCABULARY, Judge(tiny), weights=0)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_random_requests_on_the_default_model(launch: Launch, smollm: Path) -> None:
    cluster = launch(smollm)
    weights = sum(file.stat().st_size for file in smollm.glob("*.safetensors"))
    check_random_requests(cluster, "smollm2-135m-instruct", 40000, Judge(smollm), weights)
    cluster.stop()


def check_random_requests(cluster: Cluster, model: str, vocabulary: int, judge: Judge, weights: int) -> None:
    draw = random.Random(11)
    texts = [[draw.randrange(vocabulary) for _ in range(1800)] for _ in range(6)]
    peaks: dict[str, int] = {}
    invalid = [
        {"temperature": -1},
        {"max_tokens": 10**9},
        {"prompt": []},
        {"prompt": [10**9]},
        {"stop": [""]},
        {"model": "none"},
        {"prompt": [1] * 9000},
    ]

    async def request(client: httpx.AsyncClient, number: int) -> None:
        text = [*draw.choice(texts)[: draw.randrange(1, 1801)], number % vocabulary]
        wanted = {**body(text, draw.randrange(1, 24), return_token_ids=True), "model": model}
        kind = draw.random()
        if kind < 0.2:
            answer = await client.post("/v1/completions", json={**wanted, **draw.choice(invalid)})
            assert answer.status_code in (400, 404), answer.text
            assert answer.json()["error"]["message"]
        elif kind < 0.5:
            keep = draw.randrange(1, 12)
            async with client.stream("POST", "/v1/completions", json={**wanted, "stream": True}) as answer:
                async for line in answer.aiter_lines():
                    keep -= bool(line)
                    if not keep:
                        break
        else:
            answer = await client.post("/v1/completions", json=wanted)
            assert answer.status_code == 200, answer.text
            ids = answer.json()["choices"][0]["token_ids"]
            assert len(ids) == wanted["max_tokens"]
            assert await asyncio.to_thread(judge.right, text, ids), f"request {number} is answered wrongly"

    async def run() -> None:
        gate = asyncio.Semaphore(12)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:

            async def limited(number: int) -> None:
                async with gate:
                    await request(client, number)
                if number % 25 == 0:
                    for one in await asyncio.to_thread(statuses, cluster):
                        rss = psutil.Process(one.pid).memory_info().rss
                        peaks[one.name] = max(peaks.get(one.name, 0), rss)

            await asyncio.gather(*(limited(number) for number in range(300)))

    asyncio.run(run())
    assert_balance(cluster)
    assert_alive(cluster, model)
    budget = weights + cluster.config.worker.kv_memory + LIMIT_OVER_BUDGET
    assert len(peaks) == len(cluster.config.workers)
    assert max(peaks.values()) <= budget, peaks


def test_without_a_role_the_answer_is_503_at_once(quads: Cluster) -> None:
    """Last of the tests that share this cluster."""
    for one in statuses(quads):
        if one.role == "decode":
            os.kill(one.pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while httpx.get(f"{quads.url}/ready").status_code != 503:
        assert time.monotonic() < until
    start = time.monotonic()
    answer = httpx.post(f"{quads.url}/v1/completions", json=body([1, 2, 3], 4), timeout=10)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert time.monotonic() - start < 1
    assert httpx.get(f"{quads.url}/v1/models").status_code == 503
    assert httpx.get(f"{quads.url}/health").status_code == 200


def test_a_full_queue_is_429_at_once(narrow: Cluster) -> None:
    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            wanted = [body([number] * 800, 60) for number in range(30)]
            return await asyncio.gather(*(client.post(f"{narrow.url}/v1/completions", json=one) for one in wanted))

    found = asyncio.run(run())
    assert {one.status_code for one in found} == {200, 429}
    assert all(one.headers["retry-after"] for one in found if one.status_code == 429)
    assert_balance(narrow)
    assert_alive(narrow, MODEL)


def test_a_gateway_killed_in_mid_stream_frees_the_workers(narrow: Cluster) -> None:
    """Last of the tests that share this cluster."""
    gateway = ray.get(narrow.gateways[0].ping.remote())
    client = OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0, timeout=30)
    stream = client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=1500, stream=True)
    next(iter(stream))
    os.kill(gateway, signal.SIGKILL)
    with pytest.raises(openai.APIConnectionError):
        list(stream)
    until = time.monotonic() + 3
    while any(one.running or one.waiting for one in statuses(narrow)):
        assert time.monotonic() < until, "the workers still work for nobody"
        time.sleep(0.05)
