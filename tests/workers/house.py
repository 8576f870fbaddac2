"""Whole workers in this process, without Ray: real engines, threads and NIXL, and calls that go wrong as told."""

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import model_zoo
from tests.workers.drive import assert_idle
from transfer.channel import TransportError
from transfer.config import TransferConfig
from transfer.directory import PeerDead, PeerError, PeerTimeout
from transfer.messages import Delta, Outcome, Request, SamplingParams, pack_tokens
from transfer.nixl_transport import NixlTransport
from workers.actor import Worker
from workers.config import WorkerConfig
from workers.engine.engine import Engine

OUTPUT = 6
STEP_TOKENS = 32
LENGTHS = (5, 30, 100, 250)
"""One step or several; with a block of 16, none of them whole blocks."""
REQUEST_S = 1.5
REST_S = 5.0
QUICK = TransferConfig(poll_interval_s=0.001, stall_s=0.5, lease_s=0.5, call_timeout_s=0.5)
SETTINGS = WorkerConfig(
    dtype="float32", device="cpu", kv_memory=1 << 21, max_model_len=512, step_tokens=STEP_TOKENS, threads=1
)
NEVER_S = 3600.0
_ids = itertools.count()


@dataclass(frozen=True)
class Call:
    """What becomes of one call: how long it takes to arrive and to be answered, how often it arrives (0: it is lost),
    and when its caller is told that there was no answer, whatever the other does."""

    before_s: float = 0.0
    after_s: float = 0.0
    times: int = 1
    fails_after_s: float = NEVER_S


Rule = Callable[[str, str, tuple[Any, ...]], Call]


def smooth(_name: str, _method: str, _arguments: tuple[Any, ...]) -> Call:
    return Call()


class Calls:
    """A `Directory` of actors in this process. As with Ray, a caller that stops waiting stops nobody else."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.actors: dict[str, Any] = {}
        self._deaths: dict[str, asyncio.Future[None]] = {}
        self._loop = loop
        self.rule: Rule = smooth
        self.listeners: list[Callable[[str], None]] = []
        self._under_way: set[asyncio.Task[Any]] = set()

    def live(self, name: str, actor: Any) -> None:
        """From now on calls reach this actor."""
        self.actors[name], self._deaths[name] = actor, self._loop.create_future()

    def die(self, name: str) -> None:
        """Who calls this actor, or waits for its answer, hears that it is dead."""
        self._deaths[name].set_result(None)

    def dead(self, name: str) -> bool:
        return self._deaths[name].done()

    async def call(self, name: str, method: str, *args: Any, timeout: float) -> Any:
        become = self.rule(name, method, args)
        try:
            return await asyncio.wait_for(self._call(become, name, method, args), min(timeout, become.fails_after_s))
        except asyncio.TimeoutError:
            raise PeerTimeout(f"{name}.{method}: no answer") from None

    async def _call(self, become: Call, name: str, method: str, args: tuple[Any, ...]) -> Any:
        self.happened(f"{method} called")
        await asyncio.sleep(become.before_s)
        result = None
        for _ in range(become.times):
            result = await self._arrive(name, method, args)
        self.happened(f"{method} answered")
        await asyncio.wait({self._deaths[name]}, timeout=become.after_s if become.times else NEVER_S)
        if self.dead(name):
            raise PeerDead(f"{name}.{method}: dead")
        return result

    async def _arrive(self, name: str, method: str, args: tuple[Any, ...]) -> Any:
        if self.dead(name):
            raise PeerDead(f"{name}.{method}: dead")
        task = self._loop.create_task(getattr(self.actors[name], method)(*args))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        await asyncio.wait({task, self._deaths[name]}, return_when=asyncio.FIRST_COMPLETED)
        if self.dead(name):
            raise PeerDead(f"{name}.{method}: dead")
        try:
            return task.result()
        except Exception as error:
            raise PeerError(f"{name}.{method}: {error!r}") from error

    def happened(self, what: str) -> None:
        """Tell who waits for it that a call was made or answered, or that something else came to pass."""
        for listener in list(self.listeners):
            listener(what)


@dataclass
class Answer:
    """What a gateway has of one request."""

    tokens: dict[int, int] = field(default_factory=dict)
    length: int | None = None
    error: str | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Gateway:
    """Orders what workers bring. While `open` is cleared it does not answer."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.open = asyncio.Event()
        self.open.set()

    async def ping(self) -> int:
        await self.open.wait()
        return 1

    async def deliver(self, deltas: list[Delta]) -> None:
        await self.open.wait()
        for delta in deltas:
            answer = self.answers.setdefault(delta.request_id, Answer())
            answer.error = answer.error or delta.error
            for index, token in enumerate(delta.tokens, delta.start):
                assert answer.tokens.setdefault(index, token) == token
            if delta.finish_reason is not None:
                answer.length = delta.start + len(delta.tokens)
            if answer.error is not None or len(answer.tokens) == answer.length:
                answer.over.set()


