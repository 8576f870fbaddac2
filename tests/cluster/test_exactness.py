"""Token ids through the whole cluster equal those of `transformers` generate, however the request travelled."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from cluster.launch import Cluster
from tests.cluster.checks import assert_balance
from tests.cluster.conftest import Launch
from tests.cluster.prompts import FEW_TOKENS, MANY_TOKENS, Case, all_prompts, cases, some_prompts
from tests.workers.drive import answers as engine_answers
from tests.workers.drive import engine, request

MODEL = "smollm2-135m-instruct"
TOPOLOGIES = {
    "1P1D": {"prefill__replicas": 1, "decode__replicas": 1},
    "2P2D": {"prefill__replicas": 2, "decode__replicas": 2},
    "both": {"prefill__replicas": 0, "decode__replicas": 0, "both__replicas": 1},
}


@pytest.fixture(scope="session")
def some(smollm: Path) -> list[Case]:
    return cases(smollm, some_prompts(smollm), FEW_TOKENS)


@pytest.fixture(scope="session")
def reference(smollm: Path) -> list[Case]:
    return cases(smollm, all_prompts(smollm), MANY_TOKENS)


async def ask(client: AsyncOpenAI, prompt: Sequence[int], tokens: int, stream: bool, **more: object) -> list[int]:
    """The ids that the cluster answers with."""
    extra = {"ignore_eos": True, "return_token_ids": True, "top_k": more.pop("top_k", 0)}
    wanted = {"model": MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, **more}
    if not stream:
        answer = await client.completions.create(**wanted, extra_body=extra)  # type: ignore[call-overload]
        return list(answer.choices[0].model_extra["token_ids"])
    ids: list[int] = []
    async for chunk in await client.completions.create(**wanted, stream=True, extra_body=extra):  # type: ignore[call-overload]
        for choice in chunk.choices:
            ids += choice.model_extra["token_ids"]
    return ids


def check(cluster: Cluster, some: Sequence[Case], at_once: int, stream: bool, **parameters: object) -> None:
    """Every case is answered as it should be, `at_once` requests under way at a time."""

    async def run() -> list[list[int]]:
        gate = asyncio.Semaphore(at_once)
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=600, max_retries=0) as client:

            async def one(case: Case) -> list[int]:
                async with gate:
                    return await ask(client, case.prompt, len(case.answer), stream, **parameters)

            return await asyncio.gather(*map(one, some))

    found = asyncio.run(run())
    wrong = [len(case.prompt) for case, ids in zip(some, found, strict=True) if tuple(ids) != case.answer]
    assert not wrong, f"prompts of {wrong} tokens are answered differently"


SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 200, "seed": 7}
SAMPLED_TOKENS = 16


@pytest.fixture(scope="session")
def sampled(smollm: Path) -> list[Case]:
    """Prompts with what one engine alone draws for them."""
    prompts = [[100 + 7 * number + step for step in range(10 + 9 * number)] for number in range(6)]
    alone = engine(smollm, kv_memory=256 << 20, max_model_len=1024)
    found = engine_answers(alone, [request(prompt, max_tokens=SAMPLED_TOKENS, **SAMPLING) for prompt in prompts])
    assert len({tuple(ids) for ids in found}) == len(found)
    return [Case(tuple(prompt), tuple(ids)) for prompt, ids in zip(prompts, found, strict=True)]


def check_cold_warm_alone_together_and_sampled(cluster: Cluster, some: list[Case], sampled: list[Case]) -> None:
    check(cluster, some, at_once=8, stream=True)  # some start while others are answered
    check(cluster, some, at_once=len(some), stream=False)
    check(cluster, some[4:5], at_once=1, stream=True)
    for at_once, stream in ((6, True), (2, False)):  # what a seed draws depends on the request alone
        check(cluster, sampled, at_once, stream, **SAMPLING)
    assert_balance(cluster)


def test_cold_warm_alone_together_and_sampled(pair: Cluster, some: list[Case], sampled: list[Case]) -> None:
    """The pair is as good as new: of these prompts, others ask it at most for what all chats begin with."""
    check_cold_warm_alone_together_and_sampled(pair, some, sampled)


@pytest.mark.long
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_cold_warm_alone_together_and_sampled_everywhere(
    launch: Launch, smollm: Path, reference: list[Case], sampled: list[Case], topology: str
) -> None:
    cluster = launch(smollm, **TOPOLOGIES[topology])
    check_cold_warm_alone_together_and_sampled(cluster, reference, sampled)
    cluster.stop()


PAIRS = ((64, True, 1), (64, False, 8), (256, True, 8), (256, False, 1))
"""Chunk, cache, requests at once: every pair of values of two of them occurs. All combinations would take hours."""
SETTINGS = [
    (topology, *pair, (first + number) % 2 == 0)
    for first, topology in enumerate(TOPOLOGIES)
    for number, pair in enumerate(PAIRS)
]
"""The same with topology and streaming."""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("topology", "chunk", "cache", "at_once", "stream"), SETTINGS)
def test_every_pair_of_settings(
    launch: Launch,
    smollm: Path,
    reference: list[Case],
    topology: str,
    chunk: int,
    cache: bool,
    at_once: int,
    stream: bool,
) -> None:
    """All prompts in a new cluster, which is cold, and with a cache once more, warm."""
    cluster = launch(smollm, worker__step_tokens=chunk, worker__prefix_cache=cache, **TOPOLOGIES[topology])
    check(cluster, reference, at_once, stream)
    if cache:
        check(cluster, reference, at_once, not stream)
    assert_balance(cluster)
    cluster.stop()
