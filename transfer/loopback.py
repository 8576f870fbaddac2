"""An in-memory transport between named agents, for tests of the channel: writes take effect when told to.

Faults are injected by the test: `hold` delays data, `fail_writes` and `fail_notify` raise, `lose` drops notifications,
`fail` lets one write end in an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from transfer.channel import Layers, TransportError


@dataclass(slots=True)
class _Write:
    source: str
    target: str
    local: tuple[int, ...]
    remote: tuple[int, ...]
    layers: Layers
    notify: bytes
    done: bool = False
    failed: bool = False


@dataclass(slots=True)
class Network:
    """Pools by agent name, writes in flight and delivered notifications. A pool maps a block's id to its content, which
    can be sliced by layers: bytes, or a tuple of them."""

    pools: dict[str, dict[int, Any]] = field(default_factory=dict)
    in_flight: list[_Write] = field(default_factory=list)
    inbox: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)
    hold: bool = False
    lose: bool = False
    fail_writes: int = 0
    fail_notify: int = 0

    def deliver(self, write: _Write) -> None:
        """Let one write take effect, data before notification."""
        source, target, (begin, end) = self.pools[write.source], self.pools[write.target], write.layers
        for mine, theirs in zip(write.local, write.remote, strict=True):
            target[theirs] = target[theirs][:begin] + source[mine][begin:end] + target[theirs][end:]
        write.done = True
        self.in_flight.remove(write)
        if write.notify:
            self.send(write.source, write.target, write.notify)

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

    def checksum(self, blocks: Sequence[int], layers: Layers) -> int:
        """See `Pool`."""
        pool, (begin, end) = self._network.pools[self._agent], layers
        return xxhash.xxh3_64_intdigest(repr([pool[block][begin:end] for block in blocks]).encode())

    def size(self, blocks: int, layers: Layers) -> int:
        """See `Pool`."""
        return blocks * (layers[1] - layers[0])


class LoopbackTransport:
    """One agent on a `Network`."""

    def __init__(self, network: Network, agent: str) -> None:
        self._network = network
        self.agent = agent

    def write(self, agent: str, local: Sequence[int], remote: Sequence[int], layers: Layers, notify: bytes) -> _Write:
        """Post a write; see `Transport`."""
        if self._network.fail_writes:
            self._network.fail_writes -= 1
            raise TransportError("injected write failure")
        write = _Write(self.agent, agent, tuple(local), tuple(remote), layers, notify)
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
