"""The controller: an actor that holds what a cluster is to be, and makes it so and keeps it so.

What it has to know of its cluster it keeps in Ray's own store, so that its next life goes on where this one ended: the
workers and gateways serve meanwhile.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from ray.autoscaler.sdk import request_resources
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.experimental import internal_kv

from cluster import placement
from cluster.config import ClusterConfig
from cluster.connection import LaunchError
from cluster.control import sweep
from cluster.keeper import Keeper
from cluster.launch import START_TIMEOUT_S, Cluster
from cluster.planner import Move, PlannerConfig, Remove
from cluster.planning import Change, Planning
from router.view import BOTH, DECODE, PREFILL

_log = logging.getLogger(__name__)
CALLS = 64
"""Calls that it answers at a time, each in a thread."""
CHANGE_S = 300.0
"""How long a change waits for the one before it."""
ROLES = (PREFILL, DECODE, BOTH)
KINDS = (*ROLES, "gateway")
FIXED = ("model", "gossip", "tiers", "transfer", "worker.dtype", "worker.device", "worker.block_size")
"""What workers of one cluster must agree about."""
STARTING, RUNNING, ENDING = "starting", "running", "ending"
_SPACE = b"headwater"


@dataclass(frozen=True, slots=True)
class ActorReport:
    """One actor: on which machine and Ray node it is, and what the controller knows of its life."""

    name: str
    role: str
    state: str
    node: str
    node_id: str
    starts: int
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """What the controller knows and does."""

    model: str
    urls: list[str]
    actors: list[ActorReport]
    doing: str
    planner: str


class Controller:
    """Of the cluster `name`, which is the Ray namespace. The actors of a `detached` one outlive this process."""

    def __init__(self, name: str, detached: bool) -> None:
        self._name = name
        self._detached = detached
        self._changing = threading.Lock()
        self._doing = ""
        self._cluster: Cluster | None = None
        self._keeper: Keeper | None = None
        self._planning: Planning | None = None
        self._asks = False
        """Whether the autoscaler was asked for anything."""
        if detached:
            try:
                self._go_on()
            except Exception:  # raised, it would be the controller's end for good, and nobody could end the cluster
                _log.exception("cannot go on with the cluster %s; end it: headwater down", name)

    # --- what operators call ------------------------------------------------------------------------------------

    def deploy(self, config: ClusterConfig, model: Path, patience_s: float) -> None:
        """Start the cluster; or, where it runs, make it what the configuration says. What it needs of the Ray cluster
        may be missing for `patience_s`. Raises LaunchError, with nothing started."""
        with self._change("deploy"):
            if self._cluster is not None:
                self._update(self._cluster, config, patience_s)
                return
            cluster = Cluster(config, model, self._name, self._detached)
            self._await_resources(config, cluster.counts, patience_s)
            self._save(STARTING, cluster)
            try:
                cluster.start(self._do)
            except BaseException:
                self._forget()
                raise
            self._cluster = cluster
            self._keep(cluster)

    def scale(self, counts: Mapping[str, int], patience_s: float = 0.0) -> None:
        """Have so many actors of each kind: of a role, or `gateway`. What they need of the Ray cluster may be missing
        for `patience_s`. Raises LaunchError."""
        with self._change("scale") as cluster:
            self._scale(cluster, counts, patience_s)

    def set_role(self, name: str, role: str) -> None:
        """Let a worker have another role, without a restart. Raises LaunchError."""
        with self._change("role") as cluster:
            self._set_role(cluster, name, role)

    def drain(self, names: list[str]) -> None:
        """Let workers go for good, without a request that fails. Raises LaunchError."""
        with self._change("drain") as cluster:
            self._drain(cluster, list(dict.fromkeys(names)))

    def drain_node(self, node: str) -> list[str]:
        """Let all actors leave a node, which is given by its id, address or host name; they begin again elsewhere, or
        when there is room. Returns their names. Raises LaunchError."""
        with self._change("drain") as cluster:
            names = placement.on_node(dict(cluster.places), node)
            if not names:
                places = sorted({place.address for place in dict(cluster.places).values()})
                raise LaunchError(f"no actor is on a node {node!r}; there are actors on {', '.join(places)}")
            cluster.avoided |= {cluster.places[name].node for name in names}
            self._save()
            for name in names:
                self._do(f"{name} leaves {node}")
                self._empty(cluster, name)
            return names

    def restart(self) -> None:
        """Restart every actor, one after the other, without a request that fails. Raises LaunchError."""
        with self._change("restart") as cluster:
            self._restart(cluster, cluster.names())

    def down(self, drain: bool = True, seconds: float | None = None) -> int:
        """End the cluster, within about so many seconds; returns how many requests were cut off. Raises RayError when
        no gateway answers, with everything ended all the same."""
        until = None if seconds is None else time.monotonic() + seconds
        self._do("ending")
        if self._planning is not None:
            self._planning.stop()
        if self._keeper is not None:
            self._keeper.stop()
        cut = 0
        if (cluster := self._cluster) is not None:
            self._save(ENDING)
            self._cluster = None
            try:
                cut = cluster.drain() if drain else 0
            finally:
                cluster.stop(until)
        self._forget()
        return cut

    def idle(self) -> bool:
        """Whether there is no cluster, and none is being made."""
        return self._cluster is None and not self._changing.locked()

    def doing(self) -> str:
        """What is under way, for people."""
        return self._doing

    def report(self) -> Report:
        """What it knows and does. Raises LaunchError while there is no cluster."""
        cluster, keeper = self._running()
        known, actors = keeper.lives(), []
        for name in cluster.names():
            spec, place = cluster.workers.get(name), cluster.places.get(name)
            where = (place.host, place.node) if place is not None else ("", "")
            role = spec.role if spec is not None else "gateway"
            if name in known:
                state, lives, why = known[name]
                actors.append(ActorReport(name, role, state.value, *where, lives, why))
            else:  # nobody looks after one that is to go, or to begin again
                actors.append(ActorReport(name, role, "leaving", *where, 0, ""))
        why = self._planning.why if self._planning is not None else ""
        return Report(cluster.model_name, cluster.urls, actors, self._doing, why)

    # --- one change after another -------------------------------------------------------------------------------

    @contextmanager
    def _change(self, what: str) -> Iterator[Any]:
        """The cluster, for a change that no other change meets. Raises LaunchError."""
        if not self._changing.acquire(timeout=CHANGE_S):
            raise LaunchError(f"{what}: {self._doing or 'another change'} is still under way after {CHANGE_S:.0f} s")
        try:
            yield self._cluster if what == "deploy" else self._running()[0]
        except (RayTaskError, GetTimeoutError, RayError) as error:
            raise LaunchError(f"{what}: {' '.join(str(error).split())[:300]}") from None
        finally:
            self._do("")
            self._changing.release()

    def _update(self, cluster: Cluster, config: ClusterConfig, patience_s: float) -> None:
        """Another configuration for a cluster that runs."""
        if config.gossip.key is None:
            gossip = config.gossip.model_copy(update={"key": cluster.gossip.key})
            config = config.model_copy(update={"gossip": gossip})
        for key in FIXED:
            of = attrgetter(key)
            if of(config) != of(cluster.config):
                raise LaunchError(f"{key}: cannot change while the cluster runs; end it first: headwater down")
        counts = {"gateway": config.gateway.replicas, BOTH: config.both.replicas}
        if config.planner.mode == "off":  # else these numbers are the planner's
            counts |= {PREFILL: config.prefill.replicas, DECODE: config.decode.replicas}
        cluster.config = config
        self._save()
        self._scale(cluster, counts, patience_s)
        self._plan(cluster)
        wanted = _without_counts(config)
        self._restart(cluster, [name for name, made in list(cluster.made.items()) if _without_counts(made) != wanted])

    def _set_role(self, cluster: Cluster, name: str, role: str) -> None:
        self._must_be_worker(cluster, name)
        self._must_stay(cluster, {name}, {role})
        cluster.role_is(name, role)
        self._save()

    def _drain(self, cluster: Cluster, names: list[str]) -> None:
        for name in names:
            self._must_be_worker(cluster, name)
        self._must_stay(cluster, set(names), set())
        for name in names:
            self._do(f"{name} leaves")
            self._let_go(cluster, name)

    def _scale(self, cluster: Cluster, counts: Mapping[str, int], patience_s: float) -> None:
        now = cluster.counts
        wanted = {kind: counts.get(kind, now.get(kind, 0)) for kind in KINDS}
        _check_counts(wanted)
        self._await_resources(cluster.config, wanted, patience_s)
        for kind, count in wanted.items():
            added = [cluster.add(kind) for _ in range(count - now.get(kind, 0))]
            self._save()
            self._start(cluster, added)
        for kind, count in wanted.items():
            for _ in range(now.get(kind, 0) - count):
                name = self._last(cluster, kind)
                self._do(f"{name} leaves")
                self._let_go(cluster, name)

    def _start(self, cluster: Cluster, names: list[str]) -> None:
        """Start new actors at once. One that cannot start is not wanted any more."""
        _, keeper = self._running()
        for name in names:
            self._do(f"{', '.join(names)} begins")
            keeper.add(name)
        for name in names:
            try:
                keeper.wait(name, START_TIMEOUT_S)
            except LaunchError:
                for one in reversed([one for one in names if not keeper.up(one)]):
                    keeper.forget(one)
                    cluster.remove(one)
                self._save()
                raise
        self._save()

    def _restart(self, cluster: Cluster, names: list[str]) -> None:
        for name in names:
            self._do(f"restarting {name}")
            spec = cluster.workers.get(name)
            if spec is not None and not self._live(cluster, spec.role) - {name}:  # nobody could take its place
                added = cluster.add(spec.role)
                self._save()
                self._start(cluster, [added])
                self._let_go(cluster, name)
            else:
                self._empty(cluster, name)
                self._running()[1].wait(name, START_TIMEOUT_S)

    def _empty(self, cluster: Cluster, name: str) -> None:
        """Let an actor end what it has, and begin another life."""
        _, keeper = self._running()
        keeper.forget(name)
        try:
            if name in cluster.workers:
                cluster.leaves(name)
            self._emptied(cluster, name)
        finally:
            cluster.end(name)
            keeper.add(name)

    def _let_go(self, cluster: Cluster, name: str) -> None:
        """Let an actor end what it has, and then itself."""
        _, keeper = self._running()
        keeper.forget(name)
        cluster.going.add(name)
        self._save()
        if name in cluster.workers:
            cluster.leaves(name)
        self._emptied(cluster, name)
        cluster.remove(name)
        self._save()

    @staticmethod
    def _emptied(cluster: Cluster, name: str) -> None:
        """One that fails meanwhile has nothing any more."""
        try:
            cluster.emptied(name)
        except RayError as error:
            _log.warning("%s did not end by itself: %s", name, type(error).__name__)

    # --- inside -------------------------------------------------------------------------------------------------

    @property
    def _key(self) -> bytes:
        return f"state:{self._name}".encode()

    def _do(self, what: str) -> None:
        self._doing = what

    def _running(self) -> tuple[Cluster, Keeper]:
        if self._cluster is None or self._keeper is None:
            begins = f"the cluster {self._name!r} is not up yet: {self._doing}"
            raise LaunchError(begins if self._doing else f"no Headwater cluster named {self._name!r} runs here")
        return self._cluster, self._keeper

    def _save(self, phase: str = RUNNING, cluster: Cluster | None = None) -> None:
        """What the next life has to know; and what Ray's autoscaler has to."""
        cluster = cluster or self._cluster
        if cluster is None:
            return
        self._ask_for(cluster.config, cluster.counts)
        if self._detached:
            saved = pickle.dumps((phase, cluster.state))
            internal_kv._internal_kv_put(self._key, saved, True, namespace=_SPACE)

    def _ask_for(self, config: ClusterConfig, counts: Mapping[str, int]) -> None:
        """Tell Ray's autoscaler, which keeps the nodes that it was asked for last."""
        bundles = placement.bundles(config, counts)
        if bundles or self._asks:
            self._asks = bool(bundles)
            request_resources(bundles=bundles)

    def _forget(self) -> None:
        if self._asks:
            request_resources(bundles=[])
        if self._detached:
            sweep(self._name)
            internal_kv._internal_kv_del(self._key, namespace=_SPACE)

    def _keep(self, cluster: Cluster, lost: list[str] | None = None) -> None:
        self._save()
        self._keeper = Keeper(cluster, lambda line: _log.warning("%s", line))
        self._keeper.start(lost or [])
        for name in cluster.going:
            self._keeper.forget(name)
        self._plan(cluster)

    def _plan(self, cluster: Cluster) -> None:
        """Let roles and numbers follow the load, as configured now."""
        if self._planning is not None:
            self._planning.stop()
        self._planning = Planning(cluster.config.planner, cluster.seen, self._planned)
        self._planning.start()

    def _planned(self, change: Change) -> None:
        """What the planner wants, as an operator would do it. Raises LaunchError."""
        planning = self._planning
        with self._change("planner") as cluster:
            if planning is not self._planning:  # another configuration came meanwhile
                return
            if isinstance(change, Move):
                self._set_role(cluster, change.worker, change.role)
            elif isinstance(change, Remove):
                self._drain(cluster, [change.worker])
            else:
                self._scale(cluster, {change.role: cluster.counts.get(change.role, 0) + 1}, 0.0)

    def _go_on(self) -> None:
        """Take the cluster over from the life before, if there was one. One that was only beginning, or ending already,
        is ended."""
        if (saved := internal_kv._internal_kv_get(self._key, namespace=_SPACE)) is None:
            return
        phase, state = pickle.loads(saved)
        self._asks = bool(placement.bundles(state.config, dict.fromkeys(KINDS, 1)))
        if phase != RUNNING:
            self._forget()
            return
        self._cluster = cluster = Cluster.adopted(state, self._name)
        self._keep(cluster, cluster.lost)
        cluster.tell()
        _log.warning("the controller has begun again with %d actors", len(cluster.names()))
        threading.Thread(target=self._finish, name="finish", daemon=True).start()

    def _finish(self) -> None:
        """What the life before had begun to let go."""
        while (cluster := self._cluster) is not None and cluster.going:
            try:
                with self._change("drain"):
                    for name in sorted(cluster.going, reverse=True):
                        self._let_go(cluster, name)
            except LaunchError as error:
                _log.warning("%s", error)
                time.sleep(1.0)

    def _await_resources(self, config: ClusterConfig, counts: Mapping[str, int], patience_s: float) -> None:
        """Raises LaunchError for what is missing at the end."""
        self._ask_for(config, counts)
        until = time.monotonic() + patience_s
        while time.monotonic() < until and (lines := placement.lacking(config, counts)):
            self._do(f"waiting for resources: {'; '.join(lines)}")
            time.sleep(1.0)
        try:
            placement.check(config, counts)
        except LaunchError:  # nobody wants more than there is
            if self._cluster is not None:
                self._save()
            else:
                self._forget()
            raise

    @staticmethod
    def _must_be_worker(cluster: Cluster, name: str) -> None:
        if name not in cluster.workers:
            raise LaunchError(f"{name!r} is no worker of this cluster; there are {', '.join(cluster.workers)}")

    def _live(self, cluster: Cluster, role: str) -> set[str]:
        """Workers of a role that serve, and stay."""
        keeper = self._running()[1]
        specs = list(cluster.workers.values())
        return {spec.name for spec in specs if spec.role == role and not spec.leaving and keeper.up(spec.name)}

    def _last(self, cluster: Cluster, kind: str) -> str:
        """The actor of a kind that goes first: one that does not serve, or the one that came last."""
        if kind == "gateway":
            return cluster.names()[-1]
        names = [name for name, spec in cluster.workers.items() if spec.role == kind]
        down = [name for name in names if name not in self._live(cluster, kind)]
        return (down or names)[-1]

    def _must_stay(self, cluster: Cluster, gone: set[str], instead: set[str]) -> None:
        live = {role: self._live(cluster, role) - gone for role in ROLES}
        roles = {role for role, names in live.items() if names} | instead
        without, lacking = f"without {', '.join(sorted(gone))}", {PREFILL, DECODE} - roles
        if len(lacking) == 1:
            raise LaunchError(f"{without} there would be no {lacking.pop()} worker")
        if not roles:
            raise LaunchError(f"{without} nobody could answer")


def _check_counts(wanted: Mapping[str, int]) -> None:
    """Raise LaunchError for what nobody could be served with."""
    for kind, count in wanted.items():
        if count < 0:
            raise LaunchError(f"{kind}: {count} is less than 0")
    if bool(wanted[PREFILL]) != bool(wanted[DECODE]):
        lacking = DECODE if wanted[PREFILL] else PREFILL
        raise LaunchError(f"{lacking}: 0, but prefill and decode workers only work together")
    if not (wanted[PREFILL] or wanted[BOTH]):
        raise LaunchError("prefill, decode and both: 0, but then nobody would answer")
    if not wanted["gateway"]:
        raise LaunchError("gateways: 0, but then nobody would listen")


def _without_counts(config: ClusterConfig) -> ClusterConfig:
    """What an actor is made with: the same for any number of them."""
    sections = {name: getattr(config, name).model_copy(update={"replicas": 1}) for name in KINDS}
    return config.model_copy(update=sections | {"planner": PlannerConfig()})
