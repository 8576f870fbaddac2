"""Planner: which workers should be prefill and which decode, and how many there should be. A pure state machine.

Every `planner.interval_s` it is shown the workers and what has come in, and it answers with the number of workers of
each role that the latency targets need and with at most one change. A role gets a worker soon: when two observations in
a row want one more. It gives one up late: when for `planner.remove_after_s` it could have done 15 % more without it.
So where the load stays the same, nobody moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from cluster.sizing import Gaps, Rates, prefill_workers

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")
OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
ADD_AFTER = 2
"""Observations in a row that want one more worker before there is one."""
ROOM = 1.15
"""A worker is left over only where the others could do so many times what there is to do."""
REGRET, MAX_PATIENCE = 4, 8
"""A role that wants a worker within so many times what it waited before it gave one up waits twice as long before it
gives up the next, at most so many times `planner.remove_after_s`."""
BACKLOG = 0.5
"""Prompts may wait for this share of the first token's target before they count beside what comes in."""
SOON, LASTING = 8, 20
"""What a role wants at once follows the mean of about so many observations, what it wants for long that of so many."""


class PlannerConfig(BaseModel):
    """How the roles and the number of workers follow the load."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["off", "roles", "scale"] = Field(
        "off", description="roles: workers change their roles; scale: and workers are started and stopped"
    )
    first_token_s: float = Field(
        2.0, gt=0, allow_inf_nan=False, description="target: seconds until a prompt is computed"
    )
    token_gap_s: float = Field(
        0.1, gt=0, allow_inf_nan=False, description="target: seconds between two tokens of an answer"
    )
    interval_s: float = Field(
        15.0, gt=0, allow_inf_nan=False, description="seconds from one look at the load to the next"
    )
    min_workers: int = Field(2, ge=2, description="`scale` stops no worker where there are so few")
    max_workers: int = Field(16, ge=2, description="`scale` starts no worker where there are so many")
    remove_after_s: float = Field(
        300.0,
        ge=0,
        allow_inf_nan=False,
        description="a role has had a worker too many for so long before it gives it up",
    )
    hold_s: float = Field(
        600.0, ge=0, allow_inf_nan=False, description="a worker keeps a role that the planner gave it for so long"
    )

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers is {self.min_workers} and max_workers {self.max_workers}: must not be less")
        return self


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker as it is. `role` is the one that it has or, while it is not `ready`, is to have: it starts, or finishes
    what it had in another role. `queued_tokens`: of prompts that wait. `prompt_tokens_s`: measured speed. `running`:
    answers in its last step, and `gap_s`: seconds between their tokens then. Speed and gap are 0 while unknown."""

    name: str
    role: Role
    ready: bool = True
    queued_tokens: int = 0
    prompt_tokens_s: float = 0.0
    running: int = 0
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """All workers with one role, but for those that are being stopped, and what has come in since the last observation:
    requests, and tokens of their prompts that no cache had."""

    workers: tuple[Seen, ...]
    prompt_tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class Move:
    """A worker finishes what it has and takes the other role."""

    worker: str
    role: Role


@dataclass(frozen=True, slots=True)
class Add:
    """A worker is started."""

    role: Role


