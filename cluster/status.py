"""`headwater status`: each worker's account of itself, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from rich.console import Group, RenderableType
from rich.table import Table

from cluster.config import gateway_names
from cluster.connection import DEFAULT_NAME, LaunchError
from cluster.control import Control
from cluster.tables import table
from router.config import MAX_GATEWAYS
from transfer.messages import WorkerStatus

if TYPE_CHECKING:
    from cluster.controller import Report

STATUS_TIMEOUT_S = 10.0


def report(name: str) -> Report | None:
    """What the controller of the cluster `name` says; None where it has none, or begins again just now."""
    try:
        found: Report = Control.of(name).call("report")
    except LaunchError:
        return None
    return found


def collect(name: str) -> list[WorkerStatus]:
    """What the workers of the cluster `name` say, by the first gateway that answers. Raises LaunchError when there is
    none."""
    for gateway in gateway_names(MAX_GATEWAYS):
        try:
            actor = ray.get_actor(gateway, namespace=name)
            if statuses := ray.get(actor.statuses.remote(), timeout=STATUS_TIMEOUT_S):
                return list(statuses)
        except (ValueError, RayError):
            continue
    raise LaunchError(f"no Headwater cluster named {name!r} runs on this Ray cluster")


def collected(name: str = DEFAULT_NAME) -> tuple[list[WorkerStatus], Report | None]:
    """What the workers and the controller say. Raises LaunchError where there is no cluster."""
    return collect(name), report(name)


def shown() -> RenderableType:
    """The tables, or why there are none at the moment."""
    try:
        return as_tables(*collected())
    except LaunchError as error:
        return str(error)


def as_json(statuses: list[WorkerStatus], known: Report | None = None) -> dict[str, Any]:
    """The object that `--json` prints."""
    workers = [{**asdict(one), **_rates(one), "hidden_share": one.transfer.hidden_share} for one in statuses]
    return {"workers": workers, "controller": None if known is None else asdict(known)}


def as_tables(statuses: list[WorkerStatus], known: Report | None = None) -> Group:
    """The same for people: who the workers are and what they do, their KV blocks, what they sent each other, and what
    the controller does; each fits 80 columns."""
    workers = table("worker", "role", "node", "pid", "state", "model", "running", "waiting")
    states = ("total", "free", "cached", "pinned", "quarantined")
    blocks = table("KV blocks", *states, "hit rate")
    for one in statuses:
        process = (one.name, one.role, one.node, str(one.pid), one.state, one.model)
        workers.add_row(*process, str(one.running), str(one.waiting))
        blocks.add_row(
            one.name, *(str(one.blocks[state]) for state in states), f"{one.cache.rates['token_hit_rate']:.1%}"
        )
    tables = [workers, blocks, _transfers(statuses)]
    if any(one.tiers for one in statuses):
        tables.append(_tiers(statuses))
    return Group(*tables, *(_controller(known) if known is not None else ()))


def _controller(known: Report) -> Iterator[RenderableType]:
    """Every process that there should be, how often it has begun, and why it is not up."""
    rows = table("actor", "role", "node", "state", "starts", "why")
    for one in known.actors:
        rows.add_row(one.name, one.role, one.node, one.state, str(one.starts), one.why)
    yield rows
    yield f"gateways: {' '.join(known.urls)}"
    if known.doing:
        yield f"under way: {known.doing}"
    if known.planner:
        yield f"planner: {known.planner}"


def _transfers(statuses: list[WorkerStatus]) -> Table:
    """What went between the workers, and what went wrong with it."""
    transfers = table("KV transfer", "sent", "hidden", "received", "MB/s", "fetched", "failed", "refused", "expired")
    for one in statuses:
        stats = one.transfer
        sizes = (
            f"{stats.sent_bytes / 1e6:.0f} MB",
            f"{stats.hidden_share:.0%}",
            f"{stats.received_bytes / 1e6:.0f} MB",
        )
        counts = (stats.fetched_blocks, stats.failed, stats.refused, stats.expired)
        transfers.add_row(one.name, *sizes, f"{one.speeds.bytes_s / 1e6:.0f}", *(str(count) for count in counts))
    return transfers


def _tiers(statuses: list[WorkerStatus]) -> Table:
    """What is below the devices: in which format, what there is, what went down and came back, and what went wrong."""
    formats = "/".join(sorted({one.tiers.format for one in statuses if one.tiers is not None}))
    rows = table(f"{formats} tiers", "host", "disk", "MB", "saved", "loaded", "read", "lost", "bad", "late", "state")
    for one in statuses:
        if (tiers := one.tiers) is not None:
            stats = tiers.stats
            held = f"{tiers.host_cached}/{tiers.host_blocks}", str(tiers.disk_cached), f"{tiers.disk_bytes / 1e6:.0f}"
            did = stats.saved_blocks, stats.loaded_blocks, stats.read_blocks, stats.lost_blocks
            wrong = stats.failed_loads, stats.given_up
            rows.add_row(one.name, *held, *map(str, (*did, *wrong)), "read-only" if tiers.read_only else "ok")
    return rows


def _rates(one: WorkerStatus) -> dict[str, float]:
    """`hit_rate` is that of tokens, under the name that everybody looks for."""
    rates = {name: round(rate, 4) for name, rate in one.cache.rates.items()}
    return {"hit_rate": rates["token_hit_rate"], **rates}
