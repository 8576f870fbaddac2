"""Several workers and gateways on Ray, with real gossip between them: prompts land where their prefix is."""

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest
import ray

from cluster.launch import Cluster
from tests.cluster.checks import assert_balance, statuses
from tests.cluster.conftest import Launch
from tests.cluster.faulty_worker import restart
from tests.cluster.test_failures import VOCABULARY
from workers.actor import Worker

MODEL = "tiny-llama"
PROMPT = 320
GOSSIP_S = 0.8
"""In which what a worker holds has reached every router."""
ASK_PLAN = {"x-headwater-plan": "1"}


@pytest.fixture(scope="module")
def wide(launch: Launch, tiny: Path) -> Cluster:
    return launch(tiny, worker__kv_memory="24MiB", prefill__replicas=4, decode__replicas=1, gateway__replicas=2)


def words(seed: int, count: int = PROMPT) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def body(prompt: list[int]) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def ask(url: str, prompt: list[int]) -> tuple[int, list[str]]:
    """Tokens of the prompt that were cached, and the workers that were to compute the others, the last one did."""
    answer = httpx.post(f"{url}/v1/completions", json=body(prompt), headers=ASK_PLAN, timeout=60)
    assert answer.status_code == 200, answer.text
    (plans,) = json.loads(answer.headers["x-headwater-plan"])
    cached = int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    return cached, [plan["prefill"] for plan in plans]


def place(url: str, prompts: list[list[int]]) -> list[str]:
    """Where prompts are computed."""
    return [ask(url, prompt)[1][-1] for prompt in prompts]


def cached(url: str, prompts: list[list[int]]) -> float:
    """The share of prompts of which almost all is cached where they are sent."""
    return sum(ask(url, prompt)[0] >= PROMPT - 32 for prompt in prompts) / len(prompts)


def found(url: str, prompts: list[list[int]], where: list[str]) -> float:
    """The share of prompts that are sent where they were computed, and of which almost all is cached."""
    asked = [ask(url, prompt) for prompt in prompts]
    return sum(
        cached >= PROMPT - 32 and plans == [worker] for (cached, plans), worker in zip(asked, where, strict=True)
    ) / len(prompts)


def test_repeated_prompts_land_where_the_cache_is_through_either_gateway(wide: Cluster) -> None:
    prompts = [[words(seed) for seed in range(20)], [words(seed) for seed in range(20, 40)]]
    placed = [place(url, some) for url, some in zip(wide.urls, prompts, strict=True)]
    assert len({*placed[0], *placed[1]}) == 4
    time.sleep(GOSSIP_S)
    # Each through the gateway that it has not been through.
    assert found(wide.urls[1], prompts[0], placed[0]) >= 0.95
    assert found(wide.urls[0], prompts[1], placed[1]) >= 0.95
    assert_balance(wide)


def test_a_gateway_that_starts_late_knows_what_was_cached_before(wide: Cluster) -> None:
    prompts = [words(100 + seed) for seed in range(20)]
    placed = place(wide.urls[0], prompts)
    ray.kill(wide.gateways[1])
    port = wide.ports[1]
    actor = wide._gateway("gateway-2", port)  # its name is known to nobody
    try:
        assert ray.get(actor.start.remote(wide._seeds), timeout=60) == port
        time.sleep(GOSSIP_S)
        assert found(wide.urls[1], prompts, placed) >= 0.95
    finally:
        ray.kill(actor)
        wide._actors["gateway-1"] = wide._gateway("gateway-1", port)
        ray.get(wide._actors["gateway-1"].start.remote(wide._seeds), timeout=60)


def test_a_killed_worker_gets_nothing_after_a_second_and_comes_back_with_nothing(wide: Cluster) -> None:
    prompts = [words(200 + seed) for seed in range(24)]
    placed = place(wide.url, prompts)
    victim = placed[0]
    theirs = [prompt for prompt, worker in zip(prompts, placed, strict=True) if worker == victim]
    time.sleep(GOSSIP_S)
    ray.kill(wide.worker(victim))
    time.sleep(1.0)
    for url in wide.urls:
        assert all(victim not in ask(url, prompt)[1] for prompt in theirs)
        assert httpx.get(f"{url}/ready").status_code == httpx.get(f"{url}/v1/models").status_code == 200
    restart(wide, [victim], Worker)
    time.sleep(1.0)
    (again,) = (one for one in statuses(wide) if one.name == victim)
    assert again.cache.prompt_tokens == 0
    # A start takes the machine's time, in which workers may fall silent and be passed over.
    place(wide.url, theirs)
    time.sleep(GOSSIP_S)
    for url in wide.urls:
        # What it held is elsewhere now, with several by the two gateways' choices, and what is new finds it.
        assert cached(url, theirs) >= 0.75
        assert victim in place(url, [words(random.randrange(10**9)) for _ in range(30)])
    assert_balance(wide)


def test_a_worker_that_stands_still_gets_nothing_until_it_moves_again(wide: Cluster) -> None:
    prompts = [words(400 + seed) for seed in range(24)]
    placed = place(wide.url, prompts)
    victim = placed[0]
    theirs = [prompt for prompt, worker in zip(prompts, placed, strict=True) if worker == victim]
    (process,) = (psutil.Process(one.pid) for one in statuses(wide) if one.name == victim)
    time.sleep(GOSSIP_S)
    process.suspend()
    try:
        time.sleep(1.0)
        for url in wide.urls:
            assert all(victim not in ask(url, prompt)[1] for prompt in theirs)
    finally:
        process.resume()
    time.sleep(GOSSIP_S)
    assert victim in place(wide.url, [words(random.randrange(10**9)) for _ in range(30)])
    assert_balance(wide)


def test_requests_that_are_refused_count_against_no_worker(wide: Cluster) -> None:
    too_long = body(words(500, PROMPT) * 200)
    answers = [httpx.post(f"{wide.url}/v1/completions", json=too_long, timeout=60) for _ in range(20)]
    assert {answer.status_code for answer in answers} == {400}
    assert len(set(place(wide.url, [words(501 + seed) for seed in range(40)]))) == 4


def spread(cluster: Cluster, prompt: list[int], requests: int) -> Counter[str]:
    """By worker, how many of many equal requests at once it got."""

    async def one(client: httpx.AsyncClient, number: int) -> str:
        url = cluster.urls[number % len(cluster.urls)]
        answer = await client.post(f"{url}/v1/completions", json=body(prompt), headers=ASK_PLAN)
        assert answer.status_code == 200, answer.text
        ((*_, plan),) = json.loads(answer.headers["x-headwater-plan"])
        return str(plan["prefill"])

    async def all_at_once() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client, number) for number in range(requests)))

    return Counter(asyncio.run(all_at_once()))


def test_one_hot_prompt_does_not_go_to_one_worker(wide: Cluster) -> None:
    placed = spread(wide, words(300), 400)
    assert max(placed.values()) <= 1.3 * 400 / 4
    assert_balance(wide)


def test_a_dead_gateway_keeps_no_other_from_draining(wide: Cluster) -> None:
    ray.kill(wide.gateways[1])
    assert wide.drain() == 0


@pytest.mark.long
def test_one_hot_prompt_of_500_over_8_workers(launch: Launch, tiny: Path) -> None:
    cluster = launch(tiny, worker__kv_memory="24MiB", prefill__replicas=8, decode__replicas=1)
    placed = spread(cluster, words(301), 500)
    assert max(placed.values()) <= 1.3 * 500 / 8
    assert_balance(cluster)
