"""The gateway actor: HTTP server, router and view in one process and one event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from router.config import GatewayConfig, RouterConfig
from router.gateway import metrics
from router.gateway.accounts import Keyring
from router.gateway.app import create_app
from router.gateway.batches.runner import Runner
from router.gateway.dashboard.cluster import Cluster
from router.gateway.dashboard.own import Own
from router.gateway.dashboard.routes import routes as dashboard
from router.gateway.dashboard.viewer import Viewer
from router.gateway.dispatch import Dispatcher
from router.gateway.jobs import Limits
from router.gateway.parsers import reasoning_parser, tool_parser
from router.gateway.routes_batches import stores_of
from router.gateway.server import ServerConfig
from router.gateway.service import Service
from router.gateway.targets import targets
from router.gateway.text import Text
from router.gateway.trial import Trials
from router.route import Router
from router.view import DECODE, PREFILL, View
from transfer.directory import Directory, PeerDead, PeerError, here
from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import ROUTER, Address, Notice
from transfer.gossip.node import Event, GossipNode
from transfer.gossip.replicas import Replicas
from transfer.messages import Delta, Place, Pulse, WorkerSpec, WorkerStatus
from transfer.telemetry import SetUp

_log = logging.getLogger(__name__)
HEARTBEAT_S = 0.5
STATUS_TIMEOUT_S = 5.0
MEET_S = 3.0
"""How long a gateway that starts waits for news of all workers."""
SERVER_END_S = 1.2
"""How long the HTTP server may take to end; see `server.CLOSING_S`."""
FLUSH_S = 1.0
BATCHES_END_S = 0.2
"""How long batches may take to leave off, in any case."""
"""How long what is left of traces may take to be sent behind that."""


class Gateway:
    """One gateway."""

    def __init__(
        self,
        name: str,
        workers: list[WorkerSpec],
        model: Path,
        config: GatewayConfig,
        router: RouterConfig,
        gossip: GossipConfig,
        directory: Directory,
        telemetry: SetUp,
    ) -> None:
        self._telemetry = telemetry(name)
        self._config = config
        self._directory = directory
        self._model = model
        template = config.chat_template
        self._text = Text(model, template.read_text() if template is not None else None)
        self._name = name
        self._incarnation = time.time_ns()
        self._gossip_config = gossip
        self._gossip: GossipNode | None = None
        self._replicas = Replicas(gossip.keys_per_worker)
        self._view = View(((one.name, one.role) for one in workers), time.monotonic, self._replicas, gossip.silent_s)
        self._router = Router(self._view, router, name, numbers_from=self._incarnation)
        self._router.expect(workers)
        self._version = 0
        self._gateways: dict[str, str] = {}
        self._dispatcher = Dispatcher(name, self._router, directory, router, config, self._notify)
        self._own = Own(name, self._dispatcher, self._text)
        metrics.observe(self._view, lambda: self._dispatcher.in_flight)
        self._draining = False
        self._server: uvicorn.Server | None = None
        self._runner: Runner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._watched: dict[str, asyncio.Task[None]] = {}

    async def start(self, seeds: Sequence[Address] = ()) -> int:
        """Begin to serve, with gossip joined through `seeds`; returns the port. Raises OSError when it is taken or
        `gateway.batch_path` cannot be used, and PeerError when no worker answers."""
        if (stores := stores_of(self._config)) is not None:
            await asyncio.to_thread(stores.check)
        address = (self._config.host, self._config.port)
        try:
            listener = socket.create_server(address, backlog=1024)
        except OSError as error:
            raise OSError(f"gateway.port: cannot listen on {address[0]}:{address[1]}: {error.strerror}") from None
        self._gossip = await GossipNode.start(
            self._name,
            ROUTER,
            incarnation=self._incarnation,
            config=self._gossip_config,
            seeds=seeds,
            replicas=self._replicas,
            on_event=self._on_gossip,
        )
        names = list(self._view.workers)
        await asyncio.gather(*(self._heartbeat(name) for name in names))
        await self._meet()
        statuses = [one.status for one in self._view.workers.values() if one.status is not None]
        if not statuses:
            raise PeerError("no worker answers")
        limits = Limits.of(statuses, self._config)
        template = self._text.template
        tools = tool_parser(self._config.tool_parser, template)
        reasoning = reasoning_parser(self._config.reasoning_parser, template)
        trials = Trials(self._text, limits.vocab_size)
        service = Service(self._text, self._dispatcher, limits, trials, tools, reasoning)
        keyring = Keyring((one.get_secret_value() for one in self._config.api_keys), self._config.keys_file)
        shown = dashboard(self._seen_cluster(limits), keyring)
        app = create_app(service, self._ready, self._telemetry.render, self._config, keyring, self._targets, [shown])
        self._server = uvicorn.Server(ServerConfig(app, self._config))
        self._tasks = [asyncio.create_task(self._server.serve(sockets=[listener]))]
        self._watch_all()
        self._runner = app.state.runner
        if self._runner is not None:
            self._runner.start(self._crew)
        while not self._server.started and not self._tasks[0].done():
            await asyncio.sleep(0.01)
        gc.freeze()  # what is loaded stays; the collector need not walk through it while tokens wait
        return int(listener.getsockname()[1])

    async def expect(self, specs: list[WorkerSpec], version: int, gateways: dict[str, str]) -> None:
        """Who the workers are from now on, and where `gateways` listen, unless a later version is known. What one that
        is gone still had to do goes on elsewhere. Returns when those that have just begun have been heard of, which may
        take some seconds."""
        if version <= self._version:
            return
        self._version, self._gateways = version, gateways
        self._router.expect(specs)
        if self._server is not None:
            self._watch_all()
        quiet = [one.name for one in specs if not self._view.workers[one.name].alive and not one.leaving]
        await asyncio.gather(*(self._heartbeat(name) for name in quiet))
        until = time.monotonic() + MEET_S
        while time.monotonic() < until and any(self._view.silent(name) for name in quiet):
            await asyncio.sleep(0.02)

    def _watch_all(self) -> None:
        """Watch the workers that there are, and no others."""
        names = self._view.workers.keys()
        for name in self._watched.keys() - names:
            self._watched.pop(name).cancel()
            self._dispatcher.worker_died(name)
        for name in names - self._watched.keys():
            self._watched[name] = asyncio.create_task(self._watch(name))

    async def deliver(self, deltas: list[Delta]) -> None:
        """Workers bring tokens."""
        self._dispatcher.deliver(deltas)

    async def pulse(self) -> Pulse:
        """Whether this process lives and serves, and what it knows of the workers."""
        serves = not self._draining and bool(self._tasks) and not self._tasks[0].done()
        return Pulse(serves=serves, version=self._version)

    async def place(self) -> Place:
        """Where this process runs."""
        return here()

    async def ping(self) -> int:
        """Whether this process lives; returns its id."""
        return os.getpid()

    async def gossip_address(self) -> Address:
        """Where gossip can be joined through. Only once this gateway has started."""
        assert self._gossip is not None
        return self._gossip.member.address

    async def in_flight(self) -> int:
        """Prompts under way."""
        return self._dispatcher.in_flight

    async def statuses(self) -> list[WorkerStatus]:
        """What the workers last said of themselves, the dead ones included."""
        views = [one for one in self._view.workers.values() if one.status is not None]
        return [one.status if one.alive else replace(one.status, state="dead") for one in views if one.status]

    async def lately(self, viewer: Viewer, since: int) -> dict[str, Any]:
        """For another gateway's dashboard; see `Own.lately`."""
        return self._own.lately(viewer, since)

    async def requests(self, viewer: Viewer) -> list[dict[str, Any]]:
        """For another gateway's dashboard; see `Own.requests`."""
        return self._own.requests(viewer)

    async def request(self, viewer: Viewer, number: int) -> dict[str, Any] | None:
        """For another gateway's dashboard; see `Own.request`."""
        return self._own.request(viewer, number)

    async def drain(self) -> int:
        """Become unready, let running requests finish for a while, then close; returns how many were cut off."""
        self._draining = True
        batches = asyncio.create_task(self._runner.stop()) if self._runner is not None else None
        until = time.monotonic() + self._config.drain_s
        while self._dispatcher.in_flight and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if batches is not None:  # what does not end is gone on with by others, as after a crash
            await asyncio.wait({batches}, timeout=max(BATCHES_END_S, until - time.monotonic()))
        cut = self._dispatcher.in_flight
        self._dispatcher.shut_down()
        if self._server is not None:
            self._server.should_exit = True
            await asyncio.wait(self._tasks[:1], timeout=SERVER_END_S)
        await asyncio.to_thread(self._telemetry.close, FLUSH_S)
        for task in (*self._tasks, *self._watched.values()):
            task.cancel()
        if self._gossip is not None:
            await self._gossip.stop()
        return cut

    async def _meet(self) -> None:
        """Wait until something has been heard of every worker, but not long. Whoever is not heard of gets no work while
        others are."""
        until = time.monotonic() + MEET_S
        while time.monotonic() < until and any(self._replicas.heard(name) is None for name in self._view.workers):
            await asyncio.sleep(0.02)

    def _seen_cluster(self, limits: Limits) -> Cluster:
        about = {"model": limits.model, "block_size": limits.block_size}
        return Cluster(self._own, self._router, self._directory, self._other_gateways, self._text, about)

    def _other_gateways(self) -> list[str]:
        assert self._gossip is not None
        return sorted(member.name for member, _ in self._gossip.gossip.membership.routers())

    def _notify(self, notice: Notice) -> None:
        if self._gossip is not None:
            self._gossip.dispatched(notice)

    def _on_gossip(self, event: Event) -> None:
        if isinstance(event, Notice):
            self._router.notice(event)

    def _targets(self) -> list[dict[str, Any]]:
        scheme = "https" if self._config.tls_certificate is not None else "http"
        return targets(self._view.workers.values(), self._gateways, scheme)

    def _crew(self) -> tuple[int, float]:
        roles = [one.role for one in self._view.workers.values() if one.alive]
        gateways = max(1, len(self._gateways))
        return sum(role != DECODE for role in roles), sum(role != PREFILL for role in roles) / gateways

    def _ready(self) -> bool:
        return self._view.ready and not self._draining

    async def _watch(self, name: str) -> None:
        while True:
            await self._heartbeat(name)
            await asyncio.sleep(HEARTBEAT_S)

    async def _heartbeat(self, name: str) -> None:
        """Ask a worker how it is. Only the end of its process counts as death; a slow answer does not."""
        try:
            status = await self._directory.call(name, "status", timeout=STATUS_TIMEOUT_S)
            if self._view.update(status):
                _log.warning("worker %s has another life", name)
                self._dispatcher.worker_died(name)
        except PeerDead as error:
            if (known := self._view.workers.get(name)) is not None and known.alive:
                _log.warning("worker %s died: %s", name, error)
                self._view.mark_dead(name)
            self._dispatcher.worker_died(name)
        except PeerError as error:
            # One that begins does not answer yet.
            known = self._view.workers.get(name)
            _log.log(logging.WARNING if known is not None and known.alive else logging.DEBUG, "%s", error)
