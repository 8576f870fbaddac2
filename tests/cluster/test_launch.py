"""What is checked of workers before a cluster serves."""

from dataclasses import replace

import pytest

from cluster.launch import LaunchError, check_layouts, share_cores
from transfer.layout import KVLayout, LayerGeometry
from transfer.messages import Peer

LAYOUT = KVLayout("weights", "bfloat16", 16, (LayerGeometry(2, 16, 16),), num_blocks=10)


def peer(name: str, layout: KVLayout) -> Peer:
    return Peer(name, 1, f"{name}/1", b"", 0, 0, False, layout.to_tuple())


def test_workers_whose_blocks_mean_the_same_fit_whatever_their_pools_hold() -> None:
    check_layouts([peer("a", LAYOUT)])
    check_layouts([peer("a", LAYOUT), peer("b", replace(LAYOUT, num_blocks=99)), peer("c", LAYOUT)])


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
    with pytest.raises(LaunchError, match=f"workers a and c cannot exchange KV blocks: {says}"):
        check_layouts([peer("a", LAYOUT), peer("b", LAYOUT), peer("c", other)])


def test_workers_of_one_machine_share_its_cores() -> None:
    assert share_cores([("one", 8), ("two", 8), ("one", 8)]) == [4, 8, 4]
    assert share_cores([("one", 1), ("one", 1)]) == [1, 1]
