"""`headwater status`: each worker's account of itself, as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import RayError
from rich.table import Table

from cluster.launch import GATEWAY, LaunchError
from transfer.messages import WorkerStatus


def collect(name: str) -> list[WorkerStatus]:
    """What the workers of the cluster `name` say. Raises LaunchError when there is no such cluster."""
    try:
        gateway = ray.get_actor(GATEWAY, namespace=name)
        return list(ray.get(gateway.statuses.remote(), timeout=10))
    except (ValueError, RayError):
        raise LaunchError(f"no Headwater cluster named {name!r} runs on this Ray cluster") from None


def as_json(statuses: list[WorkerStatus]) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {"workers": [{**asdict(one), "hit_rate": round(one.hit_rate, 4)} for one in statuses]}


def as_table(statuses: list[WorkerStatus]) -> Table:
    """The same for people; blocks by state in columns of their own."""
    table = Table(title="Headwater workers")
    for column in ("worker", "role", "node", "pid", "state", "model"):
        table.add_column(column, overflow="fold")
    states = ("total", "free", "cached", "pinned", "quarantined")
    for column in ("running", "waiting", *states, "hit rate"):
        table.add_column(column, justify="right")
    for one in statuses:
        load = (str(one.running), str(one.waiting))
        blocks = (str(one.blocks[state]) for state in states)
        table.add_row(
            one.name, one.role, one.node, str(one.pid), one.state, one.model, *load, *blocks, f"{one.hit_rate:.1%}"
        )
    return table
