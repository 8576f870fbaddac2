"""Whole clusters in virtual time: what must hold when the network misbehaves, and when it has stopped."""

import itertools
from collections import Counter

import pytest

from tests.seeds import seeds
from tests.transfer.gossip.cluster import KEY, Cluster
from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import ROUTER, WORKER, Ack, News, Opener
from transfer.gossip.membership import Down, Up
from transfer.gossip.spread import homes


def started(seed: int, routers: int = 3, workers: int = 8, settle: float = 8.0) -> Cluster:
    cluster = Cluster(seed)
    names = [f"r{number}" for number in range(routers)] + [f"w{number}" for number in range(workers)]
    for name in names:
        cluster.start(name, seeds=("r0", "r1"))
    cluster.run(settle)
    assert cluster.views() == {frozenset(names)}
    assert not cluster.differences()
    return cluster


def change(cluster: Cluster, most: int = 5) -> None:
    """Some keys come and go, at some workers."""
    for node in cluster.workers.values():
        for _ in range(cluster.draw.randrange(most)):
            key = cluster.draw.randrange(1, 90)  # more than are published at once
            if cluster.draw.random() < 0.6:
                node.summary.add(key, cluster.draw.randrange(3))
            else:
                node.summary.remove(key)


def until_equal(cluster: Cluster, most: float) -> float:
    start = cluster.now
    while cluster.differences():
        assert cluster.now - start < most, cluster.differences()
        cluster.run(0.1)
    return cluster.now - start


@pytest.mark.parametrize("seed", seeds(3, 8))
def test_after_any_disorder_every_router_has_what_every_worker_has(seed: int) -> None:
    cluster = started(seed)
    draw, network = cluster.draw, cluster.network
    incarnations: dict[tuple[str, str], int] = {}
    for _ in range(60):
        change(cluster)
        match draw.randrange(9):
            case 0:
                network.loss, network.doubled = draw.choice([(0.0, 0.0), (0.3, 0.1), (0.1, 0.5)])
            case 1:
                network.latency_s = draw.choice([(0.0003, 0.002), (0.001, 0.5)])  # so that frames overtake one another
            case 2:
                side = {name for name in [*cluster.ports] if draw.random() < 0.5}
                network.divided = lambda a, b, side=side: (a in side) != (b in side)
            case 3:
                network.divided = lambda a, b: False
            case 4 if len(cluster.nodes) > 6:
                cluster.kill(draw.choice([name for name in cluster.nodes if name != "r0"]))
            case 5 if len(cluster.nodes) > 6:
                cluster.leave(draw.choice([name for name in cluster.nodes if name != "r0"]))
            case 6 | 7:
                name = draw.choice([*cluster.ports])
                cluster.start(name, seeds=("r0", "r1"))  # again, where it is running: its life ends without a word
            case 8:
                draw.choice([*cluster.nodes.values()]).paused_until = cluster.now + draw.random() * 2
        cluster.run(draw.random() * 2)
        for router, worker in itertools.product(cluster.routers, cluster.ports):
            incarnation = cluster.routers[router].replicas.state(worker)[0]
            life = router + str(cluster.routers[router].gossip.me.incarnation), worker
            assert incarnation >= incarnations.get(life, 0) or incarnation == 0
            incarnations[life] = max(incarnation, incarnations.get(life, 0))
    network.loss, network.doubled, network.latency_s = 0.0, 0.0, (0.0003, 0.002)
    network.divided = lambda a, b: False
    cluster.run(60.0)  # who died must be found dead
    assert cluster.views() == {frozenset(cluster.nodes)}
    assert not cluster.differences()


@pytest.mark.parametrize("seed", seeds(1, 3))
@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_a_partition_of_half_a_minute_heals_in_five_seconds(seed: int, loss: float) -> None:
    cluster = started(seed, routers=4, workers=20)
    side = {name for name in cluster.nodes if cluster.draw.random() < 0.5}
    cluster.network.divided = lambda a, b: (a in side) != (b in side)
    cluster.network.loss = loss
    for _ in range(30):
        change(cluster)
        cluster.run(1.0)
    assert cluster.differences()
    assert len(cluster.views()) > 1
    cluster.network.divided = lambda a, b: False
    until_equal(cluster, most=5.0)


def test_a_router_that_starts_late_has_everything_soon() -> None:
    cluster = started(1, workers=20)
    for _ in range(10):
        change(cluster, most=20)
        cluster.run(0.5)
    cluster.start("r9")
    assert until_equal(cluster, most=3.0) > 0


def test_a_dead_worker_is_silent_for_all_routers_within_a_second() -> None:
    cluster = started(2, routers=4, workers=12)
    for name in list(cluster.workers):
        cluster.run(cluster.draw.random())
        cluster.kill(name)
        died = cluster.now
        cluster.run(1.0)
        for router in cluster.routers.values():
            heard = router.replicas.heard(name)
            assert heard is None or cluster.now - heard > cluster.config.silent_s, (name, heard - died)
        others = cluster.workers
        assert all(
            cluster.now - router.replicas.heard(other) < cluster.config.silent_s
            for router in cluster.routers.values()
            for other in others
        )
    cluster.run(60)
    assert cluster.views() == {frozenset(cluster.routers)}


