"""A cluster of gossip nodes in virtual time, over a network that loses, doubles, delays and divides."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import ROUTER, WORKER, Address, Member
from transfer.gossip.membership import Down, Up
from transfer.gossip.protocol import Gossip, Send
from transfer.gossip.replicas import Replicas
from transfer.gossip.summary import Load, Summary

KEY = b"the key of this test cluster"
HEADERS = 28  # of IP and UDP


@dataclass
class Node:
    """One life of a node."""

    gossip: Gossip
    replicas: Replicas | None
    summary: Summary | None
    load: Load = field(default_factory=Load)
    paused_until: float = 0.0
    sent_bytes: int = 0
    events: list[tuple[float, object]] = field(default_factory=list)


@dataclass
class Network:
    """What happens to frames. `divided(a, b)`: nothing passes between two nodes, by name."""

    loss: float = 0.0
    doubled: float = 0.0
    latency_s: tuple[float, float] = (0.0003, 0.002)
    divided: Callable[[str, str], bool] = lambda a, b: False


class Cluster:
    """Nodes by name; a name that starts with r is a router."""

    def __init__(
        self, seed: int, config: GossipConfig | None = None, keys: int = 64, ring: int = 1000, tick_s: float = 0.05
    ) -> None:
        self.draw = random.Random(seed)
        self.config = config or GossipConfig()
        self.keys = keys
        self.ring = ring
        self.tick_s = tick_s
        self.network = Network()
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.ports: dict[str, int] = {}
        self.names: dict[Address, str] = {}
        self.lives = 0
        self.frames = 0
        self._queue: list[tuple[float, int, str, Gossip | None, bytes, Address, bool]] = []
        self._count = 0

    def address(self, name: str) -> Address:
        port = self.ports.setdefault(name, 10_000 + len(self.ports))
        self.names[("10.0.0.1", port)] = name
        return "10.0.0.1", port

    def start(self, name: str, seeds: tuple[str, ...] = ("r0",)) -> Node:
        """Start a node, or start it again in a new life."""
        self.lives += 1
        role = ROUTER if name.startswith("r") else WORKER
        me = Member(name, role, *self.address(name), self.lives)
        replicas = Replicas(self.keys) if role == ROUTER else None
        summary = Summary(name, self.lives, self.keys, self.ring) if role == WORKER else None
        addresses = [self.address(seed) for seed in seeds]
        random_ = random.Random(self.draw.random())
        gossip = Gossip(me, self.config, KEY, random_, replicas, summary, lambda: self.nodes[name].load, addresses)
        node = self.nodes[name] = Node(gossip, replicas, summary)
        self._push(self.now + self.draw.random() * self.tick_s, name, gossip, b"", ("", 0), False)
        return node

    def kill(self, name: str) -> None:
        del self.nodes[name]

    def leave(self, name: str) -> None:
        node = self.nodes.pop(name)
        self.send(name, node.gossip.leave(self.now), node)

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            at, _, name, gossip, data, source, reliable = heapq.heappop(self._queue)
            self.now = at
            node = self.nodes.get(name)
            if node is None or (gossip is not None and node.gossip is not gossip):
                continue
            if node.paused_until > at:
                self._push(node.paused_until, name, gossip, data, source, reliable)
                continue
            if gossip is not None:
                self.send(name, gossip.tick(at), node)
                assert not gossip.failed
                self._push(at + self.tick_s, name, gossip, b"", source, False)
            else:
                self.frames += 1
                self.send(name, node.gossip.receive(at, data, source), node)
            for event in node.gossip.take_events():
                node.events.append((at, event))
        self.now = end

    def send(self, source: str, sends: list[Send], node: Node) -> None:
        network, draw = self.network, self.draw
        address = self.address(source)
        for item in sends:
            target = self.names[item.address]
            node.sent_bytes += len(item.data) + HEADERS
            if network.divided(source, target):
                continue
            copies = 1
            if not item.reliable:
                if draw.random() < network.loss:
                    continue
                copies += draw.random() < network.doubled
            for _ in range(copies):
                self._push(self.now + draw.uniform(*network.latency_s), target, None, item.data, address, item.reliable)

    def _push(self, at: float, name: str, gossip: Gossip | None, data: bytes, source: Address, reliable: bool) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at, self._count, name, gossip, data, source, reliable))

    # What tests ask.

    @property
    def routers(self) -> dict[str, Node]:
        return {name: node for name, node in self.nodes.items() if node.replicas is not None}

    @property
    def workers(self) -> dict[str, Node]:
        return {name: node for name, node in self.nodes.items() if node.summary is not None}

    def differences(self) -> list[str]:
        """Where a router does not hold what a worker has published, or holds somebody who is not there."""
        wrong = []
        for router, node in self.routers.items():
            for worker, other in self.workers.items():
                state = node.replicas.state(worker)
                mine = other.summary
                if state[0] != mine.incarnation or state[2] != mine.digest or not state[1]:
                    wrong.append(f"{router} on {worker}: {state}, not {mine.incarnation, mine.seq, mine.digest}")
            wrong += [f"{router} holds {ghost}" for ghost in node.replicas.workers if ghost and ghost not in self.nodes]
        return wrong

    def views(self) -> set[frozenset[str]]:
        """Who is up, as each node sees it, itself included."""
        return {
            frozenset({name, *(member.name for member in node.gossip.membership.members)})
            for name, node in self.nodes.items()
        }

    def told(self, kind: type[Up] | type[Down]) -> list[tuple[float, str, str]]:
        """Events of a kind: when, at which node, about whom."""
        return [
            (at, name, event.member.name)
            for name, node in self.nodes.items()
            for at, event in node.events
            if isinstance(event, kind)
        ]
