"""What is checked of workers before a cluster serves."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.connection import LaunchError
from cluster.launch import Cluster, check_layouts
from cluster.placement import share_cores
from tests.cluster.conftest import settings
from transfer.layout import KVLayout, LayerGeometry, Shard
from transfer.messages import Peer

LAYOUT = KVLayout("weights", "bfloat16", 16, (LayerGeometry(2, 16, 16),), num_blocks=10)


def peer(name: str, layout: KVLayout) -> Peer:
    return Peer(name, 1, f"{name}/1", b"", 0, 0, False, layout.to_tuple())


def test_workers_whose_blocks_mean_the_same_fit_whatever_their_pools_hold() -> None:
    larger = replace(LAYOUT, num_blocks=99)
    check_layouts([("prefill", peer("a", LAYOUT)), ("decode", peer("b", larger)), ("decode", peer("c", LAYOUT))])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "others"}, "model: weights here, others there"),
        ({"dtype": "float32"}, "dtype: bfloat16 here, float32 there"),
        ({"block_size": 32}, "block_size: 16 here, 32 there"),
        ({"layers": (LayerGeometry(4, 16, 16),)}, r"layers: .*kv_heads=2.* here, .*kv_heads=4.* there"),
    ],
)
def test_workers_that_cannot_exchange_blocks_are_a_start_error(change: dict[str, object], says: str) -> None:
    other = replace(LAYOUT, **change)  # type: ignore[arg-type]
    workers = [("prefill", peer("a", LAYOUT)), ("decode", peer("b", LAYOUT)), ("decode", peer("c", other))]
    with pytest.raises(LaunchError, match=f"workers a and c cannot exchange KV blocks: {says}"):
        check_layouts(workers)


def test_every_prefill_worker_must_fit_every_decode_worker() -> None:
    other = replace(LAYOUT, dtype="float32")
    workers = [("prefill", peer("a", LAYOUT)), ("prefill", peer("b", other)), ("decode", peer("c", LAYOUT))]
    with pytest.raises(LaunchError, match="workers b and c cannot exchange KV blocks: dtype: float32 here"):
        check_layouts(workers)


def test_workers_of_different_parallelism_fit_if_their_heads_are_cut_alike() -> None:
    def gang(name: str, size: int, of: int) -> Peer:
        shards = [Shard.of_rank(rank, size, of) for rank in range(size)]
        heads = [(LayerGeometry(4 // of * shard.count, 16, 16),) for shard in shards]
        first, *others = [
            peer(name, replace(LAYOUT, layers=some, shard=shard)) for some, shard in zip(heads, shards, strict=True)
        ]
        return replace(first, others=tuple(others))

    check_layouts([("prefill", gang("a", 1, 2)), ("decode", gang("b", 2, 2)), ("decode", gang("c", 4, 2))])
    workers = [("prefill", gang("a", 1, 2)), ("decode", gang("b", 4, 4))]
    with pytest.raises(LaunchError, match=r"a and b cannot exchange KV blocks: shard\.of: 2 slices .* here, 4 there"):
        check_layouts(workers)


def test_workers_with_both_roles_need_not_fit() -> None:
    """They hand nothing over."""
    other = replace(LAYOUT, dtype="float32")
    check_layouts([("both", peer("a", LAYOUT)), ("both", peer("b", other))])
    check_layouts([("prefill", peer("a", LAYOUT)), ("decode", peer("b", LAYOUT)), ("both", peer("c", other))])


def test_workers_of_one_machine_share_its_cores() -> None:
    assert share_cores([("one", 8), ("two", 8), ("one", 8)]) == [4, 8, 4]
    assert share_cores([("one", 1), ("one", 1)]) == [1, 1]


def test_what_a_worker_cannot_do_is_one_line_that_names_the_setting(local_ray: None, tiny: Path) -> None:
    config = settings(prefill__replicas=0, decode__replicas=0, both__replicas=1, transfer__interface="nowhere0")
    with pytest.raises(LaunchError, match=r"^transfer\.interface: 'nowhere0' is neither [^\n]* it has lo [^\n]*$"):
        Cluster(config, tiny, "test-mistake").start()