@pytest.mark.parametrize("lost", ["r0", "r1", "r2", "r3"])
def test_a_router_that_dies_takes_no_worker_from_the_others(lost: str) -> None:
    cluster = started(3, routers=4, workers=16)
    cluster.kill(lost)
    for _ in range(400):
        cluster.run(0.05)
        for router in cluster.routers.values():
            for worker in cluster.workers:
                assert cluster.now - router.replicas.heard(worker) < cluster.config.silent_s


def test_pauses_and_loss_are_no_deaths() -> None:
    cluster = started(4, routers=3, workers=27)
    cluster.network.loss = 0.05
    for _ in range(60):
        for node in cluster.draw.sample(list(cluster.nodes.values()), 2):
            node.paused_until = cluster.now + 1.0
        change(cluster)
        cluster.run(1.0)
    assert not cluster.told(Down)
    cluster.network.loss = 0.0
    cluster.run(5.0)
    assert not cluster.differences()


@pytest.mark.parametrize("seed", range(2))
def test_who_is_suspected_hears_of_it_and_stays(seed: int) -> None:
    """A worker that hears everybody but is heard by three of eight only, for longer than a suspicion lasts."""
    cluster = started(seed, routers=3, workers=6)
    cluster.network.divided = lambda a, b: a == "w0" and b not in ("r2", "w1", "w2")
    cluster.run(20.0)
    cluster.network.divided = lambda a, b: False
    cluster.run(10.0)
    assert cluster.views() == {frozenset(cluster.nodes)}
    assert not cluster.told(Down)


def test_a_restarted_worker_is_empty_and_its_old_frames_are_refused() -> None:
    cluster = started(6)
    for key in range(1, 40):
        cluster.workers["w1"].summary.add(key)
    cluster.run(2.0)
    old = cluster.workers["w1"]
    before = [old.gossip.tick(cluster.now + step) for step in (0.3, 0.6)]
    cluster.start("w1")
    cluster.run(3.0)
    for sends in before:
        cluster.send("w1", sends, old)
    cluster.run(1.0)
    for router in cluster.routers.values():
        assert router.replicas.state("w1")[0] == cluster.workers["w1"].gossip.me.incarnation
        assert len(router.replicas.table.items(router.replicas.row("w1"))[0]) == 0
    assert sum(router.gossip.refused["old"] for router in cluster.routers.values()) >= 2
    ups = [(name, about) for _, name, about in cluster.told(Up) if about == "w1"]
    assert sorted(ups) == sorted([(name, "w1") for name in cluster.nodes if name != "w1"] * 2)


def test_a_worker_whose_clock_went_back_is_ignored_until_its_old_life_is_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster(1, GossipConfig(forget_s=20.0))
    cluster.lives = 100
    for name in ("r0", "r1", "w0", "w1"):
        cluster.start(name)
    cluster.run(5.0)
    cluster.kill("w0")
    cluster.lives = 50
    cluster.start("w0")
    cluster.run(5.0)
    assert all(router.replicas.state("w0")[0] != 51 for router in cluster.routers.values())
    assert len([record for record in caplog.records if "later start of w0" in record.message]) == 1
    cluster.run(60.0)
    assert cluster.views() == {frozenset(cluster.nodes)}
    assert not cluster.differences()
    assert all(cluster.now - router.replicas.heard("w0") < 0.8 for router in cluster.routers.values())


def test_frames_that_come_again_later_change_nothing() -> None:
    cluster = started(7)
    recorded: list[tuple[str, list[object]]] = []
    send = cluster.send

    def record(source: str, sends: list, node: object) -> None:
        recorded.append((source, sends))
        send(source, sends, node)

    cluster.send = record
    for _ in range(5):
        change(cluster)
        cluster.run(1.0)
    cluster.send = send
    cluster.leave("w2")
    cluster.run(5.0)
    refused = sum(node.gossip.refused["replay"] for node in cluster.nodes.values())
    for source, sends in recorded:
        send(source, sends, cluster.nodes.get(source, cluster.nodes["r0"]))
    cluster.run(5.0)
    assert sum(node.gossip.refused["replay"] for node in cluster.nodes.values()) - refused > 500
    assert cluster.views() == {frozenset(cluster.nodes)}
    assert not cluster.differences()


def test_all_routers_restarted_at_once_have_everything_again() -> None:
    cluster = started(8)
    change(cluster, most=30)
    cluster.run(1.0)
    for name in list(cluster.routers):
        cluster.start(name, seeds=("r0", "r1", "w0"))
    until_equal(cluster, most=5.0)


