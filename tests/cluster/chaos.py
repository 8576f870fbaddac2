"""Streams with known right answers, and faults under them: what the tests of a cluster that stays up share."""

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray.util import list_named_actors

from cluster.connection import LaunchError
from cluster.control import Control
from cluster.controller import ActorReport, Report
from tests import model_zoo
from transfer.channel import TransportError
from transfer.messages import WorkerStatus

MODEL = "tiny-llama"
DEADLINE_S = 60.0
RETRY_S = 0.1
BALANCE_S = 15.0
Case = tuple[list[int], list[int]]


def cases(model: Path, count: int, output: int) -> list[Case]:
    """Prompts of many lengths with the reference model's answers; some share their beginnings."""
    draw = random.Random(5)
    return [model_zoo.clear_prompt(model, draw.choice((5, 40, 130, 300)), output, seed=seed) for seed in range(count)]


@dataclass
class Stream:
    """One request: how it ended, at which gateway, and when it began and ended."""

    end: str
    url: str
    begun: float
    over: float
    gap: float
    detail: str = ""


@dataclass
class Load:
    """Clients that ask one thing after the other, in a thread of their own, until `stop`."""

    urls: Callable[[], Sequence[str]]
    cases: list[Case]
    clients: int
    streams: list[Stream] = field(default_factory=list)
    _stopping: bool = False

    def __enter__(self) -> "Load":
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let what runs end. Hangs nowhere: each request has its deadline."""
        self._stopping = True
        self._thread.join(DEADLINE_S + 10)
        assert not self._thread.is_alive()

    def more(self, count: int, within_s: float = 60.0) -> None:
        """Until so many streams more have ended."""
        wanted, until = len(self.streams) + count, time.monotonic() + within_s
        while len(self.streams) < wanted:
            assert time.monotonic() < until, f"{len(self.streams)} of {wanted} streams: {self.ends}"
            time.sleep(0.02)

    @property
    def ends(self) -> Counter[str]:
        """How many ended how."""
        return Counter(one.end for one in self.streams)

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=DEADLINE_S, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(self._client(client, random.Random(number)) for number in range(self.clients)))

    async def _client(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        while not self._stopping:
            prompt, answer = draw.choice(self.cases)
            length = draw.choice((1, len(answer) // 4, len(answer)))
            self.streams.append(await self._ask(client, draw, prompt, answer[:length]))

    async def _ask(
        self, client: httpx.AsyncClient, draw: random.Random, prompt: list[int], answer: list[int]
    ) -> Stream:
        """As a client behind a balancer does: a gateway that is away, or not ready, is not the one to ask."""
        begun, until = time.monotonic(), time.monotonic() + DEADLINE_S
        last = ""
        while time.monotonic() < until:
            urls = list(self.urls())
            draw.shuffle(urls)
            for url in urls:
                try:
                    if (end := await self._stream(client, url, prompt, answer)) is None:
                        continue
                except httpx.ConnectError as error:
                    last = str(error)
                    continue
                except httpx.TransportError as error:
                    end = ("cut", 0.0, repr(error))
                return Stream(end[0], url, begun, time.monotonic(), end[1], end[2])
            await asyncio.sleep(RETRY_S)
        return Stream("nobody", "", begun, time.monotonic(), 0.0, last)

    async def _stream(
        self, client: httpx.AsyncClient, url: str, prompt: list[int], answer: list[int]
    ) -> tuple[str, float, str] | None:
        """How one stream ends and its longest gap; None when this gateway is not ready."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": len(answer), "temperature": 0, "ignore_eos": True}
        ids: list[int] = []
        finish, error, done = "", "", False
        last, gap = 0.0, 0.0
        wanted = body | {"stream": True, "return_token_ids": True}
        async with client.stream("POST", f"{url}/v1/completions", json=wanted) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode()
                return None if response.status_code == 503 else (f"status {response.status_code}", 0.0, text[:300])
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: {"):
                    event = json.loads(line[6:])
                    error = error or json.dumps(event.get("error", "")).strip('"')
                    for choice in event.get("choices", []):
                        ids += choice["token_ids"]
                        finish = finish or choice["finish_reason"] or ""
                    gap = max(gap, time.monotonic() - last) if last else 0.0
                    last = time.monotonic()
        if ids != answer[: len(ids)]:
            return "wrong", gap, f"{ids} instead of {answer}"
        if error:
            return "error", gap, error[:300]
        if not (done and finish == "length" and len(ids) == len(answer)):
            return "truncated", gap, f"{len(ids)} of {len(answer)} tokens, finish {finish!r}, done {done}"
        return "right", gap, ""


def process_of(actor: Any) -> psutil.Process:
    """Where an actor runs."""
    return psutil.Process(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30))


