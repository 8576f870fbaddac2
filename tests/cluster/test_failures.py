"""What clients see when they leave, ask for what cannot be or for too much: no wrong token, no hang, no leak.

Workers that die one at a time are in test_faults.py, a gateway and all of a role in test_routing.py.
"""

import asyncio
import random
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.launch import Cluster
from tests.cluster.checks import assert_alive, assert_balance, statuses
from tests.cluster.conftest import Launch

MODEL = "tiny-llama"
VOCABULARY = 512
LIMIT_OVER_BUDGET = int(1.2 * 2**30)


def body(prompt: list[int], tokens: int, **more: object) -> dict:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


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


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_random_requests_on_the_default_model(launch: Launch, smollm: Path) -> None:
    cluster = launch(smollm)
    weights = sum(file.stat().st_size for file in smollm.glob("*.safetensors"))
    check_random_requests(cluster, "smollm2-135m-instruct", 40000, Judge(smollm), weights, count=300)
    cluster.stop()


def check_random_requests(
    cluster: Cluster, model: str, vocabulary: int, judge: Judge, weights: int, count: int
) -> None:
    """Requests of 1 to 1,800 tokens, a third cut by their clients, a fifth invalid; memory stays in its budget."""
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

            await asyncio.gather(*(limited(number) for number in range(count)))

    asyncio.run(run())
    assert_balance(cluster)
    assert_alive(cluster, model)
    budget = weights + cluster.config.worker.kv_memory + LIMIT_OVER_BUDGET
    assert len(peaks) == len(cluster.config.workers)
    assert max(peaks.values()) <= budget, peaks


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