def test_updates_larger_than_a_datagram_arrive() -> None:
    cluster = Cluster(9, keys=6250)
    for name in ("r0", "r1", "r2", "w0"):
        cluster.start(name)
    cluster.run(3.0)
    for key in range(1, 6001):
        cluster.workers["w0"].summary.add(key)
    cluster.run(1.0)
    assert not cluster.differences()
    assert all(len(router.replicas.table.items(0)[0]) == 6000 for router in cluster.routers.values())


def test_roles_of_members_are_known() -> None:
    cluster = started(10)
    for name, node in cluster.nodes.items():
        roles = {member.name: member.role for member in node.gossip.membership.members}
        assert roles == {other: ROUTER if other[0] == "r" else WORKER for other in cluster.nodes if other != name}


def test_an_entry_is_passed_on_once() -> None:
    cluster = started(13, routers=4, workers=12)
    cluster.network.latency_s = 0.02, 0.03
    cluster.run(1.0)
    passed: Counter[tuple[str, int, object]] = Counter()
    send = cluster.send

    def count(source: str, sends: list, node: object) -> None:
        for item in sends:
            frame = Opener(KEY).open(item.data)
            for message in frame.messages:
                if isinstance(message, News) and frame.sender != message.update.worker:
                    passed[message.update.worker, message.update.seq, item.address] += 1
        send(source, sends, node)

    cluster.send = count
    cluster.run(10.0)
    assert len(passed) > 10 * 3 * 12 * 3
    assert max(passed.values()) == 1


def test_a_router_that_hears_neither_worker_nor_its_homes_has_it_from_others() -> None:
    cluster = started(14, routers=5)
    routers = [(node.gossip.me, False) for node in cluster.routers.values()]
    cut = {"w0", *(home.name for home in homes("w0", routers))}
    lonely = next(name for name in cluster.routers if name not in cut)
    cluster.network.divided = lambda a, b: (a in cut and b == lonely) or (b in cut and a == lonely)
    heard = cluster.routers[lonely].replicas.heard("w0")
    wanted = cluster.workers["w0"].summary
    for _ in range(20):
        change(cluster)
        cluster.run(1.0)
        assert wanted.seq - cluster.routers[lonely].replicas.state("w0")[1] < 6 / 0.25
    cluster.run(6.0)
    mine = cluster.routers[lonely].replicas.state("w0")
    assert (mine[0], mine[2]) == (wanted.incarnation, wanted.digest)
    assert cluster.routers[lonely].replicas.heard("w0") == heard  # others' memory is no sign of life


def test_a_router_that_starts_late_takes_no_dead_worker_for_alive() -> None:
    cluster = started(3, routers=2, workers=10)
    cluster.kill("w3")
    cluster.run(2.0)
    cluster.start("r9")
    for _ in range(60):
        cluster.run(0.1)
        assert cluster.routers["r9"].replicas.heard("w3") is None
    for name in cluster.workers:
        assert cluster.now - cluster.routers["r9"].replicas.heard(name) < cluster.config.silent_s


@pytest.mark.parametrize(("seed", "loss"), [(0, 0.05), (1, 0.05), (2, 0.0), (3, 0.0)])
def test_a_worker_that_dies_with_its_first_home_is_silent_within_a_second(seed: int, loss: float) -> None:
    cluster = started(seed, routers=5, workers=12)
    cluster.network.loss = loss
    routers = [(node.gossip.me, False) for node in cluster.routers.values()]
    for name in list(cluster.workers)[:6]:
        first = homes(name, routers)[0].name
        cluster.kill(first)
        cluster.run(cluster.draw.random())
        cluster.kill(name)
        cluster.run(1.0)
        for router in cluster.routers.values():
            heard = router.replicas.heard(name)
            assert heard is None or cluster.now - heard > cluster.config.silent_s
        cluster.start(first)
        cluster.run(3.0)


@pytest.mark.parametrize("seed", range(2))
def test_pauses_of_a_second_are_no_deaths_in_a_small_cluster(seed: int) -> None:
    cluster = started(seed, routers=2, workers=3)
    for _ in range(90):
        cluster.draw.choice([*cluster.nodes.values()]).paused_until = cluster.now + 1.0
        cluster.run(cluster.draw.uniform(0.5, 1.5))
    assert not cluster.told(Down)


def test_an_answer_to_another_node_is_none_to_this_one() -> None:
    """Somebody who can read and send, but has no key, plays what others have said to a router that waits."""
    cluster = started(5, routers=2, workers=3)
    answers: dict[int, list[tuple[str, bytes]]] = {}
    send = cluster.send

    def record(source: str, sends: list, node: object) -> None:
        for item in sends:
            if "r0" not in (source, cluster.names[item.address]):
                for message in Opener(KEY).open(item.data).messages:
                    if isinstance(message, Ack):
                        answers.setdefault(message.number, []).append((source, item.data))
        send(source, sends, node)

    cluster.send = record
    cluster.run(20.0)
    assert len(answers) > 20
    cluster.kill("w0")
    r0 = cluster.nodes["r0"].gossip
    for _ in range(200):
        cluster.run(0.05)
        probe = r0.membership._probe
        assert probe is None or probe.number not in answers
    assert r0.membership.find("w0") is None
