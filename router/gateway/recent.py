"""Recent: what became of the last requests of a gateway, for people who want to know why one took so long.

Written while a request is served, so it is a few fields and a short list; made into text only when somebody looks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from router.gateway import request_id
from router.gateway.history import History
from transfer.messages import Outcome, Plan

KEPT = 256
"""Requests, running ones and those that are over."""
MAX_EVENTS = 64
"""Of a request; of one that goes from worker to worker without end, the first of them."""
HEAD_BYTES, TAIL_BYTES = 4 * 256, 4 * 64
"""Of a prompt's packed tokens, to show how it begins and ends."""


@dataclass(slots=True)
class Record:
    """One choice of one request. `at` is when it came, in seconds since the epoch; all other times are seconds since
    then. `name` is the client's or the gateway's name for it, `number` this gateway's. `ended` says how: the finish
    reason, "cancelled", or "failed" with an `error`."""

    history: History
    number: int
    name: str
    tenant: str
    prompt_tokens: int
    max_tokens: int
    head: bytes
    tail: bytes
    at: float = field(default_factory=time.time)
    begun: float = field(default_factory=time.monotonic)
    events: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    plan: Plan | None = None
    plans: int = 0
    cached_tokens: int = 0
    loaded: tuple[int, int] = (0, 0)
    output_tokens: int = 0
    first_s: float | None = None
    ended_s: float | None = None
    ended: str = ""
    error: str = ""

    def note(self, what: str, **more: Any) -> None:
        """Something has happened."""
        if len(self.events) < MAX_EVENTS:
            self.events.append((self._now(), what, more))

    def planned(self, plan: Plan) -> None:
        """This is to be done."""
        self.plan = plan
        self.plans += 1
        self.note("planned", plan=plan)

    def called(self, plan: Plan, outcome: Outcome) -> None:
        """The prefill worker has answered: it is done, or it, or the decode worker, is not willing or able."""
        if outcome.status == "handed off":
            self._handed_off(plan)
        elif outcome.status != "done":
            self.note(outcome.status, worker=outcome.worker or plan.prefill)

    def _handed_off(self, plan: Plan) -> None:
        """The worker that computed the prompt is done with it: the one that answers has all of its KV."""
        self.note("transferred", sender=plan.prefill, worker=plan.decode)
        handed = self.history.now().handed
        pair = f"{plan.prefill}>{plan.decode}"
        handed[pair] = handed.get(pair, 0) + 1

    def tokens(self, count: int, cached: int, loaded: tuple[int, int]) -> None:
        """Tokens have come. With the first ones it is known how much of the prompt was `cached`."""
        second = self.history.now()
        second.output_tokens += count
        self.output_tokens += count
        if self.first_s is not None:
            return
        self.first_s = self._now()
        self.cached_tokens, self.loaded = cached, loaded
        second.prompts += 1
        second.prompt_tokens += self.prompt_tokens
        second.cached_tokens += cached
        second.sample(self.first_s)
        self.note("first token", cached_tokens=cached, from_host=loaded[0], from_disk=loaded[1])

    def end(self, how: str, error: str = "") -> None:
        """It is over, unless it has been before."""
        if self.ended:
            return
        second = self.history.now()
        second.failed += how == "failed"
        second.answered += how not in ("failed", "cancelled")
        self.ended, self.error, self.ended_s = how, error, self._now()

    @property
    def stage(self) -> str:
        """What it waits for: planned, computing, answering; or that it is over."""
        if self.ended:
            return "over"
        return "planned" if self.plan is None else "computing" if self.first_s is None else "answering"

    def summary(self) -> dict[str, Any]:
        """A line of a list."""
        plan = self.plan
        names = ("number", "name", "tenant", "at", "prompt_tokens", "max_tokens", "cached_tokens", "output_tokens")
        more = ("first_s", "ended_s", "ended", "error", "plans", "stage")
        told = {name: getattr(self, name) for name in (*names, *more)}
        workers = {"prefill": plan.prefill, "decode": plan.decode} if plan is not None else {}
        return told | {"prefill": None, "decode": None} | workers

    def whole(self) -> dict[str, Any]:
        """Everything, but for the prompt."""
        events = [
            {"s": seconds, "what": what}
            | {name: asdict(one) if isinstance(one, Plan) else one for name, one in more.items()}
            for seconds, what, more in list(self.events)
        ]
        more = {"from_host": self.loaded[0], "from_disk": self.loaded[1], "now_s": self._now()}
        return self.summary() | more | {"events": events}

    def _now(self) -> float:
        return round(time.monotonic() - self.begun, 5)


class Recent:
    """The last requests, and the `history` of all of them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.history = History(clock)
        self._records: deque[Record] = deque(maxlen=KEPT)
        self._numbers = count(1)

    def begin(self, prompt: bytes, tenant: str, max_tokens: int) -> Record:
        """A request with this packed prompt has come."""
        name, head, tail = request_id.current.get(), prompt[:HEAD_BYTES], prompt[-TAIL_BYTES:]
        record = Record(self.history, next(self._numbers), name, tenant, len(prompt) // 4, max_tokens, head, tail)
        self._records.append(record)
        self.history.now().requests += 1
        return record

    def records(self, tenant: str | None) -> list[Record]:
        """The latest first; those of a tenant, or with None all."""
        return [one for one in reversed(self._records) if tenant is None or one.tenant == tenant]

    def find(self, number: int, tenant: str | None) -> Record | None:
        """One of them; None for what is not there, or not the tenant's."""
        return next((one for one in self.records(tenant) if one.number == number), None)
