"""Cluster: the picture of the whole of it, from this gateway's view of the workers and from what gateways tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from router.gateway.dashboard.own import Own
from router.gateway.dashboard.viewer import Viewer, owner
from router.gateway.errors import ApiError, invalid
from router.gateway.history import merged
from router.gateway.text import Text
from router.route import Router
from router.view import WorkerView
from transfer.directory import Directory, PeerError
from transfer.messages import unpack_tokens
from transfer.outline import Outline, Run
from transfer.prefix import KEY_BYTES

ASK_S, OUTLINE_S = 1.0, 5.0
"""How long a gateway, and a worker, may take to answer."""
MAX_WORKERS = 200
"""Workers that are shown."""
MAX_ARCS = 2048
MAX_RUNS = 400
MAX_DEPTH = 64
"""Runs from the root of a tree to one that can be asked for."""
MAX_REQUESTS = 200


class Cluster:
    """As the gateway of `own` sees it; `others` names the gateways besides. `about` is told as it is."""

    def __init__(
        self,
        own: Own,
        router: Router,
        directory: Directory,
        others: Callable[[], list[str]],
        text: Text,
        about: dict[str, Any],
    ) -> None:
        self._own = own
        self._router = router
        self._view = router.view
        self._directory = directory
        self._others = others
        self._text = text
        self._about = about

    async def picture(self, viewer: Viewer, since: int) -> dict[str, Any]:
        """Gateways, workers, what runs, and what happened in the seconds from `since` on."""
        parts = {self._own.name: self._own.lately(viewer, since), **await self._asked("lately", viewer, since)}
        there = [part for part in parts.values() if part is not None]
        workers = list(self._view.workers.values())
        return {
            **self._about,
            "now": time.time(),
            "gateway": self._own.name,
            "ready": self._view.ready,
            "gateways": [
                {"name": name, "in_flight": part and part["in_flight"], "answers": part is not None}
                for name, part in parts.items()
            ],
            "workers": [self._worker(one) for one in workers[:MAX_WORKERS]],
            "more_workers": max(0, len(workers) - MAX_WORKERS),
            "total": {name: sum(part["total"][name] for part in there) for name in there[0]["total"]},
            "seconds": merged(part["seconds"] for part in there),
            "running": [one for part in there for one in part["running"]],
        }

    def ring(self) -> dict[str, Any]:
        """Which part of all prefixes is at home where: arcs as ends from 0 to 1 and workers, none of a ring of too
        many, and shares."""
        arcs = self._router.homes.arcs()
        shares: dict[str, float] = {}
        before = arcs[-1][0] - 1 if arcs else 0.0
        for end, name in arcs:
            shares[name] = shares.get(name, 0.0) + end - before
            before = end
        shown = [[round(end, 5), name] for end, name in arcs] if len(arcs) <= MAX_ARCS else []
        return {"arcs": shown, "shares": {name: round(share, 4) for name, share in shares.items()}}

    async def requests(self, viewer: Viewer) -> list[dict[str, Any]]:
        """The last requests of all gateways, the latest first."""
        some = [self._own.requests(viewer), *(await self._asked("requests", viewer)).values()]
        found = [one for part in some if part is not None for one in part]
        return sorted(found, key=lambda one: -one["at"])[:MAX_REQUESTS]

    async def request(self, viewer: Viewer, gateway: str, number: int) -> dict[str, Any]:
        """All of one request. Raises ApiError 404 and 503."""
        if gateway == self._own.name:
            found = self._own.request(viewer, number)
        elif gateway in self._others():
            found = await self._ask(gateway, "request", viewer, number)
        else:
            found = None
        if found is None:
            raise ApiError(404, f"request {number} of gateway {gateway[:64]!r} is not remembered here")
        return found

    async def outline(self, viewer: Viewer, worker: str, path: str) -> dict[str, Any]:
        """What a worker has cached behind a path of keys. Raises ApiError 400, 404 and 503."""
        keys = _keys(path)
        if worker not in self._view.workers:
            raise ApiError(404, f"there is no worker {worker[:64]!r}")
        found: Outline = await self._ask(worker, "outline", keys, viewer.salts, MAX_RUNS, timeout=OUTLINE_S)
        return {
            "path": [key.hex() for key in found.path],
            "start": found.start,
            "seen": found.seen,
            "whole": found.whole,
            "seconds": round(found.seconds, 5),
            "runs": [self._run(one, viewer) for one in found.runs],
        }

    def _run(self, run: Run, viewer: Viewer) -> dict[str, Any]:
        names = ("parent", "tokens", "device", "host", "disk", "uses", "ago", "pins", "below", "children", "hidden")
        text = self._text.decode(unpack_tokens(run.packed).tolist()) if viewer.tenant is None and run.packed else None
        told = {name: getattr(run, name) for name in names}
        return told | {"key": run.key.hex(), "text": text} | (owner(run.salt) if run.key and not run.tokens else {})

    def _worker(self, worker: WorkerView) -> dict[str, Any]:
        status, now = worker.status, self._view.now()
        state = "starting" if status is None else status.state
        if status is not None and not worker.alive:
            state = "dead"
        elif worker.leaving:
            state = "leaving"
        elif self._view.silent(worker.name):
            state = "silent"
        told = {"name": worker.name, "role": worker.role, "state": state, "wait_s": round(worker.wait_s(now), 3)}
        if status is None:
            return told
        tiers, cache = status.tiers, status.cache
        return told | {
            "node": status.node,
            "running": status.running,
            "waiting": status.waiting,
            "queued_tokens": status.queued_tokens,
            "blocks": status.blocks,
            "block_size": status.block_size,
            "token_bytes": status.token_bytes,
            "prompt_tokens": cache.prompt_tokens,
            "cached_tokens": cache.cached_tokens,
            "sent_bytes": status.transfer.sent_bytes,
            "received_bytes": status.transfer.received_bytes,
            "prompt_tokens_s": round(status.speeds.prompt_tokens_s, 1),
            "tiers": tiers
            and {name: getattr(tiers, name) for name in ("host_blocks", "host_cached", "disk_cached", "disk_bytes")},
        }

    async def _asked(self, method: str, *args: Any) -> dict[str, Any]:
        """What the other gateways answer; None where one does not."""

        async def ask(name: str) -> Any:
            try:
                return await self._directory.call(name, method, *args, timeout=ASK_S)
            except PeerError:
                return None

        names = self._others()
        return dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))

    async def _ask(self, name: str, method: str, *args: Any, timeout: float = ASK_S) -> Any:
        """What one answers. Raises ApiError 503."""
        try:
            return await self._directory.call(name, method, *args, timeout=timeout)
        except PeerError as error:
            raise ApiError(503, f"{name} does not answer", code="unavailable", retry_after_s=1) from error


def _keys(path: str) -> tuple[bytes, ...]:
    parts = path.split(".") if path else []
    try:
        keys = tuple(bytes.fromhex(part) for part in parts)
    except ValueError:
        keys = (b"",)
    if any(len(key) != KEY_BYTES for key in keys) or len(keys) > MAX_DEPTH:
        raise invalid(f"path: at most {MAX_DEPTH} keys of {2 * KEY_BYTES} hexadecimal digits with dots between", "path")
    return keys