class LateWrites:
    """A `NixlTransport` whose writes begin when `delay` seconds, asked for each, have passed since they were posted."""

    def __init__(self, *args: Any) -> None:
        self._inner = NixlTransport(*args)
        self.delay: Callable[[], float] = lambda: 0.0
        self.fail: Callable[[], bool] = lambda: False
        self.on_write: Callable[[], None] = lambda: None
        self.dead: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, *args: Any) -> list[Any]:
        self.on_write()
        if self.fail():
            raise TransportError("injected failure")
        return [time.monotonic() + self.delay(), args, None]

    def done(self, handle: list[Any]) -> bool:
        begins, args, real = handle
        if args[0] in self.dead:
            raise TransportError("connection reset")
        if real is None:
            if time.monotonic() < begins:
                return False
            handle[2] = real = self._inner.write(*args)
        return self._inner.done(real)

    def release(self, handle: list[Any]) -> None:
        if handle[2] is not None:
            self._inner.release(handle[2])


class House:
    """A prefill worker `p`, a decode worker `d` and a gateway `g` in one event loop. `loaders` are the threads in which
    the workers have loaded the model."""

    def __init__(self, model: Path) -> None:
        self.loaders: list[threading.Thread] = []
        self.loop = asyncio.new_event_loop()
        self.calls = Calls(self.loop)
        self.model = model
        self._acts: list[asyncio.Task[None]] = []
        self.cases = [model_zoo.clear_prompt(model, length, OUTPUT, seed=length) for length in LENGTHS]
        self.run(self._open())

    async def _open(self) -> None:
        self.gateway = Gateway()
        self.calls.live("g", self.gateway)
        await self.begin("p")
        await self.begin("d")

    @property
    def p(self) -> Worker:
        return self.calls.actors["p"]

    @property
    def d(self) -> Worker:
        return self.calls.actors["d"]

    async def begin(self, name: str) -> Worker:
        """Start a worker, or its next life."""
        made = Worker(name, name, self.model, "tiny", SETTINGS, QUICK, self.calls)
        load = made._load

        def loading(threads: int | None) -> None:
            self.loaders.append(threading.current_thread())
            load(threads)

        made._load = loading  # type: ignore[method-assign]
        await made.start()
        self.calls.live(name, made)
        transport = made._transfer_loop.transport.own
        transport.on_write = lambda: self.loop.call_soon_threadsafe(self.calls.happened, "write posted")
        return made

    async def kill(self, name: str) -> None:
        """End a worker in mid-work: its threads stop, and whoever calls it or writes to it hears that it is dead."""
        self.calls.die(name)
        worker = self.calls.actors[name]
        for other in (self.p, self.d):
            other._transfer_loop.transport.own.dead.add(worker._peer.agent)
        for task in list(worker._front.tasks):
            task.cancel()
        await asyncio.to_thread(worker._transfer_loop.stop, 5.0)
        await asyncio.to_thread(worker._engine_loop.stop, 5.0)

    def run(self, work: Awaitable[Any], limit_s: float = 30.0) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, limit_s))

    def request(self, case: int, salt: bytes = b"", timeout_s: float = REQUEST_S) -> Request:
        sampling = SamplingParams(OUTPUT, temperature=0.0, ignore_eos=True)
        prompt = pack_tokens(self.cases[case][0])
        return Request(f"r{next(_ids)}", prompt, sampling, gateway="g", timeout_s=timeout_s, salt=salt)

    async def ask(self, case: int, salt: bytes = b"", timeout_s: float = REQUEST_S) -> str:
        """One request as a gateway carries it through, its client staying: "right", or why there is no answer."""
        request = self.request(case, salt, timeout_s)
        try:
            return await asyncio.wait_for(self._carry(request, case), timeout_s + 0.1)
        except asyncio.TimeoutError:
            return "deadline exceeded at the gateway"
        finally:
            await self.leave(request.request_id)

    async def _carry(self, request: Request, case: int) -> str:
        answer = self.gateway.answers.setdefault(request.request_id, Answer())
        try:
            outcome: Outcome = await self.calls.call("p", "generate", request, "d", timeout=request.timeout_s + 0.5)
        except PeerError as error:
            return str(error)
        if outcome.status != "handed off":
            return outcome.error or outcome.status
        await answer.over.wait()
        if answer.error is not None:
            return answer.error
        found = [answer.tokens.get(index) for index in range(OUTPUT)]
        assert found == self.cases[case][1], f"{found}, expected {self.cases[case][1]}"
        return "right"

    async def leave(self, request_id: str) -> None:
        """Abort everywhere, as gateways do; they do not try for long."""
        aborts = (self.calls.call(name, "abort", request_id, timeout=0.2) for name in ("p", "d"))
        await asyncio.gather(*aborts, return_exceptions=True)

    def once(self, event: str, act: Callable[[], Awaitable[Any]]) -> asyncio.Future[None]:
        """Do something when this happens for the first time; the future ends when it is done."""
        done = self.loop.create_future()

        async def run() -> None:
            await act()
            done.set_result(None)

        def listen(what: str) -> None:
            if what == event and listen in self.calls.listeners:
                self.calls.listeners.remove(listen)
                self._acts.append(self.loop.create_task(run()))

        self.calls.listeners.append(listen)
        return done

    async def rest(self, *names: str) -> None:
        """Wait until these workers are at rest."""
        until = time.monotonic() + REST_S
        for worker in (self.calls.actors[name] for name in names or ("p", "d")):
            while (problem := await self._unrest(worker)) is not None:
                assert time.monotonic() < until, f"{worker.name}: {problem}"
                await asyncio.sleep(0.005)

    async def _unrest(self, worker: Worker) -> str | None:
        front = worker._front
        if front.jobs:
            return f"jobs: {front.jobs}"
        if len(front.tasks) > 1:  # the one that stays is the watch
            return f"tasks: {[task.get_coro().__qualname__ for task in front.tasks]}"
        if await front.on_transfer(lambda loop: loop.receiver.waiting or loop.sender.open):
            return "leases or transfers"
        try:
            await front.on_engine(assert_idle)
        except AssertionError:
            return str(worker._engine.cache.counts())
        return None

    def close(self) -> None:
        for name, worker in self.calls.actors.items():
            if isinstance(worker, Worker) and not self.calls.dead(name):
                self.run(worker.stop())
        for task in asyncio.all_tasks(self.loop):  # what killed workers were at
            task.cancel()
        self.run(asyncio.sleep(0.01))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


async def answers(house: House) -> bool:
    """Whether the next request is answered; on a busy machine it may be late."""
    return await house.ask(1) == "right"


def only(wanted: str, become: Call) -> Rule:
    """Calls of one method go as told, all others go well."""
    return lambda _name, method, _arguments: become if method == wanted else Call()


async def occupy(worker: Worker) -> list[int]:
    """Take every block of a worker's pool."""

    def take(engine: Engine) -> list[int]:
        engine.cache.clear()
        return engine.cache.pool.allocate(engine.cache.pool.free)

    return await worker._front.on_engine(take)


async def give_back(worker: Worker, blocks: list[int]) -> None:
    await worker._front.on_engine(lambda engine: engine.cache.pool.release(blocks))


async def quarantined(worker: Worker) -> int:
    counts = await worker._front.on_engine(lambda engine: engine.cache.counts())
    return int(counts["quarantined"])


async def until(condition: Callable[[], Awaitable[Any]], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.002)
