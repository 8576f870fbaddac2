"""View: what this router knows of the workers, from their summaries, from other routers, and from what it sends itself.

It asks nobody. What changes slowly, who is able to do what and how long the queues are on average, is looked up every
`REFRESH_S`; the rest when it is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from router.pending import Pending
from router.soon import Soon
from transfer.gossip.frames import Notice
from transfer.gossip.ladder import checkpoints
from transfer.gossip.replicas import Replicas
from transfer.gossip.summary import Load
from transfer.messages import WorkerSpec, WorkerStatus
from transfer.prefix import PrefixChain

PREFILL, DECODE, BOTH = "prefill", "decode", "both"
PROMPT_TOKENS_S = 1000.0
"""Speed of a worker while none has measured it."""
ALIKE = 0.5
"""Workers whose measured speeds do not differ by more than this factor from what is typical are taken to be equally
fast. Measurements are never equal, and on an idle cluster the one that seems fastest would get everything."""
UNTRIED_S = 30.0
"""So is one that has got nothing to compute for this long: whoever once seemed slow would never be tried again."""
REFRESH_S = 0.05
ASSIGNED_HALF_LIFE_S = 30.0
FULL_S = 0.5
"""How long a decode worker that had no place counts as full."""
NOTICE_S = 5.0
"""How long another router's dispatch counts that the worker never reports."""


@dataclass(slots=True)
class WorkerView:
    """One worker. `queued_tokens`, prompt tokens to be computed, were reported at `queued_at`; the worker has not yet
    reported what was `sent` by this router and what others gave notice of. `computing` and `decodes` count this
    router's own requests that are under way there. `promised` answers, to prompts of which so many tokens together are
    not cached, were sent there by whatever router since the last report, the first of them at `promised_at`. Until
    `full_until` it has no place for an answer, and while it is `leaving` it gets nothing new. `prompt_tokens_s` is the
    speed that it is taken to have."""

    name: str
    role: str
    alive: bool = True
    leaving: bool = False
    status: WorkerStatus | None = None
    load: Load | None = None
    incarnation: int = 0
    queued_tokens: int = 0
    queued_at: float = 0.0
    heard: float | None = None
    prompt_tokens_s: float = PROMPT_TOKENS_S
    computing: int = 0
    decodes: int = 0
    assigned: float = 0.0
    assigned_at: float = 0.0
    full_until: float = 0.0
    promised: int = 0
    promised_tokens: int = 0
    promised_at: float = 0.0
    sent: Pending = field(default_factory=Pending)
    noticed: Pending = field(default_factory=Pending)

    @property
    def measured(self) -> float:
        """Prompt tokens a second by its own account; 0 while it does not know."""
        reported = self.load.prompt_tokens_s if self.load else 0.0
        return reported or (self.status.speeds.prompt_tokens_s if self.status else 0.0)

    @property
    def answering(self) -> int:
        """Answers under way there, by the last report and what was sent since."""
        return max(self.decodes, (self.load.running if self.load else 0) + self.promised)

    def room(self, tokens: int, block_size: int) -> bool:
        """Whether a prompt of so many tokens finds blocks, as far as is known."""
        return self.load is None or self.load.free_blocks * block_size >= tokens + self.promised_tokens

    def promise(self, tokens: int, now: float) -> None:
        """An answer will be generated there, to a prompt of which so many tokens are not cached."""
        if not self.promised:
            self.promised_at = now
        self.promised, self.promised_tokens = self.promised + 1, self.promised_tokens + tokens

    def reported(self) -> None:
        """What was promised before is in a report now, or never will be."""
        self.promised = self.promised_tokens = 0

    def assign(self, tokens: int, now: float) -> None:
        """So many prompt tokens are to be computed there, by whatever router's plan."""
        self.assigned, self.assigned_at = self.assigned_lately(now) + tokens, now

    def unassign(self, tokens: int, at: float) -> None:
        """What was assigned at a time will not be computed there: take away what is left of it."""
        left = tokens * 0.5 ** ((self.assigned_at - at) / ASSIGNED_HALF_LIFE_S)
        self.assigned = max(0.0, self.assigned - left)

    def assigned_lately(self, now: float) -> float:
        """Prompt tokens that it got to compute, those of `ASSIGNED_HALF_LIFE_S` ago by half."""
        return float(self.assigned * 0.5 ** ((now - self.assigned_at) / ASSIGNED_HALF_LIFE_S))

    def queue(self, now: float) -> float:
        """Prompt tokens that are to be computed before a new one begins."""
        reported = self.queued_tokens - self.prompt_tokens_s * (now - self.queued_at)
        return max(0.0, reported) + self.sent.tokens + self.noticed.tokens

    def wait_s(self, now: float) -> float:
        """The same in seconds."""
        return self.queue(now) / self.prompt_tokens_s

    @property
    def in_flight(self) -> int:
        """Prompts that are not computed yet: this router's, and others' that the worker has not reported."""
        return self.computing + self.noticed.count


