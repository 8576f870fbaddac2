"""What a large cluster costs and how quick it is. A thousand nodes take minutes, so the suite runs a smaller one."""

from collections.abc import Collection, Iterator
from enum import Enum

import numpy as np
import pytest

from tests.transfer.gossip.cluster import Cluster, Node
from transfer.gossip.config import GossipConfig
from transfer.gossip.membership import Down
from transfer.gossip.summary import Load

BYTES_S = 25_000
"""What a node may send, UDP and IP headers included."""
ROUTER_BYTES_S = 400
"""What a router may send for each worker: it passes on its share of them to all other routers."""
SPREAD_S = 2.0
ROUTERS = 8


QUIET = GossipConfig(update_interval_s=1.0, silent_s=3.0)
"""Where only membership is looked at, workers need not say much."""


def large(
    nodes: int, seed: int, routers: int = ROUTERS, config: GossipConfig | None = None, tick_s: float = 0.05
) -> Cluster:
    """A cluster that has just come up."""
    cluster = Cluster(seed, config, keys=64, ring=100, tick_s=tick_s)
    names = [f"r{number}" for number in range(routers)] + [f"worker-{number:04}" for number in range(nodes - routers)]
    for name in names:
        # A busy worker's figures, so that frames are as long as they will be.
        cluster.start(name, seeds=("r0", "r1")).load = Load(
            123_456, 200, 8123.4, 5000, (("r1", 70_000), ("r5", 65_536))
        )
    cluster.run(20.0)
    assert len(cluster.views()) == 1
    assert not cluster.differences()
    return cluster


def delays(cluster: Cluster, seconds: int, each_s: int) -> list[float]:
    """Change keys of workers at random times; how long each change took to reach each router."""
    workers, found = list(cluster.workers.values()), []
    waiting: list[tuple[float, Node, int, dict[str, Node]]] = []
    for step in range(seconds * 50):
        while len(waiting) < each_s * step // 50 - len(found) // len(cluster.routers) and step < (seconds - 5) * 50:
            worker = cluster.draw.choice(workers)
            worker.summary.add(cluster.draw.getrandbits(63) + 1)
            waiting.append((cluster.now, worker, worker.summary.seq + 1, dict(cluster.routers)))
        cluster.run(0.02)
        for at, worker, seq, lacking in waiting:
            for name, router in list(lacking.items()):
                if router.replicas.state(worker.gossip.me.name)[1] >= seq:
                    del lacking[name]
                    found.append(cluster.now - at)
        waiting = [item for item in waiting if item[3]]
    assert not waiting
    return sorted(found)


def check_spread(cluster: Cluster, seconds: int, each_s: int) -> None:
    before = {name: node.sent_bytes for name, node in cluster.nodes.items()}
    start = cluster.now
    found = delays(cluster, seconds, each_s)
    p99 = found[int(0.99 * len(found))]
    spent = {name: (node.sent_bytes - before[name]) / (cluster.now - start) for name, node in cluster.nodes.items()}
    mean = sum(spent.values()) / len(spent)
    most = max(spent[name] for name in cluster.workers)
    router = max(spent[name] for name in cluster.routers)
    figures = f"p50 {found[len(found) // 2]:.2f} s, p99 {p99:.2f} s, most {found[-1]:.2f} s; bytes/s: mean {mean:.0f}, "
    print(figures + f"busiest worker {most:.0f}, busiest router {router:.0f}")  # noqa: T201
    assert p99 <= SPREAD_S
    assert mean <= BYTES_S
    assert most <= BYTES_S
    assert router <= ROUTER_BYTES_S * len(cluster.workers)


def check_deaths(cluster: Cluster, count: int) -> None:
    """Kill workers; a second later no router would use them."""
    for name in cluster.draw.sample(list(cluster.workers), count):
        cluster.run(cluster.draw.random())
        cluster.kill(name)
        cluster.run(1.0)
        for router in cluster.routers.values():
            heard = router.replicas.heard(name)
            assert heard is None or cluster.now - heard > cluster.config.silent_s


def check_no_false_deaths(cluster: Cluster, seconds: int, pauses_s: int) -> None:
    """5 % loss, and every second some nodes stand still for a second."""
    cluster.network.loss = 0.05
    for _ in range(seconds):
        for node in cluster.draw.sample(list(cluster.nodes.values()), pauses_s):
            node.paused_until = cluster.now + 1.0
        cluster.run(1.0)
    assert not cluster.told(Down)


def containers(part: object, path: str) -> Iterator[tuple[str, int]]:
    """The sizes of all that gossip keeps below an object, by where it is."""
    if isinstance(part, Collection) and not isinstance(part, str | bytes | np.ndarray):
        yield path, len(part)
        for item in [*part, *part.values()] if isinstance(part, dict) else part:
            yield from containers(item, f"{path}[]")
    elif type(part).__module__.startswith("transfer.gossip") and not isinstance(part, Enum):
        for name in getattr(part, "__dict__", None) or getattr(part, "__slots__", ()):
            if name != "_chunks":  # of the table, whose rows are counted
                yield from containers(getattr(part, name), f"{path}.{name}")


def check_memory(seconds: int, workers: int, most: int) -> None:
    """Workers come, change and go, each with a name of its own; what is left of them does not pile up: no container of
    any node holds more than `most`."""
    cluster = Cluster(3, GossipConfig(forget_s=20.0), keys=64, ring=50)
    for name in ("r0", "r1", "r2"):
        cluster.start(name)
    for second in range(seconds):
        cluster.start(f"w{second}")
        names = list(cluster.workers)
        for name in names:
            for _ in range(3):
                cluster.workers[name].summary.add(cluster.draw.randrange(1, 100))
                cluster.workers[name].summary.remove(cluster.draw.randrange(1, 100))
        if len(names) > workers:
            (cluster.kill if second % 2 else cluster.leave)(names[0])
        cluster.run(1.0)
        for node in cluster.nodes.values():
            node.events.clear()
        if second % 10 == 0:
            sizes: dict[str, int] = {}
            for node in cluster.nodes.values():
                for path, size in containers(node.gossip, ""):
                    sizes[path] = max(size, sizes.get(path, 0))
            assert sizes[".membership._entries"] >= min(second, workers)
            assert {path: size for path, size in sizes.items() if size > most} == {}
    assert max(len(router.replicas.workers) for router in cluster.routers.values()) < 3 * workers + 30


def test_sixty_nodes_hear_of_changes_soon_and_cheaply() -> None:
    cluster = large(60, seed=1, routers=5)
    check_spread(cluster, seconds=12, each_s=10)
    check_deaths(cluster, 3)


def test_sixty_nodes_take_nobody_for_dead() -> None:
    check_no_false_deaths(large(60, seed=2, routers=3, config=QUIET, tick_s=0.1), seconds=30, pauses_s=3)


def test_churn_leaves_nothing_behind() -> None:
    """64 is what is published of a worker, or buckets; 7 nodes are up, and 20 are remembered."""
    check_memory(seconds=120, workers=4, most=64)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_a_thousand_nodes_hear_of_changes_soon_and_cheaply(loss: float) -> None:
    cluster = large(1000, seed=1)
    cluster.network.loss = loss
    check_spread(cluster, seconds=30, each_s=100)
    if not loss:
        check_deaths(cluster, 10)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_nodes_take_nobody_for_dead_in_ten_minutes() -> None:
    check_no_false_deaths(large(1000, seed=2, routers=3, config=QUIET, tick_s=0.1), seconds=600, pauses_s=10)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_hour_of_churn_leaves_nothing_behind() -> None:
    check_memory(seconds=3600, workers=12, most=80)
