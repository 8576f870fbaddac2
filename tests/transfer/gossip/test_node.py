"""Nodes on real sockets of this machine, several in one process."""

import asyncio
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from pydantic import SecretStr

import transfer.gossip.node
from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import MAX_FRAME, ROUTER, WORKER, Address, Notice
from transfer.gossip.membership import Down, Up
from transfer.gossip.node import Event, GossipNode
from transfer.gossip.protocol import Send
from transfer.gossip.replicas import Replicas
from transfer.gossip.summary import Load, Summary

KEY = b"one key for this cluster"
# Quick, so that tests are; a probe that waits 0.2 s is still long for this machine.
CONFIG = GossipConfig(
    probe_interval_s=0.4, probe_timeout_s=0.2, suspicion=2, update_interval_s=0.1, keys_per_worker=2000
)


@dataclass
class Life:
    node: GossipNode
    replicas: Replicas
    summary: Summary
    events: list[Event] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return {member.name for member in self.node.gossip.membership.members}


def config(key: bytes) -> GossipConfig:
    return CONFIG.model_copy(update={"key": SecretStr(key.decode()), "host": "127.0.0.1"})


class House:
    """Starts nodes, and stops those that a test leaves running."""

    def __init__(self) -> None:
        self.lives: list[Life] = []

    async def start(
        self, name: str, seeds: list[Address], incarnation: int = 1, key: bytes = KEY, port: int = 0
    ) -> Life:
        role = ROUTER if name.startswith("r") else WORKER
        replicas, summary = Replicas(CONFIG.keys_per_worker), Summary(name, incarnation, CONFIG.keys_per_worker)
        events: list[Event] = []
        node = await GossipNode.start(
            name,
            role,
            incarnation=incarnation,
            config=config(key),
            seeds=seeds,
            port=port,
            replicas=replicas if role == ROUTER else None,
            summary=summary if role == WORKER else None,
            load=(lambda: Load(queued_tokens=7)) if role == WORKER else None,
            on_event=events.append,
        )
        self.lives.append(Life(node, replicas, summary, events))
        return self.lives[-1]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    yield house
    for life in house.lives:
        await life.node.stop(leave=False)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> float:
    """Wait for something to become true; how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "waited in vain"
        await asyncio.sleep(0.01)
    return time.monotonic() - start


def same(router: Life, worker: Life) -> bool:
    incarnation, seq, digest = router.replicas.state(worker.node.member.name)
    return seq > 0 and (incarnation, digest) == (worker.summary.incarnation, worker.summary.digest)


async def test_summaries_reach_all_routers_through_seeds(house: House) -> None:
    r0 = await house.start("r0", [])
    seeds = [r0.node.member.address]
    r1, r2 = await house.start("r1", seeds), await house.start("r2", seeds)
    workers = [await house.start(f"w{number}", seeds) for number in range(4)]
    for number, worker in enumerate(workers):
        for key in range(1, 100 + number):
            worker.summary.add(key)
    await until(lambda: all(len(life.names) == 6 for life in house.lives))
    await until(lambda: all(same(router, worker) for router in (r0, r1, r2) for worker in workers))
    assert r2.replicas.load("w3") == Load(queued_tokens=7)

    workers[0].summary.remove(50)
    for key in range(10_000, 11_500):  # more than a datagram, so over TCP
        workers[0].summary.add(key)
    took = await until(lambda: workers[0].summary.changes == 0 and all(same(r, workers[0]) for r in (r0, r1, r2)))
    assert took < 2.0

    late = await house.start("r3", seeds)
    await until(lambda: all(same(late, worker) for worker in workers), 5.0)


async def test_a_killed_worker_falls_silent_then_is_gone_and_comes_back_empty(house: House) -> None:
    r0 = await house.start("r0", [])
    seeds = [r0.node.member.address]
    r1 = await house.start("r1", seeds)
    worker = await house.start("w0", seeds)
    worker.summary.add(5)
    await until(lambda: same(r0, worker) and same(r1, worker) and len(r0.replicas.table.items(0)[0]) == 1)
    await worker.node.stop(leave=False)
    for router in (r0, r1):
        await until(lambda router=router: time.monotonic() - router.replicas.heard("w0") > CONFIG.silent_s, 1.2)
    await until(lambda: all("w0" not in router.names for router in (r0, r1)), 20.0)
    assert any(isinstance(event, Down) and not event.left for event in r0.events)
    assert "w0" not in r0.replicas

    again = await house.start("w0", seeds, incarnation=2, port=worker.node.member.port)
    await until(lambda: same(r0, again) and same(r1, again))
    assert len(r0.replicas.table.items(r0.replicas.row("w0"))[0]) == 0
    assert [event.member.incarnation for event in r0.events if isinstance(event, Up) and event.member.name == "w0"] == [
        1,
        2,
    ]


async def test_restart_before_anybody_has_noticed(house: House) -> None:
    r0 = await house.start("r0", [])
    seeds = [r0.node.member.address]
    worker = await house.start("w0", seeds)
    worker.summary.add(5)
    await until(lambda: same(r0, worker) and worker.summary.changes == 0)
    await worker.node.stop(leave=False)
    again = await house.start("w0", seeds, incarnation=2)
    await until(lambda: same(r0, again), 3.0)
    assert r0.node.gossip.membership.find("w0") == again.node.member


async def test_who_leaves_is_gone_at_once(house: House) -> None:
    r0 = await house.start("r0", [])
    seeds = [r0.node.member.address]
    others = [await house.start(name, seeds) for name in ("r1", "r2", "w0", "w1")]
    await until(lambda: all(len(life.names) == 4 for life in house.lives))
    await others[2].node.stop()
    took = await until(lambda: all("w0" not in life.names for life in house.lives if life is not others[2]))
    assert took < 1.0
    assert Down(others[2].node.member, left=True) in others[1].events


async def test_notices_go_to_all_other_routers_at_once(house: House) -> None:
    r0 = await house.start("r0", [])
    seeds = [r0.node.member.address]
    r1, r2 = await house.start("r1", seeds), await house.start("r2", seeds)
    await until(lambda: all(len(life.names) == 2 for life in house.lives))
    notice = Notice("r1", "w0", 3, 512, 600, "", bytes(8))
    r1.node.dispatched(notice)
    assert await until(lambda: notice in r0.events and notice in r2.events) < 0.5
    assert notice not in r1.events


async def test_another_key_is_refused_logged_once_and_counted(house: House, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        r0 = await house.start("r0", [])
        stranger = await house.start("w0", [r0.node.member.address], key=b"the key of another cluster")
        await until(lambda: r0.node.gossip.refused["key"] >= 2)
    assert not r0.names
    assert not stranger.names
    assert len([record for record in caplog.records if "cluster key" in record.message]) == 1


async def test_rubbish_over_tcp_is_dropped(house: House) -> None:
    r0 = await house.start("r0", [])
    for data in (
        b"",
        b"\0\0",
        b"\xff\xff\xff\xff",
        (MAX_FRAME + 1).to_bytes(4, "big") + b"x" * 100,
        b"\0\0\0\x05hello",
    ):
        reader, writer = await asyncio.open_connection(*r0.node.member.address)
        writer.write(data)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 2.0) == b""
        writer.close()
    assert r0.node.gossip.refused["size"] >= 3
    worker = await house.start("w0", [r0.node.member.address])
    await until(lambda: same(r0, worker))


async def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            await GossipNode.start("w0", WORKER, incarnation=1, config=config(KEY), port=other.getsockname()[1])


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::", "", "10.0.0"])
def test_a_host_that_the_others_cannot_reach_is_an_error(host: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{host!r} is not the numeric address")):
        GossipConfig(host=host)
    assert GossipConfig(host="fe80::1").host == "fe80::1"


async def test_after_stop_nothing_is_sent_and_nothing_runs(house: House) -> None:
    r0 = await house.start("r0", [])
    seeds = [r0.node.member.address]
    r1 = await house.start("r1", seeds)
    await until(lambda: r0.names == {"r1"} and r1.names == {"r0"})
    connections = [await asyncio.open_connection(*r1.node.member.address) for _ in range(5)]
    lasting = asyncio.all_tasks() - {asyncio.current_task()}
    await r1.node.stop()
    r1.node.dispatched(Notice("r1", "w0", 1, 1, 1, "", b""))
    r1.node._send([Send(r0.node.member.address, bytes(10), True)])
    r1.node.take(b"", r0.node.member.address)
    assert not r1.node._delivering | r1.node._serving
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() - {asyncio.current_task()} <= lasting
    await r1.node.stop()
    assert r1.node.gossip.refused["size"] == 0
    for _, writer in connections:
        writer.close()


async def test_a_start_that_fails_leaves_its_port_free(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def no_server(*args: object, **options: object) -> None:
        raise OSError("no server")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "start_server", no_server)
        with pytest.raises(OSError, match="no server"):
            await house.start("r0", [], port=port)
    with pytest.raises(ValueError, match="16"):
        await house.start("r0", [], port=port, key=b"short")
    await house.start("r0", [], port=port)


async def test_what_fails_again_and_again_is_logged_once(house: House, caplog: pytest.LogCaptureFixture) -> None:
    r0 = await house.start("r0", [])
    calls = []

    def broken() -> list:
        calls.append(1)
        raise RuntimeError("broken")

    r0.node.gossip.take_events = broken  # type: ignore[method-assign]
    await until(lambda: len(calls) > 5)
    assert len([record for record in caplog.records if "a tick failed" in record.message]) == 1


async def test_bytes_that_were_not_sent_are_not_counted(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    r0 = await house.start("r0", [])
    counted: list[int] = []
    monkeypatch.setattr(transfer.gossip.node, "_bytes", SimpleNamespace(add=lambda size, labels: counted.append(size)))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = nobody.getsockname()
        r0.node._datagrams.full = True
        r0.node._send([Send(address, bytes(10), False), Send(address, bytes(20), True)])
        r0.node._datagrams.full = False
        r0.node._send([Send(address, bytes(30), False)])
        await until(lambda: not r0.node._delivering)
    assert counted == [30]


def test_a_worker_that_publishes_compiles_nothing() -> None:
    script = "import sys, transfer.gossip.node; sys.exit('numba' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=env).returncode == 0
