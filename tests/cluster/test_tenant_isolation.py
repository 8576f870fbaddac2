"""Two tenants with keys of their own: what one of them does, the other can neither feel nor find out."""

import asyncio
import math
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

import pytest
import yaml

from router.tenants import hashed
from tests.cluster.checks import assert_balance
from tests.cluster.conftest import Launch
from tests.cluster.raw_load import Reply, ask, closed_loop, wanted
from tests.cluster.test_failures import VOCABULARY

LOUD, QUIET = "a" * 32, "b" * 32
AT_ONCE = 20
"""Requests that the loud tenant keeps under way; the quiet one has one at a time."""
PROMPT, OUTPUT = 256, 8
STEP_TOKENS = 64
"""Of the prompt, a quarter: the step under way is what nobody can go before."""
SAMPLES, ROUNDS, PAUSES_S = 20, 2, (1.0, 2.5)
"""The quiet tenant asks for less than its half of the prefill worker's time; of more it would get no more than that."""
MAX_SLOWDOWN = 1.5
PROBES, PROBE_TOKENS = 400, 700
draw = random.Random(3)


def fresh(length: int) -> list[int]:
    """A prompt that nobody has seen."""
    return draw.choices(range(VOCABULARY), k=length)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    tenants = {"loud": {"keys": [hashed(LOUD)]}, "quiet": {"keys": [hashed(QUIET)]}}
    file.write_text(yaml.safe_dump({"tenants": tenants}))
    return file


@pytest.fixture(scope="module")
def port(launch: Launch, tiny: Path, keys: Path) -> Iterator[int]:
    cluster = launch(tiny, gateway__keys_file=keys, worker__kv_memory="64MiB")
    yield int(cluster.url.rsplit(":", 1)[1])
    assert_balance(cluster)


def p90(replies: list[Reply]) -> float:
    return sorted(one.first_s for one in replies)[int(0.9 * (len(replies) - 1))]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_tenant_hardly_waits_for_one_that_asks_twenty_times_as_much(launch: Launch, smollm: Path, keys: Path) -> None:
    """In turns, so that a machine that becomes slower favours neither side. Each worker has a core, alone or not: what
    is measured is who waits for whom."""
    flags = {"worker__threads": 1, "worker__step_tokens": STEP_TOKENS, "worker__max_model_len": 1024}
    cluster = launch(smollm, gateway__keys_file=keys, **flags)
    port = int(cluster.url.rsplit(":", 1)[1])

    def body() -> bytes:
        return wanted(fresh(PROMPT), OUTPUT, cluster.model_name)

    async def quiet() -> list[Reply]:
        replies = []
        for _ in range(SAMPLES):
            await asyncio.sleep(draw.uniform(*PAUSES_S))
            replies.append(await ask(port, body(), QUIET))
        return replies

    async def run() -> tuple[list[Reply], list[Reply]]:
        alone, beside = [], []
        await quiet()
        for _ in range(ROUNDS):
            alone += await quiet()
            loud = asyncio.create_task(closed_loop(port, body, AT_ONCE, 600, LOUD))
            await asyncio.sleep(5)
            beside += await quiet()
            assert not loud.done()
            loud.cancel()
            await asyncio.gather(loud, return_exceptions=True)
            await asyncio.sleep(3)
        return alone, beside

    alone, beside = asyncio.run(run())
    slowdown = p90(beside) / p90(alone)
    print(  # noqa: T201
        f"\n{len(alone)} alone, {len(beside)} beside {AT_ONCE} at once: p90 of the first token {p90(alone):.2f} "
        f"and {p90(beside):.2f} s, {slowdown:.2f} times"
    )
    assert {one.status for one in beside} == {200}
    assert slowdown <= MAX_SLOWDOWN
    assert_balance(cluster)
    cluster.stop()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nobody_can_tell_what_another_tenant_has_cached(port: int) -> None:
    """Neither by time nor by what is said. Before each probe the other tenant asks something: the same prompt, or
    another one of the same length. What it asks again itself is there, and sooner: such a difference would be seen."""
    sides = [True, False] * (PROBES // 2)
    draw.shuffle(sides)
    replies: dict[str, list[Reply]] = {"known": [], "new": [], "own": []}

    async def run() -> None:
        for known in sides:
            prompt, other = fresh(PROBE_TOKENS), fresh(PROBE_TOKENS)
            await ask(port, wanted(prompt if known else other, 2), LOUD)
            replies["known" if known else "new"].append(await ask(port, wanted(prompt, 2), QUIET))
            replies["own"].append(await ask(port, wanted(prompt if known else other, 2), LOUD))

    asyncio.run(run())
    times = {name: [one.first_s * 1000 for one in some] for name, some in replies.items()}
    means = {name: mean(some) for name, some in times.items()}
    difference = means["known"] - means["new"]
    error = math.hypot(*(stdev(times[name]) / math.sqrt(len(times[name])) for name in ("known", "new")))
    print(  # noqa: T201
        f"\n{len(sides)} probes: first token after {means['known']:.2f} ms where the other tenant has it and "
        f"{means['new']:.2f} ms if not, {difference / error:+.2f} standard errors; its own after {means['own']:.2f} ms"
    )
    # Its own prompts may begin with the same tokens by chance.
    assert max(one.cached_tokens for one in (*replies["known"], *replies["new"])) < 4
    assert min(one.cached_tokens for one in replies["own"]) > PROBE_TOKENS - 32
    assert abs(difference) <= 3 * error
    assert means["new"] - means["own"] > 10 * error
