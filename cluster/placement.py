"""Placement: what each actor takes of the Ray cluster, where it may run, and whether there is enough of everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray

from cluster.config import ClusterConfig
from cluster.connection import LaunchError
from transfer.messages import Place

NODE_LABEL = "ray.io/node-id"
"""Ray gives every node this label."""


def options(resources: Mapping[str, float], gpus: float, avoid: Collection[str]) -> dict[str, Any]:
    """Ray's options for an actor that takes these resources, `gpus` GPUs where they do not say, on a node that is not
    to be avoided. Actors are spread over the nodes."""
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    made: dict[str, Any] = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", gpus)}
    made |= {"resources": others, "scheduling_strategy": "SPREAD"}
    if avoid:
        made["label_selector"] = {NODE_LABEL: f"!in({','.join(sorted(avoid))})"}
    return made


def lacking(config: ClusterConfig, counts: Mapping[str, int]) -> list[str]:
    """What the Ray cluster has too little of for so many actors of each kind (a role, or `gateway`), one line each."""
    wanted: Counter[str] = Counter()
    kinds: dict[str, list[str]] = {}
    for kind, count in counts.items():
        for name, amount in config.resources(kind).items():
            wanted[name] += amount * count  # type: ignore[assignment]  # amounts may be fractions
            kinds.setdefault(name, []).append(f"{count} x {kind}.resources {amount:g}")
    there = ray.cluster_resources()
    return [
        f"{name}: {amount:g} wanted ({', '.join(kinds[name])}), {there.get(name, 0):g} in the Ray cluster"
        for name, amount in wanted.items()
        if amount > there.get(name, 0)
    ]


def bundles(config: ClusterConfig, counts: Mapping[str, int]) -> list[dict[str, float]]:
    """What so many actors of each kind take, each of one node, as far as the configuration says."""
    wanted = {kind: resources for kind in counts if (resources := config.resources(kind))}
    return [resources for kind, resources in wanted.items() for _ in range(counts[kind])]


def check(config: ClusterConfig, counts: Mapping[str, int]) -> None:
    """Raise LaunchError that says what the Ray cluster has too little of."""
    if lines := lacking(config, counts):
        raise LaunchError(f"not enough resources for what is wanted: {'; '.join(lines)}")


def share_cores(hosts: Sequence[tuple[str, int]]) -> list[int]:
    """Threads for each worker while all start at once, given its host and the cores that it may use there. Two that
    compute at once would otherwise wait for each other's threads at every operator. (Later those share the cores that
    have something to compute, see workers/cores.py.)"""
    workers = Counter(name for name, _ in hosts)
    return [max(1, cores // workers[name]) for name, cores in hosts]


def on_node(places: Mapping[str, Place], node: str) -> list[str]:
    """Names of the actors on a node, which is given by its id, address or host name."""
    return [name for name, place in places.items() if node in (place.node, place.address, place.host)]
