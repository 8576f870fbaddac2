"""Router: the decision which workers a request goes to.

The cost of a worker is the time until it has computed the prompt: its queue, what it must fetch, what it must compute.
Computing counts more than waiting, because what is computed takes the place of something else in the cache. Nobody gets
much more than the mean (bounded load: Mirrokni, Thorup, Zadimoghaddam, 2018). Where workers cost the same, as all do
on an idle cluster, the prompt's home on the ring takes it, or the next one if that had to compute much more lately than
others, so that prompts that share their beginning meet the same cache. What decides the home is the prompt's anchor:
the shallowest of its prefixes that is not hotter than half a worker can serve. If all of it is hotter, it has several
homes.

The decode worker is one of those with few answers under way, of these the one that holds most of the prompt. What
little it lacks it computes itself, when that costs less time than a hand-over; and what another worker holds is copied
from there when that is faster than computing it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from router.config import RouterConfig
from router.cost import Reach, Usable, handed_over, local, reach, saved, usable
from router.heat import Heat
from router.ring import Ring
from router.view import BOTH, DECODE, PREFILL, Held, Holdings, Ladder, View, WorkerView
from transfer.gossip.frames import Notice
from transfer.messages import Dispatch, Plan, WorkerSpec
from transfer.prefix import PrefixChain

FEW = 16
"""Workers that are all looked at. Of more, it is so many that are likely to be good."""
DEEPEST, HOMES, RANDOM = 8, 4, 2
"""Those: holders of most of the prompt, homes, and any."""
NEAR = 1.02
NEAR_S = 0.002
"""Costs that differ by this factor and time are the same."""
HEAT_KEYS, HEAT_HALF_LIFE_S = 256, 3.0
HOT_SHARE = 0.5
"""Of what a worker can compute: a prefix that is asked for more than that is hot."""
MAX_HEATED = 64
"""Keys of a prompt that are counted as hot or not, and told to other routers."""
SLACK_REQUESTS = 8
"""A worker may have so many prompts more under way than the mean."""
SLACK_ANSWERS = 2
"""A decode worker may have so many answers more under way than the mean, to one whose prompt it holds."""
SOON_S = 2.0
"""How long something is believed beyond the time when a worker's summary should say it."""


class NoWorkers(Exception):
    """No living worker of a role that the request needs."""


@dataclass(slots=True)
class Ticket:
    """A dispatch that the view counts until it is over; `notice` is what other routers are to know of it. Every method
    may be called any number of times."""

    notice: Notice
    _router: Router
    _prefill: WorkerView
    _decode: WorkerView
    _ladder: Ladder
    _at: float
    _computing: bool = True
    _open: bool = True
    _counts: bool = field(init=False)
    """Whether the view counts the prompt among what prefill workers compute. Roles may change meanwhile."""

    def __post_init__(self) -> None:
        self._counts = self._prefill.role != DECODE
        self._count(1)
        self._decode.decodes += 1

    def computed(self) -> None:
        """The prompt is done."""
        if self._computing:
            self._end()
            self._router.believe(self._prefill, self._ladder)

    @property
    def speed(self) -> float:
        """Prompt tokens a second of the worker that computes."""
        return self._prefill.prompt_tokens_s

    def close(self) -> None:
        """The request is over."""
        if self._computing:  # whatever kept it from that
            self._end()
            self._prefill.unassign(self.notice.tokens, self._at)
            self._router.view.soon.forget_soon(self._prefill.name, self._ladder.keys)
        if self._open:
            self._open = False
            self._decode.decodes -= 1

    def _end(self) -> None:
        self._computing = False
        self._count(-1)
        self._prefill.sent.drop(self._router.name, self.notice.number)

    def _count(self, more: int) -> None:
        self._prefill.computing += more
        if self._counts:
            self._router.view.computing += more