@dataclass(frozen=True, slots=True)
class Remove:
    """A worker finishes what it has and stops."""

    worker: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How many workers of each role are needed, the next step there, if any is possible and due, and one sentence that
    says why, or why not."""

    prefill: int
    decode: int
    change: Move | Add | Remove | None
    why: str


@dataclass(frozen=True, slots=True)
class _Need:
    """How many workers a role needs for what there is to do now, for what there is lastingly, and for `ROOM` times
    that; and what it is."""

    workers: int
    lasting: int
    with_room: int
    what: str


class _Streaks:
    """Of one role: for how many observations it has wanted more, since when it could have done with less, and for how
    long it has to before it gives a worker up. That time doubles each time it wants one again soon after."""

    def __init__(self, remove_after_s: float) -> None:
        self.short = 0
        self._over_since: float | None = None
        self._ready = 0
        self._remove_after_s = self._patience_s = remove_after_s
        self._gave_at = -inf

    def see(self, need: _Need, workers: list[Seen], now: float) -> None:
        self.short = self.short + 1 if need.workers > len(workers) else 0
        ready = sum(one.ready for one in workers)
        if ready != self._ready or need.with_room >= ready:
            self._over_since = None
        if need.with_room < ready and self._over_since is None:
            self._over_since = now
        self._ready = ready

    def over(self, now: float) -> bool:
        """Whether it has been able to do with less for long enough."""
        return self._over_since is not None and now - self._over_since >= self._patience_s

    def gave(self, now: float) -> None:
        self._gave_at = now

    def took(self, now: float) -> None:
        regret = now - self._gave_at < REGRET * self._patience_s
        self._patience_s = (
            min(2 * self._patience_s, MAX_PATIENCE * self._remove_after_s) if regret else self._remove_after_s
        )


class Planner:
    """Makes plans for a cluster's workers with one role. Not for several threads."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._seen_at: float | None = None
        self._soon, self._lasting = Rates(SOON), Rates(LASTING)
        self._gaps = Gaps()
        self._streaks: dict[Role, _Streaks] = {role: _Streaks(config.remove_after_s) for role in ROLES}
        self._held: dict[str, float] = {}  # a worker that was moved, until when it stays

    def plan(self, seen: Observation, now: float) -> Plan:
        """What is wanted after one more observation. `now` is in seconds and grows."""
        have: dict[Role, list[Seen]] = {role: [one for one in seen.workers if one.role == role] for role in ROLES}
        if self._config.mode == "off" or self._seen_at is None or now <= self._seen_at:
            why = "planner.mode is off" if self._config.mode == "off" else "load is measured from now on"
            self._seen_at = now
            return Plan(len(have["prefill"]), len(have["decode"]), None, why)
        self._measure(seen, now - self._seen_at)
        self._seen_at = now
        needs: dict[Role, _Need] = {
            "prefill": self._prefill(seen, have["prefill"]),
            "decode": self._decode(have["decode"]),
        }
        for role in ROLES:
            self._streaks[role].see(needs[role], have[role], now)
        self._held = {name: until for name, until in self._held.items() if until > now}
        change, why = self._change(needs, have, now)
        self._note(change, seen, now)
        return Plan(needs["prefill"].workers, needs["decode"].workers, change, why)

    def _note(self, change: Move | Add | Remove | None, seen: Observation, now: float) -> None:
        """Remember who gave a worker up and who took one."""
        if isinstance(change, Move | Remove):
            self._streaks[next(one.role for one in seen.workers if one.name == change.worker)].gave(now)
        if isinstance(change, Move | Add):
            self._streaks[change.role].took(now)
        if isinstance(change, Move):
            self._held[change.worker] = now + self._config.hold_s

    def _measure(self, seen: Observation, seconds: float) -> None:
        generating = [one for one in seen.workers if one.running and one.gap_s]
        answer_tokens_s = sum(one.running / one.gap_s for one in generating)
        for rates in (self._soon, self._lasting):
            rates.add(seen.prompt_tokens / seconds, seen.requests / seconds, answer_tokens_s)
        self._gaps.forget()
        for one in generating:
            self._gaps.add(one.running, one.gap_s)

    def _prefill(self, seen: Observation, have: list[Seen]) -> _Need:
        """For what comes in, and at once for what waits too long already: it is to be gone at the next observation. A
        worker that is on its way is there for what waits."""
        queued = sum(one.queued_tokens for one in seen.workers)
        soon, lasting, target = self._soon.prompt_tokens, self._lasting.prompt_tokens, self._config.first_token_s
        what = f"{soon:.0f} prompt tokens/s and {queued} queued"
        speeds = [one.prompt_tokens_s for one in have if one.prompt_tokens_s]
        if not queued and not soon:
            return _Need(1, 1, 1, what)
        if not speeds or not lasting or not self._lasting.requests:
            there = max(1, len(have))
            return _Need(there, there, there, f"{what}, speed not known yet")
        speed = sum(speeds) / len(speeds)
        late = max(0.0, queued - BACKLOG * target * speed * len(have)) if all(one.ready for one in have) else 0.0
        tokens_s = soon + late / self._config.interval_s, lasting, ROOM * lasting
        prompt, most = lasting / self._lasting.requests, max(self._config.max_workers, len(seen.workers)) + 1
        now, then, roomy = (prefill_workers(load, speed, prompt, target, most) for load in tokens_s)
        return _Need(now, then, roomy, f"{what} at {speed:.0f} tokens/s within {target:g} s")

    def _decode(self, have: list[Seen]) -> _Need:
        soon, lasting, target = self._soon.answer_tokens, self._lasting.answer_tokens, self._config.token_gap_s
        what = f"{soon:.0f} answer tokens/s within {target:g} s each"
        if not lasting:
            return _Need(1, 1, 1, what)
        line, there = self._gaps.line, max(1, len(have))
        if line is None:
            late = any(one.gap_s > target for one in have)
            return _Need(there + late, there, there, f"{what}, growth with answers not known yet")
        if line.answers(target) < 1:
            return _Need(there, there, there, f"{what}, one takes {line.alone_s:.2g} s alone")
        now, then, roomy = (max(1, ceil(line.workers(load, target))) for load in (soon, lasting, ROOM * lasting))
        return _Need(now, then, roomy, what)

    def _change(
        self, needs: dict[Role, _Need], have: dict[Role, list[Seen]], now: float
    ) -> tuple[Move | Add | Remove | None, str]:
        """The one change that is due, and why, or why there is none."""
        total = sum(map(len, have.values()))
        scale = self._config.mode == "scale"
        if (short := self._shortest(needs, have)) is not None:
            return self._help(short, needs, have, now)
        if scale and total < self._config.min_workers:
            role = max(ROLES, key=lambda role: needs[role].workers - len(have[role]))
            return Add(role), f"one more {role} worker; min_workers is {self._config.min_workers}, {total} there"
        if scale and total > self._config.min_workers:
            for role in ROLES:
                giver = self._spare(role, needs, have, now)
                if giver is not None:
                    return Remove(giver), f"{giver} stops; {_wanted(role, needs, have)}"
        return None, "; ".join(_wanted(role, needs, have) for role in ROLES)

    def _shortest(self, needs: dict[Role, _Need], have: dict[Role, list[Seen]]) -> Role | None:
        """Of the roles that have been short for long enough the one that lacks the greatest part. Nobody at all is
        worse than too few."""
        short = [role for role in ROLES if self._streaks[role].short >= ADD_AFTER]
        return max(short, key=lambda role: needs[role].workers / len(have[role]) if have[role] else inf, default=None)

    def _help(
        self, role: Role, needs: dict[Role, _Need], have: dict[Role, list[Seen]], now: float
    ) -> tuple[Move | Add | None, str]:
        """One more worker for a role: one that the other can do without; or a new one; or, where there can be none, one
        that the other can do without for now, if this role lacks one lastingly."""
        other, wanted = OTHER[role], _wanted(role, needs, have)
        giver = self._spare(other, needs, have, now)
        scale = self._config.mode == "scale"
        if giver is None and scale and sum(map(len, have.values())) < self._config.max_workers:
            return Add(role), f"one more {role} worker; {wanted}"
        if giver is None and needs[role].lasting > len(have[role]):
            giver = self._giver(other, needs[other].lasting if have[role] else 1, have)
        if giver is not None:
            return Move(giver, role), f"{giver} becomes {role}; {wanted}"
        limit = f"max_workers is {self._config.max_workers}, " if scale else ""
        return None, f"{limit}no {other} worker to spare; {wanted}"

    def _spare(self, role: Role, needs: dict[Role, _Need], have: dict[Role, list[Seen]], now: float) -> str | None:
        """A worker that its role has been able to do without for long enough."""
        return self._giver(role, needs[role].workers, have) if self._streaks[role].over(now) else None

    def _giver(self, role: Role, need: int, have: dict[Role, list[Seen]]) -> str | None:
        """The worker that has the least to finish, of a role that has more workers than it needs."""
        ready = [one for one in have[role] if one.ready]
        free = [one for one in ready if one.name not in self._held]
        if len(ready) <= max(1, need) or not free:
            return None
        return min(free, key=lambda one: (one.queued_tokens, one.running, one.name)).name


def _wanted(role: Role, needs: dict[Role, _Need], have: dict[Role, list[Seen]]) -> str:
    return f"{role} needs {needs[role].workers}, has {len(have[role])}: {needs[role].what}"
