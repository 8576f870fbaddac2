"""Workers that play recorded tokens back, and a real gateway over them, in a process of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from cluster import logs, telemetry
from cluster.errors import UserError
from cluster.simulate.status import stand_in
from router.config import GatewayConfig, RouterConfig
from router.gateway.actor import Gateway
from router.view import DECODE, PREFILL
from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import WORKER
from transfer.gossip.node import GossipNode
from transfer.gossip.summary import Load, Summary
from transfer.messages import Delta, Outcome, Request, Speeds, WorkerSpec

MODEL = "recorded"
MAX_MODEL_LEN = 8192
WORKERS = [WorkerSpec(f"{PREFILL}-0", PREFILL), WorkerSpec(f"{DECODE}-0", DECODE)]
SPEEDS = Speeds(1e6, 0.001, 1e10)
FREE_BLOCKS = 10**6
START_S = 120.0


@dataclass(slots=True)
class _Stream:
    """An answer that is being played: how many of its tokens have been."""

    request: Request
    given: int = 0


class Recorded:
    """A directory of one prefill and one decode worker, which generate `tokens` again and again. The first token comes
    as soon as it is asked for; the others as from a decode worker, one for each stream in a step, of all streams in
    one message. A step follows another one after `step_s`; without a pause it does when the gateway has taken the one
    before."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.step_s = 0.0
        self.gateway: Gateway | None = None
        self._tokens = tokens
        self._streams: dict[str, _Stream] = {}
        self._some = asyncio.Event()
        self._arrived: dict[str, dict[str, int]] = {one.name: {} for one in WORKERS}

    async def call(self, name: str, method: str, *args: Any, timeout: float) -> Any:
        """See `Directory`."""
        if method == "status":
            role = next(one.role for one in WORKERS if one.name == name)
            status = stand_in(name, role, SPEEDS, token_bytes=1)
            return replace(status, model=MODEL, block_size=16, max_model_len=MAX_MODEL_LEN)
        if method == "abort":
            self._streams.pop(args[0], None)
            return None
        request, _, _, _, dispatch = args
        self._arrived[name][dispatch.router] = dispatch.number
        stream = self._streams[request.request_id] = _Stream(request)
        await self._deliver([stream])
        self._some.set()
        return Outcome("handed off")

    def load(self, name: str) -> Load:
        """What a worker says of itself by gossip."""
        return Load(0, len(self._streams), SPEEDS.prompt_tokens_s, FREE_BLOCKS, tuple(self._arrived[name].items()))

    async def play(self) -> None:
        """Step for ever."""
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            self._some.clear()
            if not self._streams:
                await self._some.wait()
            await self._deliver(list(self._streams.values()))
            due = max(clock(), due + self.step_s)
            await asyncio.sleep(due - clock())

    async def _deliver(self, streams: list[_Stream]) -> None:
        assert self.gateway is not None
        await self.gateway.deliver([self._next(stream) for stream in streams])

    def _next(self, stream: _Stream) -> Delta:
        request, start = stream.request, stream.given
        stream.given += 1
        ends = stream.given == request.sampling.max_tokens
        if ends:
            del self._streams[request.request_id]
        token = self._tokens[start % len(self._tokens)]
        return Delta(request.request_id, start, (token,), 0, "length" if ends else None)


@dataclass(frozen=True, slots=True)
class Server:
    """A gateway that runs: where it listens, its process, and the line to it."""

    port: int
    pid: int
    line: Connection

    def pace(self, step_s: float) -> None:
        """Let steps of the decode worker be so far apart from now on; 0: as fast as they are taken."""
        self.line.send(step_s)
        self.line.recv()


@contextmanager
def serving(model: Path, tokens: tuple[int, ...]) -> Iterator[Server]:
    """A gateway with this model's tokenizer over recorded `tokens`. It ends with the block."""
    line, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_main, args=(model, tokens, its), daemon=True)
    process.start()
    its.close()
    try:
        if not line.poll(START_S):
            raise UserError("the gateway does not start")
        try:
            port = line.recv()
        except EOFError:
            raise UserError("the gateway has ended; see what it says above") from None
        assert process.pid is not None
        yield Server(port, process.pid, line)
    finally:
        line.close()  # which the gateway takes for the end
        process.join(10)
        process.kill()
        process.join()


def _main(model: Path, tokens: tuple[int, ...], line: Connection) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logs.setup()
    asyncio.run(_serve(model, tokens, line))


async def _serve(model: Path, tokens: tuple[int, ...], line: Connection) -> None:
    """What the other process does, until the line is closed."""
    recorded = Recorded(tokens)
    gossip = GossipConfig(key=SecretStr("of this benchmark"), host="127.0.0.1")
    router = RouterConfig(local_tokens=0)
    config = GatewayConfig(port=0)
    recorded.gateway = gateway = Gateway("gateway-0", WORKERS, model, config, router, gossip, recorded, telemetry.setup)
    nodes = [await _join(one.name, recorded, gossip) for one in WORKERS]
    playing = asyncio.create_task(recorded.play())
    line.send(await gateway.start([node.member.address for node in nodes]))
    ended = asyncio.Event()

    def said() -> None:
        try:
            recorded.step_s = line.recv()
            line.send(None)
        except EOFError:
            ended.set()

    asyncio.get_running_loop().add_reader(line.fileno(), said)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(line.fileno())
    playing.cancel()
    for node in nodes:
        await node.stop()
    await gateway.drain()


async def _join(name: str, recorded: Recorded, gossip: GossipConfig) -> GossipNode:
    summary = Summary(name, 1, gossip.keys_per_worker)
    return await GossipNode.start(
        name, WORKER, incarnation=1, config=gossip, summary=summary, load=lambda: recorded.load(name)
    )
