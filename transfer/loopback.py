"""An in-memory transport between named agents, for tests of the channel: writes take effect when told to.

An agent has all heads or, if the network has a `Shard` for it, some slices of them. Faults are injected by the test:
`hold` delays data, `fail_writes` and `fail_notify` raise, `lose` drops notifications, `fail` lets one write end in an
error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from transfer.channel import Layers, TransportError
from transfer.layout import WHOLE, KVLayout, LayerGeometry, Shard, Slices
from transfer.messages import Peer


@dataclass(slots=True)
class _Write:
    source: str
    target: str
    local: tuple[int, ...]
    remote: tuple[int, ...]
    layers: Layers
    notify: bytes
    slices: range
    done: bool = False
    failed: bool = False


@dataclass(slots=True)
class Network:
    """Pools by agent name, writes in flight and delivered notifications. A pool maps a block's id to its content, which
    can be cut by layers: bytes, or a tuple of them. One with a shard maps it to a tuple of such contents, one for each
    slice."""

    pools: dict[str, dict[int, Any]] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    in_flight: list[_Write] = field(default_factory=list)
    inbox: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)
    hold: bool = False
    lose: bool = False
    fail_writes: int = 0
    fail_notify: int = 0

    def deliver(self, write: _Write) -> None:
        """Let one write take effect, data before notification."""
        for mine, theirs in zip(write.local, write.remote, strict=True):
            content, its = self.content(write.source, mine), self.content(write.target, theirs)
            begin, end = write.layers
            for number in write.slices:
                its[number] = its[number][:begin] + content[number][begin:end] + its[number][end:]
            whole = tuple(its[number] for number in sorted(its))
            self.pools[write.target][theirs] = whole if write.target in self.shards else whole[0]
        write.done = True
        self.in_flight.remove(write)
        if write.notify:
            self.send(write.source, write.target, write.notify)

    def content(self, agent: str, block: int) -> dict[int, Any]:
        """A block's content by slice."""
        content = self.pools[agent][block]
        if (shard := self.shards.get(agent)) is None:
            return {0: content}
        return dict(zip(shard.slices, content, strict=True))

    def fail(self, write: _Write) -> None:
        """Let one write fail: it has no effect, and whoever polls it is told."""
        write.failed = True
        self.in_flight.remove(write)

    def send(self, source: str, target: str, message: bytes) -> None:
        """Deliver a notification, unless notifications are being lost."""
        if not self.lose:
            self.inbox.setdefault(target, []).append((source, message))


class LoopbackPool:
    """The blocks of one agent on a `Network`, of `layers` layers of a byte each."""

    def __init__(self, network: Network, agent: str, layers: int) -> None:
        self._network = network
        self._agent = agent
        self.layers = layers

    def checksum(self, blocks: Sequence[int], layers: Layers) -> tuple[int, ...]:
        """See `Pool`."""
        contents, (begin, end) = [self._network.content(self._agent, block) for block in blocks], layers
        pieces = ([one[number][begin:end] for one in contents] for number in self._shard.slices)
        return tuple(xxhash.xxh3_64_intdigest(repr(piece).encode()) for piece in pieces)

    def size(self, blocks: int, layers: Layers) -> int:
        """See `Pool`."""
        return blocks * (layers[1] - layers[0]) * self._shard.count

    @property
    def _shard(self) -> Shard:
        return self._network.shards.get(self._agent, WHOLE)


class LoopbackTransport:
    """One agent on a `Network`."""

    def __init__(self, network: Network, agent: str) -> None:
        self._network = network
        self.agent = agent

    def describe(self, name: str, incarnation: int) -> Peer:
        """Who this is and what it holds."""
        shard = self._network.shards.get(self.agent, WHOLE)
        layout = KVLayout("", "float32", 1, (LayerGeometry(shard.count, 1, 1),), 1, shard)
        return Peer(name, incarnation, self.agent, b"", 0, 0, False, layout.to_tuple())

    def connect(self, peer: Peer) -> None:
        """Everybody is connected to everybody."""

    def disconnect(self, agent: str) -> None:
        """See `connect`."""

    def close(self) -> None:
        """There is nothing to close."""

    def write(
        self,
        agent: str,
        local: Sequence[int],
        remote: Sequence[int],
        layers: Layers,
        notify: bytes,
        slices: Slices | None = None,
    ) -> _Write:
        """Post a write, of all slices unless it is said which; see `Transport`."""
        if self._network.fail_writes:
            self._network.fail_writes -= 1
            raise TransportError("injected write failure")
        which = self._network.shards.get(self.agent, WHOLE).slices if slices is None else range(*slices)
        write = _Write(self.agent, agent, tuple(local), tuple(remote), layers, notify, which)
        self._network.in_flight.append(write)
        if not self._network.hold:
            self._network.deliver(write)
        return write

    def done(self, handle: _Write) -> bool:
        """Whether a write has taken effect; see `Transport`."""
        if handle.failed:
            raise TransportError("injected failure of a posted write")
        return handle.done

    def release(self, handle: _Write) -> None:
        """Nothing is kept for a handle."""

    def notify(self, agent: str, message: bytes) -> None:
        """Send a message without data; see `Transport`."""
        if self._network.fail_notify:
            self._network.fail_notify -= 1
            raise TransportError("injected notification failure")
        self._network.send(self.agent, agent, message)

    def receive(self) -> list[tuple[str, bytes]]:
        """Notifications that have arrived."""
        return self._network.inbox.pop(self.agent, [])