def deaf(worker: Any, seconds: float) -> None:
    """A worker's gossip neither hears nor says anything for a while. Runs in the worker."""
    node = worker._gossip
    udp, received = node._udp, node._datagrams.datagram_received
    sendto = udp.sendto
    udp.sendto = lambda *_: None
    node._datagrams.datagram_received = lambda *_: None

    def again() -> None:
        udp.sendto, node._datagrams.datagram_received = sendto, received

    worker._front._loop.call_soon_threadsafe(worker._front._loop.call_later, seconds, again)


def unable_to_write(worker: Any, seconds: float) -> None:
    """Every write to a peer fails for a while. Runs in the worker."""
    transport = worker._transfer_loop.transport.own
    until = time.monotonic() + seconds
    write = type(transport).write

    def failing(*arguments: Any) -> Any:
        if time.monotonic() < until:
            raise TransportError("injected failure")
        return write(transport, *arguments)

    transport.write = failing


def stuck(worker: Any, seconds: float) -> None:
    """The engine's thread stands still. Runs in the worker."""
    worker._engine_loop.call(lambda: time.sleep(seconds))


class Faults:
    """Faults of one cluster of the namespace `space`, chosen by a seed. `log` says what was done, and when."""

    def __init__(self, control: Control, space: str, seed: int) -> None:
        self.control = control
        self.log: list[tuple[float, str, str]] = []
        self._space = space
        self._draw = random.Random(seed)
        self._kinds: list[Callable[[], str | None]] = [
            self.kill_worker,
            self.kill_gateway,
            self.kill_controller,
            self.kill_controller_at_work,
            self.stop_some,
            self.part_gossip,
            self.fail_writes,
            self.scale_up,
            self.scale_down,
            self.change_role,
        ]
        self._left: list[Callable[[], str | None]] = []

    def strike(self) -> str:
        """One fault; all kinds before one comes again, in random order."""
        while True:
            if not self._left:
                self._left = self._draw.sample(self._kinds, len(self._kinds))
            kind = self._left.pop()
            if (whom := kind()) is not None:
                self.log.append((time.monotonic(), kind.__name__, whom))
                return f"{kind.__name__} {whom}"

    def astray(self) -> set[str]:
        """Actors that nobody wants, or that are wanted and not there."""
        there = {one["name"] for one in list_named_actors(all_namespaces=True) if one["namespace"] == self._space}
        return there ^ {"controller", *(one.name for one in self.report().actors)}

    def restore(self) -> None:
        """As many workers of each role as there were."""
        self.control.call("scale", {"prefill": 3, "decode": 3})

    def actor(self, name: str) -> Any:
        return ray.get_actor(name, namespace=self._space)

    def report(self, within_s: float = 60.0) -> Report:
        """The controller's, which may be in another life soon."""
        until = time.monotonic() + within_s
        while True:
            try:
                report: Report = self.control.call("report")
                return report
            except LaunchError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    def up(self, *roles: str) -> list[ActorReport]:
        return [one for one in self.report().actors if one.state == "up" and one.role in roles]

    def spare(self, *roles: str) -> str | None:
        """Somebody without whom others of the role are there."""
        able = [some for role in roles if len(some := self.up(role)) > 1]
        return self._draw.choice(self._draw.choice(able)).name if able else None

    def kill(self, name: str) -> str:
        process_of(self.actor(name)).kill()
        return name

    def kill_worker(self) -> str | None:
        return self.kill(name) if (name := self.spare("prefill", "decode")) else None

    def kill_gateway(self) -> str | None:
        return self.kill(name) if (name := self.spare("gateway")) else None

    def kill_controller(self) -> str | None:
        return self.kill("controller")

    def kill_controller_at_work(self) -> str | None:
        """In the middle of a change, whose caller hears of it. What was half done must not stay so."""
        process, change = process_of(self.control.actor), self._draw.choice((self.scale_up, self.scale_down))
        done: list[object] = []

        def run() -> None:
            try:
                done.append(change())
            except LaunchError as error:
                done.append(str(error))

        changing = threading.Thread(target=run)
        changing.start()
        time.sleep(self._draw.uniform(0.2, 3.0))
        process.kill()
        changing.join(DEADLINE_S)
        return f"{change.__name__}: {done}"

    def stop_some(self) -> str | None:
        """For longer than anybody waits for an answer without a doubt."""
        if (name := self.spare("prefill", "decode", "gateway")) is None:
            return None
        process = process_of(self.actor(name))
        process.send_signal(signal.SIGSTOP)
        threading.Timer(3.0, process.send_signal, [signal.SIGCONT]).start()
        return name

    def part_gossip(self) -> str | None:
        return self._inside(deaf, self.spare("prefill", "decode"))

    def fail_writes(self) -> str | None:
        return self._inside(unable_to_write, self.spare("prefill"))

    def _inside(self, fault: Callable[[Any, float], None], name: str | None) -> str | None:
        if name is not None:
            ray.get(self.actor(name).__ray_call__.remote(fault, 2.0), timeout=30)
        return name

    def scale_up(self) -> str | None:
        role = self._draw.choice(("prefill", "decode"))
        return self._changed("scale", {role: self._count(role) + 1}) if self._count(role) < 4 else None

    def scale_down(self) -> str | None:
        role = self._draw.choice(("prefill", "decode"))
        return self._changed("scale", {role: self._count(role) - 1}) if len(self.up(role)) > 2 else None

    def change_role(self) -> str | None:
        old, new = self._draw.sample(("prefill", "decode"), 2)
        some = self.up(old)
        return self._changed("set_role", some[-1].name, new) if len(some) > 2 else None

    def _count(self, role: str) -> int:
        return sum(one.role == role and one.state != "leaving" for one in self.report().actors)

    def _changed(self, method: str, *arguments: Any) -> str:
        self.control.call(method, *arguments)
        return f"{method} {arguments}"


def statuses(faults: Faults) -> list[WorkerStatus]:
    names = [one.name for one in faults.report().actors if one.role != "gateway"]
    return list(ray.get([faults.actor(name).status.remote() for name in names], timeout=30))


def assert_at_rest(faults: Faults) -> None:
    """All actors are up, there are no others, and every block is free or cached."""
    until = time.monotonic() + 90
    while (wrong := faults.astray()) or any(one.state != "up" for one in faults.report().actors):
        assert time.monotonic() < until, (wrong, faults.report())
        time.sleep(0.1)
    until = time.monotonic() + BALANCE_S
    while wrong := [one for one in statuses(faults) if not at_rest(one)]:
        assert time.monotonic() < until, wrong
        time.sleep(0.1)


def at_rest(one: WorkerStatus) -> bool:
    blocks = one.blocks
    idle = not (one.running or one.waiting or blocks["pinned"])
    return idle and blocks["free"] + blocks["cached"] == blocks["total"]