class Router:
    """Decides over a `View`; asks nobody. `name` is unique among the routers. Dispatches are numbered from
    `numbers_from` on, which must grow from one life of a router to the next."""

    def __init__(
        self, view: View, config: RouterConfig, name: str = "", random: Random | None = None, numbers_from: int = 0
    ) -> None:
        self.view = view
        self.name = name
        self._config = config
        self._random = random or Random(name)
        self._numbers_from = numbers_from
        self._rings = self._made_rings()
        self._heat = Heat(HEAT_KEYS, HEAT_HALF_LIFE_S)
        self._numbers: dict[str, int] = {}

    def expect(self, specs: Iterable[WorkerSpec]) -> None:
        """Who the workers are from now on, those that leave still in their places on the rings."""
        self.view.expect(specs)
        self._rings = self._made_rings()

    @property
    def homes(self) -> Ring:
        """Where prompts are at home."""
        return self._rings[PREFILL]

    def plan(
        self,
        chain: PrefixChain,
        tokens: int,
        generate: bool,
        avoid: frozenset[str] = frozenset(),
        local_tokens: int | None = None,
    ) -> Plan:
        """Workers for a prompt of `tokens` tokens; `generate` is whether more than one output token is wanted, and
        `avoid` names workers that have just failed or are busy. `local_tokens` stands in for the configuration's.
        Raises NoWorkers."""
        ask = _Ask(chain, Ladder.of(chain), tokens, avoid, self.view.now())
        most = self._config.local_tokens if local_tokens is None else local_tokens
        able = self._but(avoid, PREFILL, BOTH)
        if not self._but(avoid, DECODE):
            able = {name: worker for name, worker in able.items() if worker.role == BOTH}
        if not able:
            lacking = "prefill" if self.view.able(DECODE, BOTH).workers else "decode"
            raise NoWorkers(f"no {lacking} worker is available")
        ask.holdings = self.view.holdings(ask.ladder)
        prefill, way, why = self._prefill_for(ask, able)
        queued = int(prefill.queue(ask.now))
        if prefill.role == BOTH or not generate:
            return self._planned(ask, prefill, None, way, queued, None, why)
        decode = self._decode_for(ask)
        here = self._reach(ask, decode)
        seconds = handed_over(prefill, way, ask.now), local(decode, here, ask.now)
        why["until_decode"] = {prefill.name: round(seconds[0], 4), decode.name: round(seconds[1], 4)}
        if here.missing <= most and seconds[1] <= seconds[0]:
            return self._planned(ask, decode, None, here, int(decode.queue(ask.now)), most, why)
        return self._planned(ask, prefill, decode, way, queued, None, why)

    def dispatch(self, plan: Plan, chain: PrefixChain, tokens: int) -> Ticket:
        """Count a plan as under way. The worker that computes the prompt soon holds it: whoever else begins like it
        should wait there."""
        now, ladder = self.view.now(), Ladder.of(chain)
        prefill, decode = (self.view.workers[name] for name in (plan.prefill, plan.decode or plan.prefill))
        number = self._numbers[prefill.name] = self._numbers.get(prefill.name, self._numbers_from) + 1
        missing = tokens - plan.cached
        prefill.sent.add(self.name, number, missing, math.inf)
        prefill.assign(missing, now)
        until = now + prefill.wait_s(now) + SOON_S
        if _caches(prefill):
            self.view.soon.add(prefill.name, ladder.keys, False, until)
        anchor, _ = self._anchor(ladder, now)
        heated = ladder.keys[: min(anchor + 1, MAX_HEATED)]
        self._heat.add(heated, tokens, prefill.name, now)
        answers = decode.name if decode.role != PREFILL else ""
        if answers:
            decode.promise(missing, now)
        notice = Notice(self.name, prefill.name, number, missing, tokens, answers, b"".join(heated))
        return Ticket(notice, self, prefill, decode, ladder, now)

    def notice(self, notice: Notice) -> None:
        """Another router has sent a worker a prompt."""
        self.view.notice(notice)
        keys = [notice.keys[start : start + 8] for start in range(0, len(notice.keys), 8)][:MAX_HEATED]
        self._heat.add(keys, notice.length, notice.worker, self.view.now())

    def numbered(self, plan: Plan, ticket: Ticket, last: bool) -> Dispatch:
        """What the worker is to know of a dispatch. It may refuse if its queue is much longer than the plan believes,
        unless it is the `last` to be asked."""
        slack = self._config.admission_slack_s * ticket.speed
        return Dispatch(self.name, ticket.notice.number, plan.cached, None if last else plan.queued_tokens + int(slack))

    def holds(self, name: str, chain: PrefixChain) -> None:
        """A worker has all of this."""
        if (worker := self.view.workers.get(name)) is not None:
            self.believe(worker, Ladder.of(chain))

    def believe(self, worker: WorkerView, ladder: Ladder) -> None:
        """The same, until the worker's summary should say it."""
        if _caches(worker):
            self.view.soon.add(worker.name, ladder.keys, True, self.view.now() + SOON_S)

    def lacks(self, name: str, chain: PrefixChain, cached: int) -> None:
        """A worker turned out to have no more than the first `cached` tokens of this."""
        ladder = Ladder.of(chain)
        lost = [key for key, tokens in zip(ladder.keys, ladder.tokens, strict=True) if tokens > cached]
        self.view.soon.forget(name, lost)

    # --- who computes the prompt --------------------------------------------------------------------------------

    def _made_rings(self) -> dict[str, Ring]:
        workers = self.view.workers.values()
        return {role: Ring(one.name for one in workers if one.role in (role, BOTH)) for role in (PREFILL, DECODE)}

    def _but(self, avoid: frozenset[str], *roles: str) -> dict[str, WorkerView]:
        """Workers of some roles that are able, but for those to avoid. If only silent ones are left, those."""
        able = self.view.able(*roles).workers
        if not avoid:
            return able
        left = {name: worker for name, worker in able.items() if name not in avoid}
        return left or {one.name: one for one in self.view.living(*roles) if one.name not in avoid}

    def _prefill_for(self, ask: _Ask, able: dict[str, WorkerView]) -> tuple[WorkerView, Reach, dict[str, object]]:
        index, homes = self._anchor(ask.ladder, ask.now)
        homes = min(len(able), homes)
        anchor = ask.ladder.keys[index] if ask.ladder.keys else ask.chain.root
        order = self._rings[PREFILL].order(anchor, max(homes, FEW if len(able) <= FEW else HOMES), able)
        place = {name: number for number, name in enumerate(order)}
        candidates = self._candidates(ask, able, order)
        if homes > 1:
            candidates = self._spread(candidates, anchor, homes, ask)
        shared = ask.ladder.tokens[index - 1] if index else 0
        costs = {worker.name: self._cost(ask, worker, shared) for worker in candidates}
        allowed = self._within_bounds(candidates, ask.now) or [min(candidates, key=lambda one: one.wait_s(ask.now))]
        best = min(costs[worker.name][0] for worker in allowed)
        near = [worker for worker in allowed if costs[worker.name][0] <= best * NEAR + NEAR_S]
        most = self._config.load_bound * self.view.able(PREFILL, BOTH).assigned
        near = [worker for worker in near if worker.assigned_lately(ask.now) <= most] or near
        shares = self._heat.shares(anchor, ask.now) if homes > 1 else {}
        chosen = min(near, key=lambda one: (place.get(one.name, len(able)) // homes, shares.get(one.name, 0.0)))
        way = costs[chosen.name][1]
        why: dict[str, object] = {"home": order[0], "homes": homes, "anchor": index, "candidates": len(costs)}
        seconds = {"wait": chosen.wait_s(ask.now), "seconds": way.seconds, "cost": costs[chosen.name][0]}
        why |= {"missing": way.missing, **{name: round(value, 4) for name, value in seconds.items()}}
        return chosen, way, why

    def _anchor(self, ladder: Ladder, now: float) -> tuple[int, int]:
        """Which of a prompt's keys decides its home, and how many homes it has."""
        hot = HOT_SHARE * self.view.able(PREFILL, BOTH).prompt_tokens_s
        index, rate = self._heat.anchor(ladder.keys, hot, now)
        return max(0, index), max(1, math.ceil(rate / hot))

    def _candidates(self, ask: _Ask, able: dict[str, WorkerView], order: list[str]) -> list[WorkerView]:
        if len(able) <= FEW:
            return list(able.values())
        deepest = [name for name in ask.holdings.deepest(DEEPEST + len(ask.avoid)) if name in able]
        names = [*deepest, *order, *self._random.sample(list(able), RANDOM)]
        return [able[name] for name in dict.fromkeys(names)]

    def _spread(self, candidates: list[WorkerView], anchor: bytes, homes: int, ask: _Ask) -> list[WorkerView]:
        """Of a prompt whose prefixes are all hot, no worker takes much more than its share."""
        shares = self._heat.shares(anchor, ask.now)
        most = self._config.load_bound * (sum(shares.values()) + ask.tokens) / homes
        within = [worker for worker in candidates if shares.get(worker.name, 0.0) + ask.tokens <= most]
        return within or [min(candidates, key=lambda one: shares.get(one.name, 0.0))]

    def _within_bounds(self, candidates: list[WorkerView], now: float) -> list[WorkerView]:
        """The candidates that have not much more to do than the mean."""
        crowd, bound = self.view.able(PREFILL, BOTH), self._config.load_bound
        wait = crowd.wait_s
        count = (self.view.computing + crowd.noticed + 1) / len(crowd.workers)
        longest = max(bound * wait, wait + self._config.load_slack_s)
        most = max(bound * count, count + SLACK_REQUESTS)
        return [worker for worker in candidates if worker.wait_s(now) <= longest and worker.in_flight + 1 <= most]

    def _cost(self, ask: _Ask, worker: WorkerView, shared: int) -> tuple[float, Reach]:
        """Of the prompt's first `shared` tokens, which are hot, computing costs nothing: every worker will need them.
        One that lacks them would otherwise get no work while those that have them wait for work, too."""
        way = self._reach(ask, worker)
        free_s = max(0, shared - (ask.tokens - way.missing)) / worker.prompt_tokens_s
        return worker.wait_s(ask.now) + self._config.cache_weight * (way.seconds - free_s), way

    # --- who answers --------------------------------------------------------------------------------------------

    def _decode_for(self, ask: _Ask) -> WorkerView:
        """Of those that have room and few answers under way the one that holds most of the prompt, then the one with
        the fewest, then the prompt's home."""
        able = self._but(ask.avoid, DECODE)
        if not able:
            raise NoWorkers("no decode worker is available")
        home = ask.ladder.keys[0] if ask.ladder.keys else ask.chain.root
        order = self._rings[DECODE].order(home, FEW if len(able) <= FEW else HOMES, able)
        candidates = self._candidates(ask, able, order)
        mean = sum(one.answering for one in candidates) / len(candidates)
        most = max(self._config.load_bound * mean, mean + SLACK_ANSWERS)
        place = {name: number for number, name in enumerate(order)}

        def rank(one: WorkerView) -> tuple[bool, bool, float, int, int]:
            held = ask.whole(ask.holdings.soon(one.name))
            full = ask.now < one.full_until or not one.room(ask.tokens - held.device, ask.chain.block_size)
            return (
                full,
                one.answering + 1 > most,
                -saved(one, usable(one, held)),
                one.answering,
                place.get(one.name, len(able)),
            )

        return min(candidates, key=rank)

    # --- how a worker gets at a prompt --------------------------------------------------------------------------

    def _reach(self, ask: _Ask, worker: WorkerView) -> Reach:
        """How a worker gets at a prompt: alone, or with the help of the one that saves most of it."""
        own = ask.whole(ask.holdings.soon(worker.name))
        for other, lent in ask.lenders(self.view):
            if other is not worker and _alike(worker, other):
                return reach(worker, ask.tokens, own, other, lent)
        return reach(worker, ask.tokens, own, None, _NOTHING)

    @staticmethod
    def _planned(
        ask: _Ask,
        worker: WorkerView,
        decode: WorkerView | None,
        way: Reach,
        queued: int,
        new_tokens: int | None,
        why: dict[str, object],
    ) -> Plan:
        held = {worker.name: ask.whole(ask.holdings.soon(worker.name))}
        if way.fetch is not None:
            held[way.fetch.worker] = ask.whole(ask.holdings.there(way.fetch.worker))
        if tiers := {name: one.by_tier for name, one in held.items() if one.device < one.total}:
            why["tiers"] = tiers
        name = decode.name if decode else None
        return Plan(worker.name, name, way.fetch, new_tokens, ask.tokens - way.missing, queued, why)


class _Ask:
    """One prompt that a plan is made for."""

    holdings: Holdings

    def __init__(self, chain: PrefixChain, ladder: Ladder, tokens: int, avoid: frozenset[str], now: float) -> None:
        self.chain = chain
        self.ladder = ladder
        self.tokens = tokens
        self.avoid = avoid
        self.now = now
        self._lenders: list[tuple[WorkerView, Usable]] | None = None

    def whole(self, held: Held) -> Held:
        """Of what a worker holds what is of use; at least one token is left to compute."""
        size = self.chain.block_size
        return held.cut((self.tokens - 1) // size * size)

    def lenders(self, view: View) -> list[tuple[WorkerView, Usable]]:
        """Workers that have most of it by now, and what they lend of it; first those that save most."""
        if self._lenders is None:
            names = self.holdings.deepest(DEEPEST + len(self.avoid))
            some = view.lenders(name for name in names if name not in self.avoid)
            lenders = [(one, usable(one, self.whole(self.holdings.there(one.name)))) for one in some]
            self._lenders = sorted(lenders, key=lambda item: (-saved(*item), item[0].in_flight))
        return self._lenders


_NOTHING = Usable(0, 0.0)


def _caches(worker: WorkerView) -> bool:
    return worker.status is None or worker.status.prefix_cache


def _alike(one: WorkerView, other: WorkerView) -> bool:
    """Whether a block of one worker's KV means the same to another."""
    return one.status is not None and other.status is not None and one.status.fingerprint == other.status.fingerprint
