"""A gossip node on real sockets: asyncio around `Gossip`. Datagrams over UDP, longer frames over TCP, same port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from opentelemetry import metrics

from transfer.directory import node_address
from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import MAX_FRAME, Address, Member, Notice
from transfer.gossip.membership import Down, Up
from transfer.gossip.protocol import Gossip, Send
from transfer.gossip.summary import Load, Summary

if TYPE_CHECKING:
    from transfer.gossip.replicas import Replicas  # compiles its table, which only a router needs

Event: TypeAlias = Up | Down | Notice

TICK_S = 0.05
STREAM_S = 5.0
"""How long a frame may take over TCP."""
MAX_STREAMS = 64
"""Frames over TCP at once, each way; what is over it is dropped and asked for again."""
BUFFER_BYTES = 1 << 21
PORT_TRIES = 20

_logger = logging.getLogger(__name__)
_meter = metrics.get_meter("headwater.gossip")
_bytes = _meter.create_counter("headwater_gossip_bytes", unit="By", description="of frames, by direction")
_refused = _meter.create_counter("headwater_gossip_refused", description="frames not looked into, by reason")


class GossipNode:
    """One node of the cluster; `start` makes it. Everything runs on the event loop that started it, and `on_event` is
    called there. `Replicas` and `Summary` are to be used on that loop only."""

    def __init__(self, gossip: Gossip, on_event: Callable[[Event], None]) -> None:
        self.gossip = gossip
        self._on_event = on_event
        self._udp: asyncio.DatagramTransport | None = None
        self._datagrams = _Datagrams(self)
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._delivering: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._stopped = False

    @classmethod
    async def start(
        cls,
        name: str,
        role: int,
        *,
        incarnation: int,
        config: GossipConfig,
        seeds: Sequence[Address] = (),
        port: int = 0,
        replicas: Replicas | None = None,
        summary: Summary | None = None,
        load: Callable[[], Load] | None = None,
        before_tick: Callable[[], None] = lambda: None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> GossipNode:
        """Listen where the others reach this node, and join through `seeds`. Port 0 is any free one; `member` has it.
        Raises OSError where the address cannot be had, and ValueError where the configuration has no key."""
        host = config.host or node_address()
        if config.key is None:
            raise ValueError("gossip.key: a node needs one")
        key = config.key.get_secret_value().encode()
        udp, tcp = _listen(host, port)
        try:
            me = Member(name, role, host, udp.getsockname()[1], incarnation)
            node = cls(Gossip(me, config, key, Random(), replicas, summary, load, seeds, before_tick), on_event)
            await node._open(udp, tcp)
        except BaseException:
            udp.close()
            tcp.close()
            raise
        return node

    @property
    def member(self) -> Member:
        """What the others know of this node; its `address` is what they can join through."""
        return self.gossip.me

    def dispatched(self, notice: Notice) -> None:
        """Routers: tell all others of a dispatch, now; nobody, once the node has stopped."""
        self._send(self.gossip.dispatched(notice))

    async def stop(self, leave: bool = True) -> None:
        """Close everything. `leave`: say good-bye first, so that nobody waits for this node."""
        if leave:
            self._send(self.gossip.leave(time.monotonic()))
            await asyncio.sleep(0)
        self._stopped = True
        if self._udp is not None:
            self._udp.close()
        if self._server is not None:
            self._server.close()
        ticking = set() if self._ticking is None else {self._ticking}
        # A connection that was accepted just before has a task only now.
        while tasks := ticking | self._delivering | self._serving:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            ticking = set()

    def take(self, data: bytes, sender: Address) -> None:
        """Take in a frame that has arrived."""
        if self._stopped:
            return
        _bytes.add(len(data), {"direction": "in"})
        before = self.gossip.refused.copy()
        self._send(self.gossip.receive(time.monotonic(), data, sender))
        for reason, count in (self.gossip.refused - before).items():
            _refused.add(count, {"reason": reason})
        self._tell()

    async def _open(self, udp: socket.socket, tcp: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._udp, _ = await loop.create_datagram_endpoint(lambda: self._datagrams, sock=udp)
            self._server = await asyncio.start_server(self._serve, sock=tcp)
        except BaseException:
            await self.stop(leave=False)
            raise
        self._ticking = loop.create_task(self._tick())

    async def _tick(self) -> None:
        logged = ""
        while True:
            try:
                self._send(self.gossip.tick(time.monotonic()))
                self._tell()
            except Exception as error:
                # A node that stopped here would still look alive to its owner, and be dead to all others.
                if repr(error) != logged:
                    logged = repr(error)
                    _logger.exception("gossip: a tick failed; that is said again only after another failure")
            await asyncio.sleep(TICK_S)

    def _tell(self) -> None:
        for event in self.gossip.take_events():
            self._on_event(event)

    def _send(self, sends: Iterable[Send]) -> None:
        if self._stopped:
            return
        for send in sends:
            if send.reliable:
                if len(self._delivering) >= MAX_STREAMS:
                    continue
                task = asyncio.get_running_loop().create_task(self._deliver(send))
                self._delivering.add(task)
                task.add_done_callback(self._delivering.discard)
            elif self._udp is not None and not self._datagrams.full:
                self._udp.sendto(send.data, send.address)
                _bytes.add(len(send.data), {"direction": "out"})

    async def _deliver(self, send: Send) -> None:
        """One frame over a connection of its own. Who cannot be reached is asked again, or asks again, later."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(_write(send), STREAM_S)
            _bytes.add(len(send.data), {"direction": "out"})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._serving) < MAX_STREAMS and not self._stopped:
                self._serving.add(task)
                data = await asyncio.wait_for(_read(reader), STREAM_S)
                self.take(data, writer.get_extra_info("peername")[:2])
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            pass
        finally:
            self._serving.discard(task)
            writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, node: GossipNode) -> None:
        self._node = node
        self.full = False

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._node.take(data, addr[:2])


async def _write(send: Send) -> None:
    _, writer = await asyncio.open_connection(*send.address)
    try:
        writer.write(len(send.data).to_bytes(4, "big") + send.data)
        await writer.drain()
    finally:
        writer.close()
    await writer.wait_closed()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """One frame: its length in 4 bytes, and its bytes. Of one that is too long, nothing: it will be refused."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    return await reader.readexactly(size) if size <= MAX_FRAME else b""


def _listen(host: str, port: int) -> tuple[socket.socket, socket.socket]:
    """A UDP and a listening TCP socket with the same port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for tries_left in reversed(range(PORT_TRIES)):
        udp = socket.socket(family, socket.SOCK_DGRAM)
        tcp = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Room for what arrives while the process is busy with something else.
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            udp.bind((host, port))
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.bind((host, udp.getsockname()[1]))
            tcp.listen(MAX_STREAMS)
        except OSError:
            udp.close()
            tcp.close()
            if port or not tries_left:  # any port may be free for UDP and taken for TCP
                raise
        else:
            udp.setblocking(False)
            tcp.setblocking(False)
            return udp, tcp
    raise AssertionError("unreachable")