@dataclass(frozen=True, slots=True)
class Ladder:
    """Where a prompt's prefixes are looked up: its checkpoints and all of its whole blocks. `tokens[i]` is how many
    tokens the key `keys[i]` names."""

    keys: tuple[bytes, ...]
    tokens: tuple[int, ...]
    checkpoints: np.ndarray

    @classmethod
    def of(cls, chain: PrefixChain) -> Ladder:
        """The ladder of a prompt."""
        depths = checkpoints(len(chain.keys), chain.block_size).tolist()
        keys = [chain.keys[depth - 1] for depth in depths]
        numbers = np.frombuffer(b"".join(keys), dtype="<u8")
        if chain.keys and (not depths or depths[-1] < len(chain.keys)):
            depths.append(len(chain.keys))
            keys.append(chain.keys[-1])
        return cls(tuple(keys), tuple(depth * chain.block_size for depth in depths), numbers)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Workers that are able to do something, by name; the means of their waits, speeds and late assignments; and how
    many dispatches to them other routers have given notice of."""

    workers: dict[str, WorkerView]
    wait_s: float
    prompt_tokens_s: float
    noticed: int
    assigned: float

    @classmethod
    def of(cls, workers: list[WorkerView], now: float) -> Crowd:
        """The crowd of some workers at a time."""
        count = max(1, len(workers))
        return cls(
            {worker.name: worker for worker in workers},
            sum(worker.wait_s(now) for worker in workers) / count,
            sum(worker.prompt_tokens_s for worker in workers) / count or PROMPT_TOKENS_S,
            sum(worker.noticed.count for worker in workers),
            sum(worker.assigned_lately(now) for worker in workers) / count,
        )


@dataclass(frozen=True, slots=True)
class Held:
    """How many of a prompt's first tokens a worker holds: `total`, of these the first `host` in its host memory or
    better, and of these the first `device` on its device. Where host memory and disk have pieces in turn, it is taken
    to have those of host memory first: what loading takes is the same."""

    total: int = 0
    host: int = 0
    device: int = 0

    def cut(self, most: int) -> Held:
        """The same of the prompt's first `most` tokens."""
        return self if self.total <= most else Held(most, min(self.host, most), min(self.device, most))

    def with_device(self, tokens: int) -> Held:
        """The same if the device had at least so many."""
        if tokens <= self.device:
            return self
        return Held(max(self.total, tokens), max(self.host, tokens), tokens)

    @property
    def by_tier(self) -> dict[str, int]:
        """How many tokens would be used from where."""
        return {"device": self.device, "host": self.host - self.device, "disk": self.total - self.host}


