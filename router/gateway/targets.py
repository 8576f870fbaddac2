"""Where metrics are to be scraped, as Prometheus asks for it over HTTP (`http_sd_configs`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from router.view import WorkerView

META = "__meta_headwater_"
"""Of labels that are there for relabelling only: what metrics say of a worker has its name already."""


def targets(workers: Iterable[WorkerView], gateways: Mapping[str, str], scheme: str) -> list[dict[str, Any]]:
    """One target a process: living workers that serve metrics, and gateways, which listen at these addresses."""
    found = []
    for one in workers:
        if one.alive and one.status is not None and one.status.metrics:
            labels = {f"{META}name": one.name, f"{META}kind": "worker", f"{META}role": one.role}
            found.append({"targets": [one.status.metrics], "labels": labels})
    for name, address in gateways.items():
        labels = {f"{META}name": name, f"{META}kind": "gateway", "__scheme__": scheme}
        found.append({"targets": [address], "labels": labels})
    return found
