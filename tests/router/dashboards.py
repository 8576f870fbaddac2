"""A gateway with its dashboard in the test's own event loop, over workers that a test plays."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from cluster.simulate.status import stand_in
from router.config import GatewayConfig, RouterConfig
from router.gateway.accounts import Keyring
from router.gateway.app import create_app
from router.gateway.dashboard.cluster import Cluster
from router.gateway.dashboard.own import Own
from router.gateway.dashboard.routes import routes
from router.gateway.dispatch import Dispatcher
from router.gateway.jobs import Limits
from router.gateway.parsers import tool_parser
from router.gateway.service import Service
from router.gateway.text import Text
from router.gateway.trial import Trials
from router.route import Router
from router.view import View
from transfer.directory import PeerTimeout
from transfer.messages import CacheStats, Delta, Outcome, Request, Speeds, TransferStats
from transfer.outline import Outline
from workers.kv.cache import KVCache
from workers.kv.journal import Journal
from workers.kv.outline import Walk, outline
from workers.sequence import Sequence

MODEL = "model"
ROLES = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"}
BLOCKS = {"total": 200, "free": 60, "cached": 120, "pinned": 20, "private": 20, "quarantined": 0}
CACHED = 16


@dataclass
class Played:
    """Workers that hand everything over, have a block of every prompt and share a cache, and another gateway. `gate` is
    what answers wait for behind their first token; the plans whose number `fails` says so of fail."""

    text: Text
    dispatcher: Dispatcher | None = None
    other: Own | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    fails: Callable[[int], bool] = lambda _: False
    cache: KVCache = field(default_factory=lambda: KVCache(400, 16, copy=lambda *_: None))
    salts: list[bytes | None] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        self.cache.watch(Journal(MODEL))

    async def call(self, name: str, method: str, *args: Any, timeout: float) -> Any:
        """See `Directory`."""
        if method == "generate":
            return await self._generate(args[0])
        if method == "outline":
            return self._outline(*args)
        if method in ("lately", "requests", "request"):
            if self.other is None:
                raise PeerTimeout(f"{name}.{method}")
            return getattr(self.other, method)(*args)
        return None

    async def _generate(self, request: Request) -> Outcome:
        assert self.dispatcher is not None
        self.asked += 1
        if self.fails(self.asked):
            return Outcome("failed", error="the worker has stumbled")
        self._keep(request)
        words = self.text.encode(" river")
        self.dispatcher.deliver([Delta(request.request_id, 0, (words[0],), CACHED)])
        await self.gate.wait()
        count = request.sampling.max_tokens
        self.dispatcher.deliver([Delta(request.request_id, 1, tuple(words[:1] * (count - 1)), CACHED, "length")])
        return Outcome("handed off")

    def _keep(self, request: Request) -> None:
        one = Sequence(request)
        if self.cache.admit(one, one.length):
            one.computed = one.length
            self.cache.commit(one)
            self.cache.release(one)

    def _outline(self, path: tuple[bytes, ...], salts: bytes | None, most: int) -> Outline:
        self.salts.append(salts)
        return outline(Walk(self.cache, path, salts, 1.0), most)


def cluster(text: Text, keys: Path | None = None, others: tuple[str, ...] = ()) -> tuple[FastAPI, Played]:
    """The application, and who plays the workers."""
    config, played = GatewayConfig(), Played(text)
    played.gate.set()
    view = View(ROLES.items())
    for number, (name, role) in enumerate(ROLES.items()):
        cache = CacheStats(prompt_tokens=1000 * (number + 1), cached_tokens=800 * number)
        sent = TransferStats(sent_bytes=10**7 * number, received_bytes=10**6)
        view.update(replace(stand_in(name, role, Speeds(900.0), 1), blocks=BLOCKS, cache=cache, transfer=sent))
    router = Router(view, RouterConfig(local_tokens=0))
    played.dispatcher = Dispatcher("gateway-0", router, played, RouterConfig(), config)
    limits = Limits(MODEL, 100_000, 16, 49152, MODEL, 0, 0.0, config.request_timeout_s, "exact")
    service = Service(text, played.dispatcher, limits, Trials(text, 49152), tool_parser("auto", None), None)
    own = Own("gateway-0", played.dispatcher, text)
    about = {"model": MODEL, "block_size": 16}
    whole = Cluster(own, router, played, lambda: list(others), text, about)
    keyring = Keyring((), keys)
    return create_app(service, lambda: True, lambda: b"", config, keyring, more=[routes(whole, keyring)]), played


def body(words: str, tokens: int = 3, **more: Any) -> dict[str, Any]:
    """A completion request."""
    return {"model": MODEL, "prompt": words, "max_tokens": tokens, **more}
