"""A cluster whose workers keep blocks below their devices, also from one life of the cluster to the next."""

import random
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from cluster.launch import Cluster
from tests.cluster.conftest import Launch

PROMPTS = 8
BELOW = {
    "worker__kv_memory": "800KiB",
    "worker__max_model_len": 1024,
    "tiers__host": "1500KiB",
    "tiers__disk": "64MiB",
    "tiers__guard": False,
}
"""The device has 66 blocks, host memory 125; the prompts take 248. The tiny model computes as fast as a disk may be."""
Answer = tuple[str, dict[str, int]]


def ask(cluster: Cluster, prompt: list[int]) -> Answer:
    """The text of an answer, and where the prompt's tokens came from."""
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0)
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    details = answer.usage.prompt_tokens_details.model_dump()
    tiers: dict[str, int] = details["cached_tokens_by_tier"]
    assert sum(tiers.values()) == details["cached_tokens"]
    return answer.choices[0].text, tiers


def total(answers: list[Answer], tier: str) -> int:
    return sum(tiers[tier] for _, tiers in answers)


@pytest.mark.long
def test_what_was_computed_is_found_below_and_after_a_restart(launch: Launch, tiny: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 250) for _ in range(500)] for _ in range(PROMPTS)]

    def lives(look: Callable[[Cluster], None]) -> list[list[Answer]]:
        cluster = launch(tiny, tiers__disk_path=str(tmp_path), **BELOW)
        try:
            passes = [[ask(cluster, prompt) for prompt in prompts] for _ in range(2)]
            look(cluster)
            return passes
        finally:
            cluster.stop()

    def worked(cluster: Cluster) -> None:
        (prefill,) = (one for one in cluster.statuses() if one.role == "prefill")
        assert prefill.tiers
        # What the decode worker has written already is not written again.
        assert sum(one.tiers.disk_cached for one in cluster.statuses() if one.tiers) >= PROMPTS * 31
        assert prefill.tiers.stats.lost_blocks == 0
        assert 0 < prefill.tiers.disk_bytes <= 64 << 20
        assert prefill.speeds.host_bytes_s > 0

    cold, warm = lives(worked)
    assert total(cold, "device") + total(cold, "host") + total(cold, "disk") == 0
    assert [text for text, _ in warm] == [text for text, _ in cold]
    assert total(warm, "host") + total(warm, "disk") > PROMPTS * 300
    again, _ = lives(lambda cluster: None)
    assert [text for text, _ in again] == [text for text, _ in cold]
    assert total(again, "disk") > PROMPTS * 400
