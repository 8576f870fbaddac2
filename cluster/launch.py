"""Cluster: start workers and a gateway as Ray actors, and stop them so that nothing is left."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import ray
from pydantic import SecretStr
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster import telemetry
from cluster.config import ClusterConfig
from cluster.connection import DEFAULT_NAME, STOP_S, LaunchError, share
from cluster.models import served_name
from router.gateway.actor import Gateway
from router.view import DECODE, PREFILL
from transfer.directory import RayDirectory
from transfer.gossip.frames import Address
from transfer.layout import KVLayout
from transfer.messages import Peer, WorkerStatus
from workers.actor import Worker
from workers.config import WorkerConfig

MAX_CONCURRENCY = 100_000
"""Calls of an actor that may be open at a time: requests wait in them, and an abort must never queue behind those."""
START_TIMEOUT_S = 600.0
JOIN_S = 5.0
"""How long others may take to say where gossip can be joined through."""
DRAIN_END_S = 1.5
"""What a drain may take beyond the time that requests are given: the end of the HTTP server."""


class Cluster:
    """One Headwater cluster in the current Ray cluster; its name is the Ray namespace."""

    def __init__(self, config: ClusterConfig, model: Path, name: str = DEFAULT_NAME) -> None:
        self.config = config
        self.ports: list[int] = []
        self._model = model
        self._name = name
        self._actors: dict[str, Any] = {}
        self._cores = 1
        self._gpus = 0.0
        self._threads: dict[str, int] = {}
        self._seeds: list[Address] = []
        self.gossip = config.gossip
        """Gossip settings, with a key."""
        if config.gossip.key is None:
            self.gossip = config.gossip.model_copy(update={"key": SecretStr(secrets.token_hex())})

    @property
    def urls(self) -> list[str]:
        """Where the gateways listen."""
        host = "127.0.0.1" if self.config.gateway.host == "0.0.0.0" else self.config.gateway.host
        scheme = "https" if self.config.gateway.tls_certificate is not None else "http"
        return [f"{scheme}://{host}:{port}" for port in self.ports]

    @property
    def url(self) -> str:
        """Where the first gateway listens."""
        return self.urls[0]

    def start(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Start everything and wait until it can serve. Raises LaunchError, with nothing left running."""
        try:
            self._start_workers(progress)
            progress("starting the gateways")
            self._start_gateways()
        except ValueError as error:  # Ray knows an actor of this name already
            self.stop()
            raise LaunchError(f"a cluster named {self._name!r} runs here already: {error}") from None
        except BaseException:
            self.stop()
            raise

    def worker(self, name: str) -> Any:
        """The actor handle of a worker."""
        return self._actors[name]

    @property
    def gateways(self) -> list[Any]:
        """The gateways' actor handles."""
        return [self._actors[name] for name in self.config.gateways]

    def statuses(self) -> list[WorkerStatus]:
        """Each living worker's own account."""
        workers = [self._actors[name] for name, _ in self.config.workers]
        return list(ray.get([worker.status.remote() for worker in workers], timeout=10))

    def seeds(self) -> list[Address]:
        """Where gossip can be joined through: the gateways."""
        return list(ray.get([one.gossip_address.remote() for one in self.gateways], timeout=10))

    # --- for the keeper -----------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Names of all actors."""
        return [name for name, _ in self.config.workers] + self.config.gateways

    def pulse(self, name: str) -> Any:
        """A call of an actor that comes to a `Pulse`."""
        return self._actors[name].pulse.remote()

    def end(self, name: str) -> None:
        """End an actor's process."""
        ray.kill(self._actors[name])

    def create(self, name: str) -> None:
        """Create an actor, or its next life. Raises ValueError while its name is taken."""
        roles = dict(self.config.workers)
        self._actors[name] = self._worker(name, roles[name]) if name in roles else self._gateway(name, self._port(name))

    def begin(self, name: str) -> list[Callable[[], Any]]:
        """The calls that make a new actor serve, in order."""
        actor = self._actors[name]
        if name in self._threads:
            return [
                lambda: actor.start.remote(self._threads[name]),
                lambda: actor.join.remote(self.gossip, self._known(name)),
            ]
        return [lambda: actor.start.remote(self._known(name))]

    def _known(self, name: str) -> list[Address]:
        """Where gossip can be joined through: all other actors that answer."""
        others = [one for other, one in self._actors.items() if other != name]
        done, _ = ray.wait([one.gossip_address.remote() for one in others], num_returns=len(others), timeout=JOIN_S)
        found = []
        for call in done:
            with suppress(RayError):
                found.append(ray.get(call))
        return found

    def drain(self) -> int:
        """Let running requests finish, up to the configured time; returns how many were cut off. Raises RayError when
        no gateway answers."""
        calls = [one.drain.remote() for one in self.gateways]
        cut, problems = 0, []
        until = time.monotonic() + self.config.gateway.drain_s + DRAIN_END_S
        for call in calls:
            try:
                cut += ray.get(call, timeout=max(0.0, until - time.monotonic()))
            except (RayActorError, GetTimeoutError) as error:
                problems.append(error)
        if len(problems) == len(calls):
            raise problems[0]
        return cut

    def stop(self, until: float | None = None) -> None:
        """End every actor, the gateways first. Workers may take half of the time until `until` (monotonic; default:
        `STOP_S` from now) to end by themselves."""
        until = time.monotonic() + STOP_S if until is None else until
        for name in self.config.gateways:
            if (gateway := self._actors.pop(name, None)) is not None:
                ray.kill(gateway)
        workers, self._actors = list(self._actors.values()), {}
        if workers:
            ray.wait([one.stop.remote() for one in workers], num_returns=len(workers), timeout=share(until))
        for one in workers:
            ray.kill(one)

    def _start_workers(self, progress: Callable[[str], None]) -> None:
        workers = self.config.workers
        available = 0.0 if self.config.worker.device == "cpu" else ray.cluster_resources().get("GPU", 0.0)
        self._gpus = min(1.0, available / len(workers))
        for name, _ in workers:
            self.create(name)
        actors = [self._actors[name] for name, _ in workers]
        progress("starting the workers")
        hosts = self._all([one.host.remote() for one in actors])
        self._cores = hosts[0][1]
        self._threads = {name: share for (name, _), share in zip(workers, share_cores(hosts), strict=True)}
        self._all(
            [one.start.remote(self._threads[name]) for (name, _), one in zip(workers, actors, strict=True)],
            lambda ready: progress(f"loading the model: {ready} of {len(workers)} workers ready"),
        )
        first, *others = actors
        seeds = self._all([first.join.remote(self.gossip)])
        self._seeds = seeds + self._all([one.join.remote(self.gossip, seeds) for one in others])
        peers = self._all([one.describe.remote() for one in actors])
        check_layouts([(role, peer) for (_, role), peer in zip(workers, peers, strict=True)])

    def _all(self, calls: list[Any], progress: Callable[[int], None] = lambda _: None) -> list[Any]:
        """The results of calls to several actors; `progress` hears how many have answered. Raises LaunchError with the
        first that fails, or when the last takes too long."""
        pending, until = calls, time.monotonic() + START_TIMEOUT_S
        while pending:
            progress(len(calls) - len(pending))
            done, pending = ray.wait(pending, timeout=max(0.0, until - time.monotonic()))
            if not done:
                raise LaunchError(f"{len(pending)} actors were not ready within {START_TIMEOUT_S:.0f} s")
            for one in done:
                _result(one)
        return [_result(one) for one in calls]

    def worker_config(self) -> WorkerConfig:
        """What the first worker has while no other computes, for who wants to measure the same."""
        config = self.config.worker
        return config.model_copy(update={"threads": config.threads or self._cores})

    def _start_gateways(self) -> None:
        for name in self.config.gateways:
            self.create(name)
        self.ports = self._all([one.start.remote(self._seeds) for one in self.gateways])

    def _port(self, name: str) -> int:
        """Where a gateway is to listen: where it has listened before."""
        number = self.config.gateways.index(name)
        return self.ports[number] if self.ports else self.config.gateway.ports[number]

    def _worker(self, name: str, role: str) -> Any:
        config = self.config
        options = {"name": name, "namespace": self._name, "num_cpus": 0, "num_gpus": self._gpus}
        environment = {"env_vars": {"TOKENIZERS_PARALLELISM": "false"}}
        return (
            ray.remote(Worker)
            .options(**options, max_concurrency=MAX_CONCURRENCY, runtime_env=environment)
            .remote(
                name,
                role,
                self._model,
                served_name(config.model.name),
                config.worker,
                config.transfer,
                RayDirectory(self._name),
                config.tiers,
            )
        )

    def _gateway(self, name: str, port: int) -> Any:
        options = {"name": name, "namespace": self._name, "num_cpus": 0, "max_concurrency": MAX_CONCURRENCY}
        return (
            ray.remote(Gateway)
            .options(**options)
            .remote(
                name,
                self.config.workers,
                self._model,
                self.config.gateway.model_copy(update={"port": port}),
                self.config.router,
                self.gossip,
                RayDirectory(self._name),
                telemetry.setup,
            )
        )


