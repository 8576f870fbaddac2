"""Several workers and gateways on Ray, with real gossip between them: prompts land where their prefix is, and what is
left serves, or says that it cannot, when some of them die."""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from itertools import cycle, repeat
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import ray
from openai import OpenAI

from cluster.launch import Cluster
from tests.cluster.checks import assert_balance, post, statuses
from tests.cluster.conftest import Launch
from tests.cluster.faulty_worker import restart
from tests.cluster.test_failures import VOCABULARY, Judge, check_random_requests
from workers.actor import Worker

MODEL = "tiny-llama"
PROMPT = 320
GOSSIP_S = 0.8
"""In which what a worker holds has reached every router."""
ASK_PLAN = {"x-headwater-plan": "1"}


@pytest.fixture(scope="module")
def wide(launch: Launch, tiny: Path) -> Cluster:
    return launch(tiny, worker__kv_memory="24MiB", prefill__replicas=3, decode__replicas=1, gateway__replicas=2)


def words(seed: int, count: int = PROMPT) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def new_prompts() -> list[list[int]]:
    """So many that, sent at once, some go to each worker that may get any, even to one that seems slow."""
    return [words(random.randrange(10**9)) for _ in range(30)]


def body(prompt: list[int]) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def ask(url: str, prompt: list[int]) -> tuple[int, list[str]]:
    """Tokens of the prompt that were cached, and the workers that were to compute the others, the last one did."""
    answer = post(f"{url}/v1/completions", body(prompt), headers=ASK_PLAN)
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


def spread(urls: list[str], prompts: list[list[int]]) -> Counter[str]:
    """By worker, how many of these requests it got, which are sent at once and through each gateway in turn."""

    async def one(client: httpx.AsyncClient, url: str, prompt: list[int]) -> str:
        answer = await client.post(f"{url}/v1/completions", json=body(prompt), headers=ASK_PLAN)
        assert answer.status_code == 200, answer.text
        ((*_, plan),) = json.loads(answer.headers["x-headwater-plan"])
        return str(plan["prefill"])

    async def all_at_once() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits, verify=False) as client:
            return await asyncio.gather(*map(one, repeat(client), cycle(urls), prompts))

    return Counter(asyncio.run(all_at_once()))


def test_repeated_prompts_land_where_the_cache_is_through_either_gateway(wide: Cluster) -> None:
    prompts = [[words(seed) for seed in range(20)], [words(seed) for seed in range(20, 40)]]
    placed = [place(url, some) for url, some in zip(wide.urls, prompts, strict=True)]
    assert len({*placed[0], *placed[1]}) == 3
    time.sleep(GOSSIP_S)
    # Each through the gateway that it has not been through.
    assert found(wide.urls[1], prompts[0], placed[0]) >= 0.95
    assert found(wide.urls[0], prompts[1], placed[1]) >= 0.95
    assert_balance(wide)


@pytest.mark.long
def test_a_gateway_that_starts_late_knows_what_was_cached_before(wide: Cluster) -> None:
    """It takes the place of the one that is ended for it."""
    prompts = [words(100 + seed) for seed in range(20)]
    placed = place(wide.urls[0], prompts)
    ray.kill(wide.gateways[1])
    late = wide._actors["gateway-1"] = wide._gateway("gateway-2", wide.ports[1])  # its name is known to nobody
    assert ray.get(late.start.remote(wide._seeds), timeout=60) == wide.ports[1]
    time.sleep(GOSSIP_S)
    assert found(wide.urls[1], prompts, placed) >= 0.95


@pytest.mark.long
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
        assert victim in spread([url], new_prompts())
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
    assert victim in spread([wide.url], new_prompts())
    assert_balance(wide)


def test_requests_that_are_refused_count_against_no_worker(wide: Cluster) -> None:
    too_long = body(words(500, PROMPT) * 7)
    answers = [post(f"{wide.url}/v1/completions", too_long) for _ in range(20)]
    assert {answer.status_code for answer in answers} == {400}
    assert len(spread(wide.urls, new_prompts())) == 3


def test_one_hot_prompt_does_not_go_to_one_worker(wide: Cluster) -> None:
    placed = spread(wide.urls, [words(300)] * 300)
    assert max(placed.values()) <= 1.3 * 300 / 3
    assert_balance(wide)


@pytest.mark.long
def test_random_requests_get_right_answers_or_proper_errors(wide: Cluster, tiny: Path) -> None:
    check_random_requests(wide, MODEL, VOCABULARY, Judge(tiny), weights=0, count=150)


def test_a_gateway_killed_in_mid_stream_frees_the_workers(wide: Cluster) -> None:
    """From here on, each test leaves less of this cluster."""
    process = ray.get(wide.gateways[1].ping.remote())
    client = OpenAI(base_url=f"{wide.urls[1]}/v1", api_key="none", max_retries=0, timeout=30)
    stream = client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=1500, stream=True)
    next(iter(stream))
    os.kill(process, signal.SIGKILL)
    with pytest.raises(openai.APIConnectionError):
        list(stream)
    until = time.monotonic() + 3
    while any(one.running or one.waiting for one in statuses(wide)):
        assert time.monotonic() < until, "the workers still work for nobody"
        time.sleep(0.05)


def test_without_a_role_the_answer_is_503_at_once(wide: Cluster) -> None:
    for one in statuses(wide):
        if one.role == "decode":
            os.kill(one.pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while httpx.get(f"{wide.url}/ready").status_code != 503:
        assert time.monotonic() < until
    start = time.monotonic()
    answer = post(f"{wide.url}/v1/completions", body([1, 2, 3]), timeout=10)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert time.monotonic() - start < 1
    assert httpx.get(f"{wide.url}/v1/models").status_code == 503
    assert httpx.get(f"{wide.url}/health").status_code == 200


def test_a_dead_gateway_keeps_no_other_from_draining(wide: Cluster) -> None:
    ray.kill(wide.gateways[1])
    assert wide.drain() == 0


@pytest.mark.long
def test_one_hot_prompt_of_500_over_8_workers(launch: Launch, tiny: Path) -> None:
    cluster = launch(tiny, worker__kv_memory="24MiB", prefill__replicas=8, decode__replicas=1)
    placed = spread(cluster.urls, [words(301)] * 500)
    assert max(placed.values()) <= 1.3 * 500 / 8
    assert_balance(cluster)