class Holdings:
    """How many tokens of a prompt each worker holds: by what their summaries say, of which `depths` has how many of the
    checkpoints are in each row of `replicas`, and by what is known beyond that (`soon`: tokens that it will have, and
    those that it has by now, all on its device)."""

    def __init__(
        self, ladder: Ladder, depths: np.ndarray, replicas: Replicas | None, soon: dict[str, tuple[int, int]]
    ) -> None:
        self._ladder = ladder
        self._depths = depths
        self._replicas = replicas
        self._soon = soon
        self._said: dict[str, Held] = {}
        self._deepest: dict[int, list[str]] = {}

    def there(self, name: str) -> Held:
        """What a worker has by now."""
        return self._published(name).with_device(self._soon.get(name, (0, 0))[1])

    def soon(self, name: str) -> Held:
        """What a worker has, or soon will have."""
        return self._published(name).with_device(self._soon.get(name, (0, 0))[0])

    def deepest(self, count: int) -> list[str]:
        """About `count` workers that hold, or soon will hold, some of the prompt; those that hold most first. What is
        on the device counts twice: on a disk that they share, all may have all of it."""
        if (known := self._deepest.get(count)) is not None:
            return known
        names = set(self._soon)
        if self._replicas is not None:
            rows = np.flatnonzero(self._depths)
            if len(rows) > count:
                tokens = np.array((0, *self._ladder.tokens))
                device = self._replicas.device_depths(self._ladder.checkpoints, self._depths)
                worth = (tokens[self._depths] + tokens[device])[rows]
                rows = rows[np.argpartition(worth, -count)[-count:]]
            names.update(self._replicas.workers[row] for row in rows.tolist())

        def order(name: str) -> tuple[int, str]:
            held = self.soon(name)
            return -held.total - held.device, name

        self._deepest[count] = sorted(names, key=order)[:count]
        return self._deepest[count]

    def _published(self, name: str) -> Held:
        """By what its summary says; looked up once, and only of those that somebody asks for."""
        if (known := self._said.get(name)) is not None:
            return known
        row = self._replicas.row(name) if self._replicas is not None else None
        held = NOTHING
        if self._replicas is not None and row is not None and (depth := int(self._depths[row])):
            device, host = self._replicas.tiers(name, self._ladder.checkpoints, depth)
            tokens, host = self._ladder.tokens, device + host
            held = Held(tokens[depth - 1], tokens[host - 1] if host else 0, tokens[device - 1] if device else 0)
        self._said[name] = held
        return held


NOTHING = Held()