def share_cores(hosts: Sequence[tuple[str, int]]) -> list[int]:
    """Threads for each worker while all start at once, given its host and the cores that it may use there. Two that
    compute at once would otherwise wait for each other's threads at every operator. (Later those share the cores that
    have something to compute, see workers/cores.py.)"""
    workers = Counter(name for name, _ in hosts)
    return [max(1, cores // workers[name]) for name, cores in hosts]


def check_layouts(workers: Sequence[tuple[str, Peer]]) -> None:
    """Raise LaunchError, naming the field, when a block of a prefill worker's KV would mean something else on a decode
    worker: when the model's files differ between machines, or what `auto` settings come to. `workers` are roles and
    workers; those with both roles hand nothing over, so they need not fit."""
    prefill, decode = ([peer for role, peer in workers if role == wanted] for wanted in (PREFILL, DECODE))
    for one, other in product(prefill, decode):
        difference = KVLayout.from_tuple(one.layout).difference(KVLayout.from_tuple(other.layout))
        if difference is not None:
            raise LaunchError(f"workers {one.name} and {other.name} cannot exchange KV blocks: {difference}")


def _result(reference: Any) -> Any:
    """The result of a start call; its failure as one line."""
    try:
        return ray.get(reference, timeout=START_TIMEOUT_S)
    except RayTaskError as error:
        raise LaunchError(str(error.cause)) from None
    except RayError as error:
        raise LaunchError(" ".join(str(error).split())[:500]) from None
