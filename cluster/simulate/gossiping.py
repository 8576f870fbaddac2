"""Headwater's routers and workers as gossip nodes in virtual time, over a network that is slow and loses datagrams."""

from __future__ import annotations

from random import Random

from pydantic import ValidationError

from cluster.errors import UserError
from cluster.simulate.headwater import DEFAULTS, INCARNATION, RealRouters
from cluster.simulate.run import World
from router.config import RouterConfig
from router.route import Ticket
from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import MAX_NODES, ROUTER, WORKER, Address, Member, Notice
from transfer.gossip.protocol import Gossip, Send

WIRE_S = 0.005
"""From one node to another."""
TICK_S = 0.05
KEY = b"of a cluster that is simulated"


def check_limits(workers: int, routers: int, capacity: int) -> None:
    """Raise UserError for what gossip does not allow."""
    if workers + routers > MAX_NODES:
        raise UserError(f"--workers {workers} and --routers {routers}: must be {MAX_NODES} or fewer together")
    try:
        _config(0.0, capacity)
    except ValidationError as error:
        most = error.errors()[0]["ctx"]["le"]
        raise UserError(f"--capacity {capacity}: must be {most} or less with the policy headwater") from None


class Gossiping(RealRouters):
    """Summaries and notices of dispatches travel by gossip. A worker publishes every `staleness_s`; where that is 0, at
    every change, routers pass it on at once, and nothing takes time."""

    def __init__(self, world: World, router_config: RouterConfig = DEFAULTS) -> None:
        settings = world.settings
        config = _config(settings.staleness_s, settings.capacity)
        super().__init__(world, router_config, settings.routers, config.silent_s)
        self._random = world.random
        self._wire_s = WIRE_S if settings.staleness_s else 0.0
        self._cut_off = frozenset(f"r{number}" for number in settings.cut_off)
        names = [*(f"r{number}" for number in range(settings.routers)), *self.engines]
        self._addresses: dict[str, Address] = {name: (f"10.0.{n >> 8}.{n & 255}", 7000) for n, name in enumerate(names)}
        self._names = {address: name for name, address in self._addresses.items()}
        self._routers_by_name = {f"r{number}": number for number in range(settings.routers)}
        self._nodes = {name: self._node(name, config) for name in names}

    def start(self) -> None:
        """Nodes start at the same time and tick at different ones."""
        for name in self._nodes:
            self._world.loop.after(self._random.random() * TICK_S, self._tick, name)

    def announce(self, router: int, ticket: Ticket) -> None:
        """The others hear of it as soon as a datagram can be there."""
        name = f"r{router}"
        self._send(name, self._nodes[name].dispatched(ticket.notice))

    def publish(self, worker: str) -> None:
        """Most often it waits for the worker's next tick."""
        if not self._wire_s:
            self._send(worker, self._nodes[worker].tick(self._world.loop.now))

    def _node(self, name: str, config: GossipConfig) -> Gossip:
        number = self._routers_by_name.get(name)
        me = Member(name, WORKER if number is None else ROUTER, *self._addresses[name], INCARNATION)
        random = Random(self._random.random())
        seeds = list(self._addresses.values())
        if number is not None:
            return Gossip(me, config, KEY, random, replicas=self.replicas[number], seeds=seeds)
        return Gossip(me, config, KEY, random, summary=self.summaries[name], load=lambda: self.load(name), seeds=seeds)

    def _tick(self, name: str) -> None:
        loop = self._world.loop
        loop.after(TICK_S, self._tick, name)
        self._send(name, self._nodes[name].tick(loop.now))
        self._take_events(name)

    def _receive(self, name: str, data: bytes, sender: Address) -> None:
        self._send(name, self._nodes[name].receive(self._world.loop.now, data, sender))
        if not self._wire_s and name in self._routers_by_name:
            self._send(name, self._nodes[name].tick(self._world.loop.now))
        self._take_events(name)

    def _take_events(self, name: str) -> None:
        for event in self._nodes[name].take_events():
            if isinstance(event, Notice) and name in self._routers_by_name:
                self.routers[self._routers_by_name[name]].notice(event)

    def _send(self, sender: str, sends: list[Send]) -> None:
        loop, settings = self._world.loop, self._world.settings
        for send in sends:
            name = self._names[send.address]
            if self._divided(sender, name) or (not send.reliable and self._random.random() < settings.loss):
                continue
            loop.after(self._wire_s, self._receive, name, send.data, self._addresses[sender])

    def _divided(self, one: str, other: str) -> bool:
        settings = self._world.settings
        if not settings.cut_from_s <= self._world.loop.now < settings.cut_until_s:
            return False
        return one in self._cut_off or other in self._cut_off


def _config(staleness_s: float, capacity: int) -> GossipConfig:
    """The default settings but for the rhythm of updates. What counts as silence goes by it."""
    default = GossipConfig(keys_per_worker=capacity)
    if not staleness_s:
        return default.model_copy(update={"update_changes": 1, "relay_interval_s": 0.0})
    factor = max(1.0, staleness_s / default.update_interval_s)
    return default.model_copy(update={"update_interval_s": staleness_s, "silent_s": factor * default.silent_s})