class View:
    """All workers by name, in the order they were announced. `replicas` has what their summaries say. `computing` is
    the sum of what prefill workers compute for this router. A worker that was not heard of for `silent_s` gets no new
    work, unless all of its role are silent."""

    def __init__(
        self,
        workers: Iterable[tuple[str, str]] = (),
        clock: Callable[[], float] = time.monotonic,
        replicas: Replicas | None = None,
        silent_s: float = 1.0,
    ) -> None:
        self.workers = {name: WorkerView(name, role) for name, role in workers}
        self.now = clock
        self.soon = Soon()
        self.computing = 0
        self._replicas = replicas
        self._silent_s = silent_s
        self._crowds: dict[tuple[str, ...], Crowd] = {}
        self._refreshed = -np.inf

    # --- what is heard of workers -------------------------------------------------------------------------------

    def expect(self, specs: Iterable[WorkerSpec]) -> None:
        """Who the workers are from now on. Those that are new get work once they have answered."""
        before, self.workers = self.workers, {}
        for one in specs:
            worker = before.pop(one.name, None) or WorkerView(one.name, one.role, alive=False)
            worker.role, worker.leaving = one.role, one.leaving
            self.workers[one.name] = worker
        for name in before:
            self.soon.forget_worker(name)
        self._refreshed = -np.inf

    def update(self, status: WorkerStatus) -> bool:
        """A worker has answered; whether it is another life of it than the one that answered before. Its summary may
        have said so already: that tells nobody who waits for the old life."""
        if (worker := self.workers.get(status.name)) is None:
            return False
        reborn = worker.status is not None and worker.status.incarnation != status.incarnation
        if not worker.alive or reborn or worker.status is None:
            self._refreshed = -np.inf
        self._meet(worker, status.incarnation)
        worker.alive, worker.status = True, status
        return reborn

    def mark_dead(self, name: str) -> None:
        """A worker's process has ended; it gets nothing until it answers again."""
        if (worker := self.workers.get(name)) is not None:
            worker.alive = False
            self._refreshed = -np.inf

    def notice(self, notice: Notice) -> None:
        """Another router has sent a worker a prompt."""
        now = self.now()
        if (worker := self.workers.get(notice.worker)) is not None:
            worker.noticed.add(notice.router, notice.number, notice.tokens, now + NOTICE_S)
            worker.assign(notice.tokens, now)
        if (decode := self.workers.get(notice.decode)) is not None:
            decode.promise(notice.tokens, now)

    def queue_is(self, name: str, tokens: int, router: str = "", number: int = 0) -> None:
        """A worker has answered how long its queue is, which has in it what the router sent up to this dispatch."""
        if (worker := self.workers.get(name)) is not None:
            worker.queued_tokens, worker.queued_at = tokens, self.now()
            worker.sent.arrived(router, number)

    def full(self, name: str) -> None:
        """A worker has no place for more answers at the moment."""
        if (worker := self.workers.get(name)) is not None:
            worker.full_until = self.now() + FULL_S

    # --- what a decision needs ----------------------------------------------------------------------------------

    def able(self, *roles: str) -> Crowd:
        """Living workers of any of these roles, as of at most `REFRESH_S` ago; not silent ones, unless all are."""
        now = self.now()
        if now - self._refreshed >= REFRESH_S:
            self._refresh(now)
        if roles not in self._crowds:
            living = self.living(*roles)
            self._crowds[roles] = Crowd.of([one for one in living if self._audible(one, now)] or living, now)
        return self._crowds[roles]

    def living(self, *roles: str) -> list[WorkerView]:
        """Workers of any of these roles that are not known to be dead and do not leave, silent or not."""
        workers = self.workers.values()
        return [worker for worker in workers if worker.alive and worker.role in roles and not worker.leaving]

    def lenders(self, names: Iterable[str]) -> list[WorkerView]:
        """Those of some workers that others may copy from, also while they leave."""
        known = [worker for name in names if (worker := self.workers.get(name)) is not None and worker.alive]
        return [worker for worker in known if self._audible(worker, self.now())]

    def silent(self, name: str) -> bool:
        """Whether a worker that answers has not been heard of lately."""
        worker = self.workers.get(name)
        if worker is None or not worker.alive:
            return False
        if self._replicas is not None:
            self._look_up(worker, self._replicas)
        return not self._audible(worker, self.now())

    def age(self, name: str) -> float | None:
        """Seconds since a worker was heard of by gossip; None where it never was."""
        heard = self._replicas.heard(name) if self._replicas is not None else None
        return None if heard is None else max(0.0, self.now() - heard)

    def holdings(self, ladder: Ladder) -> Holdings:
        """How much of a prompt the workers hold."""
        depths = np.zeros(0, np.int32)
        if self._replicas is not None:
            depths = self._replicas.depths(ladder.checkpoints)
        known = {
            name: (ladder.tokens[count - 1], ladder.tokens[by_now - 1] if by_now else 0)
            for name, (count, by_now) in self.soon.depths(ladder.keys).items()
        }
        return Holdings(ladder, depths, self._replicas, known)

    @property
    def ready(self) -> bool:
        """Whether some request could be served now: a worker with both roles, or one of each."""
        return bool(self.able(BOTH).workers) or bool(self.able(PREFILL).workers and self.able(DECODE).workers)

    # --- inside -------------------------------------------------------------------------------------------------

    def _audible(self, worker: WorkerView, now: float) -> bool:
        """Whether a worker has been heard of lately."""
        return self._replicas is None or (worker.heard is not None and now - worker.heard < self._silent_s)

    def _refresh(self, now: float) -> None:
        self._refreshed = now
        self._crowds = {}
        self.soon.expire(now)
        for worker in self.workers.values():
            worker.noticed.expire(now)
            if now - worker.promised_at >= NOTICE_S:
                worker.reported()
            if self._replicas is not None:
                self._look_up(worker, self._replicas)
        known = sorted(worker.measured for worker in self.workers.values() if worker.measured and worker.alive)
        typical = known[len(known) // 2] if known else PROMPT_TOKENS_S
        for worker in self.workers.values():
            measured = worker.measured or typical
            alike = ALIKE * typical <= measured <= typical / ALIKE or now - worker.assigned_at > UNTRIED_S
            worker.prompt_tokens_s = typical if alike else measured

    def _look_up(self, worker: WorkerView, replicas: Replicas) -> None:
        """Take in what a worker's newest summary says of its load."""
        load, heard = replicas.load(worker.name), replicas.heard(worker.name)
        incarnation = replicas.state(worker.name)[0]
        if load is None or heard is None or (load is worker.load and heard == worker.heard):
            return
        self._meet(worker, incarnation)
        worker.heard, worker.load = heard, load
        worker.queued_tokens, worker.queued_at = load.queued_tokens, heard
        worker.reported()
        for router, number in load.accepted:
            worker.sent.arrived(router, number)
            worker.noticed.arrived(router, number)

    def _meet(self, worker: WorkerView, incarnation: int) -> None:
        """A worker says which life of it this is; a new one remembers nothing."""
        if incarnation > worker.incarnation:
            if worker.incarnation:
                self.soon.forget_worker(worker.name)
                worker.sent.clear()
                worker.noticed.clear()
                worker.reported()
                worker.queued_tokens = 0
            worker.incarnation = incarnation
