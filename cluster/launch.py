"""Cluster: start workers and gateways as Ray actors, change who they are, and stop them so that nothing is left."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import ray
from pydantic import SecretStr
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster import placement, telemetry
from cluster.config import ClusterConfig, gateway_names
from cluster.connection import DEFAULT_NAME, STOP_S, LaunchError, share
from cluster.models import served_name
from cluster.placement import share_cores
from router.gateway.actor import Gateway
from router.view import DECODE, PREFILL
from transfer.directory import RayDirectory
from transfer.gang import layouts_of
from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import Address
from transfer.messages import Peer, Place, Pulse, WorkerSpec, WorkerStatus
from transfer.pairs import mismatch
from workers.actor import LEAVE_S, LEND_S, Worker
from workers.config import WorkerConfig

MAX_CONCURRENCY = 100_000
"""Calls of an actor that may be open at a time: requests wait in them, and an abort must never queue behind those."""
START_TIMEOUT_S = 600.0
JOIN_S = 5.0
"""How long others may take to say where gossip can be joined through."""
TELL_S = 5.0
"""How long gateways may take to hear who the workers are. One that takes longer hears it later."""
ASK_S = 10.0
DRAIN_END_S = 2.5
"""What a gateway's drain may take beyond the time that requests are given: for the HTTP server's end, and traces."""


@dataclass(frozen=True, slots=True)
class State:
    """What there is to know of a cluster that runs already: what it is to be, where its gateways listen, which actors
    leave for good (`going`), with which configuration each was `made`, and which Ray nodes are `avoided`."""

    config: ClusterConfig
    model: Path
    workers: tuple[WorkerSpec, ...]
    gateways: tuple[str, ...]
    ports: dict[str, int]
    going: frozenset[str]
    made: dict[str, ClusterConfig]
    avoided: frozenset[str]


class Cluster:
    """One Headwater cluster in the current Ray cluster; its name is the Ray namespace. `detached` actors outlive the
    process that made them."""

    def __init__(self, config: ClusterConfig, model: Path, name: str = DEFAULT_NAME, detached: bool = False) -> None:
        if config.gossip.key is None:
            key = SecretStr(secrets.token_hex())
            config = config.model_copy(update={"gossip": config.gossip.model_copy(update={"key": key})})
        self.config = config
        self.workers = {name: WorkerSpec(name, role) for name, role in config.workers}
        self.going: set[str] = set()
        self.places: dict[str, Place] = {}
        self.made: dict[str, ClusterConfig] = {}
        """With which configuration each actor has begun."""
        self.avoided: set[str] = set()
        """Ids of Ray nodes where no actor is to begin."""
        self._model = model
        self._name = name
        self._detached = detached
        self._actors: dict[str, Any] = {}
        self._gateways = config.gateways
        self._ports: dict[str, int] = {}
        self._version = 0
        self._telling = threading.Lock()
        self._gpus = 0.0
        self._seeds: list[Address] = []

    @classmethod
    def adopted(cls, state: State, name: str) -> Cluster:
        """A cluster that runs already. Actors that have ended meanwhile are in `lost`."""
        made = cls(state.config, state.model, name, detached=True)
        made.workers = {spec.name: replace(spec, leaving=spec.name in state.going) for spec in state.workers}
        made.going, made.made, made.avoided = set(state.going), dict(state.made), set(state.avoided)
        made._gateways, made._ports = list(state.gateways), dict(state.ports)
        made._share_gpus()
        for one in made.names():
            with suppress(ValueError):
                made._actors[one] = ray.get_actor(one, namespace=name)
        # One that has not begun to serve has no gossip address.
        asked = {one: (actor.gossip_address.remote(), actor.place.remote()) for one, actor in made._actors.items()}
        ray.wait([call for calls in asked.values() for call in calls], num_returns=2 * len(asked), timeout=ASK_S)
        for one, (address, place) in asked.items():
            with suppress(RayError):
                ray.get(address, timeout=0)
                made.places[one] = ray.get(place, timeout=0)
        return made

    @property
    def lost(self) -> list[str]:
        """Actors that there should be, of which nothing is known."""
        return [name for name in self.names() if name not in self.places]

    @property
    def state(self) -> State:
        """What to know of it later."""
        return State(
            self.config,
            self._model,
            tuple(self.workers.values()),
            tuple(self._gateways),
            dict(self._ports),
            frozenset(self.going),
            dict(self.made),
            frozenset(self.avoided),
        )

    @property
    def gossip(self) -> GossipConfig:
        """Gossip settings, with a key."""
        return self.config.gossip

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return served_name(self.config.model.name)

    @property
    def ports(self) -> list[int]:
        """Of the gateways that listen, in their order."""
        return [self._ports[name] for name in self._gateways if name in self._ports]

    @property
    def urls(self) -> list[str]:
        """Where the gateways listen."""
        scheme = "https" if self.config.gateway.tls_certificate is not None else "http"
        there = [(name, self._ports[name]) for name in self._gateways if name in self._ports]
        return [f"{scheme}://{self._host(name)}:{port}" for name, port in there]

    @property
    def url(self) -> str:
        """Where the first gateway listens."""
        return self.urls[0]

    def start(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Start everything and wait until it can serve. Raises LaunchError, with nothing left running."""
        try:
            placement.check(self.config, self.counts)
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
        return [self._actors[name] for name in self._gateways]

    @property
    def counts(self) -> dict[str, int]:
        """How many actors of each kind there should be: of each role, and gateways."""
        roles = [spec.role for spec in self.workers.values()]
        return {role: roles.count(role) for role in dict.fromkeys(roles)} | {"gateway": len(self._gateways)}

    def seen(self) -> tuple[list[WorkerSpec], list[WorkerStatus]]:
        """Who there should be, and what those say that answer soon."""
        calls = [self._actors[name].status.remote() for name in self.workers if name in self._actors]
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=TELL_S)
        found = []
        for call in done:
            with suppress(RayError):
                found.append(ray.get(call))
        return list(self.workers.values()), found

    def statuses(self) -> list[WorkerStatus]:
        """Each living worker's own account."""
        return list(ray.get([self._actors[name].status.remote() for name in self.workers], timeout=ASK_S))

    def seeds(self) -> list[Address]:
        """Where gossip can be joined through: the gateways."""
        return list(ray.get([one.gossip_address.remote() for one in self.gateways], timeout=ASK_S))

    # --- for the keeper -----------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Names of all actors."""
        return [*self.workers, *self._gateways]

    def pulse(self, name: str) -> Any:
        """A call of an actor that comes to a `Pulse`."""
        return self._actors[name].pulse.remote()

    def end(self, name: str) -> None:
        """End an actor's process, whoever has made it."""
        self.places.pop(name, None)
        actor = self._actors.get(name)
        with suppress(ValueError):
            ray.kill(actor if actor is not None else ray.get_actor(name, namespace=self._name))

    def create(self, name: str) -> None:
        """Create an actor, or its next life. Raises ValueError while its name is taken."""
        self.made[name] = self.config
        self._actors[name] = self._worker(self.workers[name]) if name in self.workers else self._gateway(name)

    def begin(self, name: str) -> None:
        """Make a new actor serve. Raises RayError."""
        actor = self._actors[name]
        self.places[name] = place = ray.get(actor.place.remote())
        if name in self.workers:
            places = dict(self.places)
            beside = sum(places[one].node == place.node for one in list(self.workers) if one in places)
            ray.get(actor.start.remote(max(1, place.cores // beside)))
            ray.get(actor.join.remote(self.gossip, self._known(name)))
            self.leaves(name, name in self.going)
        else:
            self._ports[name] = ray.get(actor.start.remote(self._known(name)))
            self.tell()

    def _known(self, name: str) -> list[Address]:
        """Where gossip can be joined through: all other actors that answer."""
        others = [one for other, one in list(self._actors.items()) if other != name]
        done, _ = ray.wait([one.gossip_address.remote() for one in others], num_returns=len(others), timeout=JOIN_S)
        found = []
        for call in done:
            with suppress(RayError):
                found.append(ray.get(call))
        return found

    # --- changes ------------------------------------------------------------------------------------------------

    def add(self, kind: str) -> str:
        """There should be one more worker of a role, or `gateway`; returns its name. The keeper starts it."""
        if kind == "gateway":
            self._gateways = gateway_names(len(self._gateways) + 1)
            return self._gateways[-1]
        name = next(name for number in range(len(self.workers) + 1) if (name := f"{kind}-{number}") not in self.workers)
        self.workers[name] = WorkerSpec(name, kind)
        return name

    def remove(self, name: str) -> None:
        """There should be this actor no more; of the gateways, the last one. Its process is ended."""
        if name in self.workers:
            del self.workers[name]
            self.tell()
        else:
            self._gateways.remove(name)
            self._ports.pop(name, None)
        self.going.discard(name)
        self.made.pop(name, None)
        self.end(name)
        self._actors.pop(name, None)

    def leaves(self, name: str, leaving: bool = True) -> None:
        """A worker gets nothing new any more, or gets it again."""
        self.workers[name] = replace(self.workers[name], leaving=leaving)
        self.tell()

    def role_is(self, name: str, role: str) -> None:
        """A worker has another role from now on. Raises RayError when it does not answer."""
        ray.get(self._actors[name].role_is.remote(role), timeout=ASK_S)
        self.workers[name] = replace(self.workers[name], role=role)
        self.tell()

    def tell(self) -> None:
        """Let the gateways know who the workers are, and hear of them."""
        with self._telling:
            self._version = time.time_ns()  # later than those of a controller's life before
            gateways = [self._actors[name] for name in self._gateways if name in self._actors]
            calls = [self._tell(one) for one in gateways]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=TELL_S)

    def _tell(self, gateway: Any) -> Any:
        return gateway.expect.remote(list(self.workers.values()), self._version, self._addresses)

    @property
    def _addresses(self) -> dict[str, str]:
        """Where the gateways that listen are reached from other machines, by name."""
        host, places = self.config.gateway.host, dict(self.places)
        there = [
            (name, self._ports[name], places[name]) for name in self._gateways if name in self._ports.keys() & places
        ]
        return {name: f"{place.address if host == '0.0.0.0' else host}:{port}" for name, port, place in there}

    def heard(self, name: str, pulse: Pulse) -> None:
        """An actor has answered; a gateway that has missed who the workers are hears it once more."""
        if name in self._gateways and pulse.version < self._version:
            self._tell(self._actors[name])

    def emptied(self, name: str) -> int:
        """Let an actor end what it has: a worker within `worker.drain_s`, after which others go on with the rest, a
        gateway within `gateway.drain_s`. Returns how many requests went elsewhere, or were cut off by a gateway. Raises
        RayError."""
        if (actor := self._actors.get(name)) is None:
            return 0
        if name not in self.workers:
            return int(ray.get(actor.drain.remote(), timeout=self.config.gateway.drain_s + DRAIN_END_S))
        seconds = self.config.worker.drain_s
        moved = ray.get(actor.drain.remote(seconds), timeout=seconds + LEND_S + LEAVE_S + ASK_S)
        ray.get(actor.stop.remote(), timeout=ASK_S)
        return int(moved)

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
        for name in self._gateways:
            if (gateway := self._actors.pop(name, None)) is not None:
                ray.kill(gateway)
        workers, self._actors = list(self._actors.values()), {}
        if workers:
            ray.wait([one.stop.remote() for one in workers], num_returns=len(workers), timeout=share(until))
        for one in workers:
            ray.kill(one)

    # --- the start ----------------------------------------------------------------------------------------------

    def _share_gpus(self) -> None:
        available = 0.0 if self.config.worker.device == "cpu" else ray.cluster_resources().get("GPU", 0.0)
        self._gpus = min(1.0, available / len(self.workers))

    def _start_workers(self, progress: Callable[[str], None]) -> None:
        self._share_gpus()
        names = list(self.workers)
        for name in names:
            self.create(name)
        actors = [self._actors[name] for name in names]
        progress("starting the workers")
        places = self._all([one.place.remote() for one in actors])
        self.places |= dict(zip(names, places, strict=True))
        shares = share_cores([(one.node, one.cores) for one in places])
        self._all(
            [one.start.remote(threads) for one, threads in zip(actors, shares, strict=True)],
            lambda ready: progress(f"loading the model: {ready} of {len(actors)} workers ready"),
        )
        first, *others = actors
        seeds = self._all([first.join.remote(self.gossip)])
        self._seeds = seeds + self._all([one.join.remote(self.gossip, seeds) for one in others])
        peers = self._all([one.describe.remote() for one in actors])
        check_layouts([(spec.role, peer) for spec, peer in zip(self.workers.values(), peers, strict=True)])

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
        return config.model_copy(update={"threads": config.threads or next(iter(self.places.values())).cores})

    def _start_gateways(self) -> None:
        for name in self._gateways:
            self.create(name)
        places = self._all([one.place.remote() for one in self.gateways])
        self.places |= dict(zip(self._gateways, places, strict=True))
        ports = self._all([one.start.remote(self._seeds) for one in self.gateways])
        self._ports = dict(zip(self._gateways, ports, strict=True))
        self.tell()

    def _host(self, name: str) -> str:
        host = self.config.gateway.host
        if host != "0.0.0.0":
            return host
        return self.places[name].address if self.config.gateway.same_port and name in self.places else "127.0.0.1"

    def _port(self, name: str) -> int:
        """Where a gateway is to listen: where it has listened before."""
        return self._ports.get(name) or self.config.gateway.port_of(self._gateways.index(name))

    def _options(self, name: str, kind: str, gpus: float) -> dict[str, Any]:
        made = {"name": name, "namespace": self._name, "max_concurrency": MAX_CONCURRENCY}
        if self._detached:
            made["lifetime"] = "detached"
        return made | placement.options(self.config.resources(kind), gpus, self.avoided)

    def _worker(self, spec: WorkerSpec) -> Any:
        config = self.config
        environment = {"env_vars": {"TOKENIZERS_PARALLELISM": "false"}}
        return (
            ray.remote(Worker)
            .options(**self._options(spec.name, spec.role, self._gpus), runtime_env=environment)
            .remote(
                spec.name,
                spec.role,
                self._model,
                self.model_name,
                config.worker,
                config.transfer,
                RayDirectory(self._name),
                config.tiers,
                partial(telemetry.serve, config.telemetry),
            )
        )

    def _gateway(self, name: str, port: int | None = None) -> Any:
        port = self._port(name) if port is None else port
        return (
            ray.remote(Gateway)
            .options(**self._options(name, "gateway", 0.0))
            .remote(
                name,
                list(self.workers.values()),
                self._model,
                self.config.gateway.model_copy(update={"port": port}),
                self.config.router,
                self.gossip,
                RayDirectory(self._name),
                telemetry.setup,
            )
        )


def check_layouts(workers: Sequence[tuple[str, Peer]]) -> None:
    """Raise LaunchError, naming the field, when a block of a prefill worker's KV would mean something else on a decode
    worker: when the model's files differ between machines, or what `auto` settings come to. `workers` are roles and
    workers; those with both roles hand nothing over, so they need not fit."""
    prefill, decode = ([peer for role, peer in workers if role == wanted] for wanted in (PREFILL, DECODE))
    for one, other in product(prefill, decode):
        if (difference := mismatch(layouts_of(one), layouts_of(other))) is not None:
            raise LaunchError(f"workers {one.name} and {other.name} cannot exchange KV blocks: {difference}")


def _result(reference: Any) -> Any:
    """The result of a start call; its failure as one line."""
    try:
        return ray.get(reference, timeout=START_TIMEOUT_S)
    except RayTaskError as error:
        raise LaunchError(str(error.cause)) from None
    except RayError as error:
        raise LaunchError(" ".join(str(error).split())[:500]) from None
