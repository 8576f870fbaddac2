"""What must hold after anything: blocks are in balance and the next request is answered."""

import time
from typing import Any

import httpx
import psutil
import ray

from cluster.launch import Cluster
from transfer.messages import WorkerStatus


def post(url: str, body: object, timeout: float = 60, **more: Any) -> httpx.Response:
    """Ask once. Nobody speaks TLS here, and to load the certificates would take longer than most answers."""
    return httpx.post(url, json=body, timeout=timeout, verify=False, **more)


def alive(process: psutil.Process) -> bool:
    """Whether it still runs."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def statuses(cluster: Cluster) -> list[WorkerStatus]:
    """Of the workers that live."""
    found = []
    for name, _ in cluster.config.workers:
        try:
            found.append(ray.get(cluster.worker(name).status.remote(), timeout=10))
        except ray.exceptions.RayActorError:
            continue
    return found


def unbalanced(cluster: Cluster) -> str | None:
    """What is not at rest: on every worker all blocks are free or cached, nothing is pinned, nobody is queued."""
    for one in statuses(cluster):
        blocks = one.blocks
        at_rest = blocks["free"] + blocks["cached"] == blocks["total"] and not blocks["pinned"]
        if not at_rest or one.running or one.waiting:
            return f"{one.name}: {one.running} running, {one.waiting} waiting, {blocks}"
    flying = ray.get([one.in_flight.remote() for one in cluster.gateways], timeout=10)
    if any(flying):
        return f"{flying} in flight at the gateways"
    return None


def assert_balance(cluster: Cluster, within_s: float = 5.0) -> None:
    """Everything comes to rest within a few seconds."""
    until = time.monotonic() + within_s
    while (problem := unbalanced(cluster)) is not None:
        assert time.monotonic() < until, problem
        time.sleep(0.05)


def assert_alive(cluster: Cluster, model: str) -> None:
    """The next ordinary request succeeds."""
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
    answer = post(f"{cluster.url}/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2
