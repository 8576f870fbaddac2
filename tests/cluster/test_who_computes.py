"""Prompts computed where they are answered, and prefixes fetched from other workers: the same tokens, less work."""

import asyncio
import random
from pathlib import Path

import httpx
import pytest
import ray

from cluster.launch import Cluster
from tests.cluster.checks import assert_balance, post, statuses
from tests.cluster.conftest import Launch
from tests.cluster.test_failures import VOCABULARY, Judge
from transfer.messages import Request, SamplingParams, WorkerStatus, pack_tokens

MODEL = "tiny-llama"
BLOCK = 16
STEP = 512
OUTPUT = 20


@pytest.fixture(scope="module")
def handing(launch: Launch, tiny: Path) -> Cluster:
    return launch(tiny, worker__kv_memory="48MiB", prefill__replicas=2)


@pytest.fixture(scope="module")
def judge(tiny: Path) -> Judge:
    return Judge(tiny)


def words(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def ask(cluster: Cluster, judge: Judge, prompt: list[int], output: int = OUTPUT) -> tuple[list[int], int]:
    """The answer, which must be right, and how many prompt tokens were cached."""
    wanted = {"model": MODEL, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    answer = post(f"{cluster.url}/v1/completions", {**wanted, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    ids = body["choices"][0]["token_ids"]
    assert len(ids) == output
    assert judge.right(prompt, ids)
    return ids, body["usage"]["prompt_tokens_details"]["cached_tokens"]


def now(cluster: Cluster) -> dict[str, WorkerStatus]:
    return {one.name: one for one in statuses(cluster)}


def test_short_prompts_are_computed_where_they_are_answered(narrow: Cluster, judge: Judge) -> None:
    before = now(narrow)
    ask(narrow, judge, words(1, 100))
    after = now(narrow)
    assert after["prefill-0"].cache.new_tokens == before["prefill-0"].cache.new_tokens
    assert after["decode-0"].cache.new_tokens == before["decode-0"].cache.new_tokens + 100
    assert after["prefill-0"].transfer.sent_bytes == before["prefill-0"].transfer.sent_bytes


def test_long_prompts_are_handed_over_and_what_follows_them_is_not(narrow: Cluster, judge: Judge) -> None:
    before = now(narrow)
    prompt = words(2, 900)
    answer, cached = ask(narrow, judge, prompt)
    assert cached == 0
    middle = now(narrow)
    assert middle["prefill-0"].cache.new_tokens == before["prefill-0"].cache.new_tokens + 900
    sent = middle["prefill-0"].transfer.sent_bytes - before["prefill-0"].transfer.sent_bytes
    assert sent == -(-900 // BLOCK) * BLOCK * middle["prefill-0"].token_bytes
    # The next turn: all but what is new is on the decode worker.
    turn = [*prompt, *answer, *words(3, 40)]
    _, cached = ask(narrow, judge, turn)
    assert cached >= (900 + OUTPUT - 1) // BLOCK * BLOCK
    after = now(narrow)
    assert after["prefill-0"].transfer.sent_bytes == middle["prefill-0"].transfer.sent_bytes
    assert after["prefill-0"].cache.new_tokens == middle["prefill-0"].cache.new_tokens
    assert_balance(narrow)


def test_a_decode_worker_that_has_lost_the_prefix_refuses_and_the_answer_is_right(
    narrow: Cluster, judge: Judge
) -> None:
    """The router believes that it lacks 10 tokens; work that the router has not seen has filled its pool meanwhile."""
    prompt = words(4, 900)
    ask(narrow, judge, prompt)
    worker, pool = narrow.worker("decode-0"), now(narrow)["decode-0"].blocks["total"]
    sampling = SamplingParams(1, temperature=0.0)
    for seed in range(pool * BLOCK // 1800 + 2):
        other = Request(
            f"other-{seed}", pack_tokens(words(100 + seed, 1800)), sampling, narrow.config.gateways[0], 60.0
        )
        assert ray.get(worker.generate.remote(other, None), timeout=60).status == "done"
    before = now(narrow)
    _, cached = ask(narrow, judge, [*prompt, *words(999, 10)])
    after = now(narrow)
    assert after["decode-0"].transfer.accepted == before["decode-0"].transfer.accepted + 1
    assert cached >= 900 // BLOCK * BLOCK  # on the prefill worker
    assert_balance(narrow)


@pytest.mark.long
def test_the_second_turn_of_a_chat_sends_only_what_is_new(handing: Cluster, judge: Judge) -> None:
    before = now(handing)
    prompt = words(20, 900)
    answer, _ = ask(handing, judge, prompt)
    middle = now(handing)
    more = words(21, 40)
    _, cached = ask(handing, judge, [*prompt, *answer, *more])
    after = now(handing)

    def total(some: dict[str, WorkerStatus], name: str) -> int:
        return sum(getattr(one.transfer, name) for key, one in some.items() if key.startswith("prefill"))

    block = BLOCK * after["decode-0"].token_bytes
    assert total(middle, "sent_bytes") - total(before, "sent_bytes") == -(-900 // BLOCK) * block
    assert 0 < total(after, "sent_bytes") - total(middle, "sent_bytes") <= (-(-len(more) // BLOCK) + 1) * block
    assert cached >= 900 // BLOCK * BLOCK
    assert_balance(handing)


@pytest.mark.long
def test_a_prefill_worker_fetches_from_another(handing: Cluster, judge: Judge) -> None:
    """The first one is gone to another request, as it were: many at once for one prompt's home are spread."""
    before = now(handing)
    shared = words(30, 1600)
    ask(handing, judge, shared)
    home = next(name for name, one in now(handing).items() if one.cache.new_tokens > before[name].cache.new_tokens)
    other = "prefill-1" if home == "prefill-0" else "prefill-0"
    assert home.startswith("prefill")
    before = now(handing)

    async def many() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=120) as client:
            wanted = {"model": MODEL, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            bodies = [{**wanted, "prompt": [*shared, *words(40 + number, 300)]} for number in range(24)]
            return await asyncio.gather(*(client.post(f"{handing.url}/v1/completions", json=one) for one in bodies))

    answers = asyncio.run(many())
    assert {answer.status_code for answer in answers} == {200}
    after = now(handing)
    # Calls may overtake one another on their way. One that was to find what another fetches then begins to compute it,
    # and the fetch brings what that has not reached.
    assert 0 < after[other].transfer.fetched_blocks - before[other].transfer.fetched_blocks <= 100
    computed = after[other].cache.new_tokens - before[other].cache.new_tokens
    assert 0 < computed < 24 * 300 + 24 * BLOCK + STEP
    assert_balance(handing)
