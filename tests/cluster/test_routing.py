"""Several workers and gateways on Ray, with real gossip between them: prompts land where their prefix is."""

import random
import time
from pathlib import Path

import httpx
import pytest

from cluster.launch import Cluster
from tests.cluster.checks import assert_balance, statuses
from tests.cluster.conftest import Launch
from tests.cluster.test_failures import VOCABULARY

MODEL = "tiny-llama"
PROMPT = 320
GOSSIP_S = 0.8


@pytest.fixture(scope="module")
def wide(launch: Launch, tiny: Path) -> Cluster:
    return launch(tiny, worker__kv_memory="24MiB", prefill__replicas=4, decode__replicas=1, gateway__replicas=2)


def words(seed: int, count: int = PROMPT) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def ask(url: str, prompt: list[int]) -> int:
    """Tokens of the prompt that were cached."""
    wanted = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=wanted, timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_repeated_prompts_land_where_the_cache_is_through_either_gateway(wide: Cluster) -> None:
    prompts = [words(seed) for seed in range(40)]
    for number, prompt in enumerate(prompts):
        ask(wide.urls[number % 2], prompt)
    time.sleep(GOSSIP_S)
    # Each through the gateway that it has not been through.
    cached = [ask(wide.urls[1 - number % 2], prompt) for number, prompt in enumerate(prompts)]
    hits = sum(tokens >= PROMPT - 32 for tokens in cached)
    assert hits >= 0.95 * len(prompts)
    used = {one.name for one in statuses(wide) if one.role == "prefill" and one.cache.requests}
    assert len(used) == 4
    assert_balance(wide)
