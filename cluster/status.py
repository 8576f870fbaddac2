"""`headwater status`: each worker's account of itself, as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import RayError
from rich.console import Group
from rich.table import Table

from cluster.config import gateway_names
from cluster.connection import LaunchError
from cluster.tables import table
from router.config import MAX_GATEWAYS
from transfer.messages import WorkerStatus

STATUS_TIMEOUT_S = 10.0


def collect(name: str) -> list[WorkerStatus]:
    """What the workers of the cluster `name` say, by the first gateway that answers. Raises LaunchError when there is
    none."""
    for gateway in gateway_names(MAX_GATEWAYS):
        try:
            actor = ray.get_actor(gateway, namespace=name)
            return list(ray.get(actor.statuses.remote(), timeout=STATUS_TIMEOUT_S))
        except (ValueError, RayError):
            continue
    raise LaunchError(f"no Headwater cluster named {name!r} runs on this Ray cluster")


def as_json(statuses: list[WorkerStatus]) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {"workers": [{**asdict(one), **_rates(one), "hidden_share": one.transfer.hidden_share} for one in statuses]}


def as_tables(statuses: list[WorkerStatus]) -> Group:
    """The same for people: who the workers are and what they do, their KV blocks, and what they sent each other; each
    fits 80 columns."""
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
    return Group(*tables)


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
