"""Dispatcher: carries one prompt through the workers and yields its tokens in order, exactly once.

It plans, calls the prefill worker, orders what the workers deliver, plans again when a worker fails (continuing from
the tokens already yielded, at the same sampling positions), and aborts everywhere when its consumer goes away.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from itertools import count

from opentelemetry.trace import Span

from router.admission import Admission
from router.config import GatewayConfig, RouterConfig
from router.gateway import errors, metrics, tracing
from router.gateway.errors import ApiError, failed, invalid, overloaded, unavailable
from router.gateway.recent import Recent, Record
from router.route import NoWorkers, Router, Ticket
from router.view import BOTH, DECODE, PREFILL
from transfer.directory import Directory, PeerDead, PeerError
from transfer.gossip.frames import Notice
from transfer.messages import Delta, Outcome, Plan, Request, SamplingParams, TokenLogprobs, pack_tokens
from transfer.prefix import PrefixChain
from transfer.tracing import carried

_log = logging.getLogger(__name__)
ABORT_TIMEOUT_S = 5.0
MAX_FULL = 8
"""Decode workers without a place that a request is turned away from, before its client hears of it."""
MAX_MOVES = 64
"""Workers that may leave under a request."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt with its prefix keys, and how it is to be served (see `Request`): within `timeout_s` seconds,
    if that is less than what the gateway gives it. `plans` are those that were made for it, the last one is carried
    out."""

    tokens: bytes
    chain: PrefixChain
    priority: int = 0
    keep_s: float = 0.0
    tenant: str = ""
    weight: float = 1.0
    salt: bytes = b""
    timeout_s: float | None = None
    embed: bool = False
    plans: list[Plan] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens that follow those of the output before, with what is told about them (see `Delta`); `finish_reason` on the
    last one. All have the `cached_tokens` of the first, and how many of them were `loaded`."""

    tokens: tuple[int, ...]
    cached_tokens: int
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: bytes = b""
    loaded: tuple[int, int] = (0, 0)


class AttemptFailed(Exception):
    """A worker failed under the request, is too busy for it, or leaves; another plan may succeed."""

    def __init__(
        self, reason: str, workers: frozenset[str] = frozenset(), busy: bool = False, moved: bool = False
    ) -> None:
        super().__init__(reason)
        self.workers = workers
        self.busy = busy
        self.moved = moved


@dataclass(slots=True)
class _Attempt:
    """One plan being carried out. The queue gets deltas and, at most once, what went wrong."""

    request: Request
    plan: Plan
    ticket: Ticket
    span: Span
    record: Record
    queue: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)
    begun: bool = False
    finished: bool = False
    handed_off: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def answers(self) -> str:
        """The worker that generates the answer."""
        return self.plan.decode or self.plan.prefill

    @property
    def workers(self) -> frozenset[str]:
        return frozenset(name for name in (self.plan.prefill, self.plan.decode) if name is not None)


class Dispatcher:
    """All requests of one gateway; `name` is what workers deliver to. `notify` is told of every dispatch, and `recent`
    has what became of the last ones."""

    def __init__(
        self,
        name: str,
        router: Router,
        directory: Directory,
        router_config: RouterConfig,
        config: GatewayConfig,
        notify: Callable[[Notice], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._router = router
        self._directory = directory
        self._router_config = router_config
        self._notify = notify
        self._config = config
        self._admission = Admission(config.first_token_target_s)
        self._attempts: dict[str, _Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.recent = Recent()
        self.in_flight = 0

    def deliver(self, deltas: list[Delta]) -> None:
        """Workers bring tokens; those of requests that are over are dropped."""
        for delta in deltas:
            if (attempt := self._attempts.get(delta.request_id)) is not None:
                attempt.queue.put_nowait(delta)

    def worker_died(self, name: str) -> None:
        """Fail what this worker still had a part in."""
        for attempt in self._attempts.values():
            if name in attempt.workers and not (attempt.handed_off and name == attempt.plan.prefill):
                attempt.queue.put_nowait(AttemptFailed(f"{name} died", frozenset([name])))

    def shut_down(self) -> None:
        """End every request that is under way with an error."""
        for attempt in self._attempts.values():
            attempt.queue.put_nowait(unavailable("the gateway is shutting down"))

    def admit(self, tenant: str, weight: float, priority: int) -> None:
        """Raises ApiError 429 for a new request whose answer would begin too late."""
        refusal = self._admission.check(tenant, weight, priority)
        if refusal is not None:
            metrics.refused.add(1, {"priority": "low" if priority < 0 else "normal"})
            raise overloaded(
                f"the answer would begin in about {refusal.expected_s:.1f} s, {refusal.allowed_s:.1f} s are allowed at "
                f"priority {priority} (gateway.first_token_target_s: {self._config.first_token_target_s:g})",
                refusal.again_s,
            )

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, record: Record | None = None
    ) -> AsyncGenerator[Output, None]:
        """The request's output. Close the iterator to abort. What happens is written into the `record`. Raises
        ApiError: 429, 503, 504 behind its deadline, 400 where no worker can answer it, or 500 when it cannot be
        completed."""
        allowed = self._config.request_timeout_s
        allowed = allowed if prompt.timeout_s is None else min(allowed, prompt.timeout_s)
        deadline = time.monotonic() + allowed
        sent: list[int] = []
        first: Delta | None = None
        avoid: frozenset[str] = frozenset()
        wait = self._admission.wait(prompt.tenant, prompt.weight, prompt.priority)
        record = record or self.recent.begin(prompt.tokens, prompt.tenant, sampling.max_tokens)
        self.in_flight += 1
        try:
            left, full, moves = self._router_config.attempts, MAX_FULL, MAX_MOVES
            for number in count(1):
                with tracing.attempt(number) as span:
                    attempt = self._start(prompt, sampling, sent, deadline, avoid, span, record)
                    try:
                        async for delta in self._ordered(attempt, deadline, allowed):
                            first = first or delta
                            if not attempt.begun:
                                self._computed(attempt, prompt.chain, delta.cached_tokens)
                            sent.extend(delta.tokens)
                            record.tokens(len(delta.tokens), delta.cached_tokens, delta.loaded)
                            attempt.finished = delta.finish_reason is not None
                            if attempt.finished:
                                self._holds(attempt, prompt, sent)
                            if wait.open and (attempt.finished or len(sent) > 1):
                                wait.answered()  # the first token alone does not say that there is room to decode
                            yield _output(delta, first)
                            if attempt.finished:
                                return
                    except AttemptFailed as error:
                        tracing.failed(span, str(error), error.moved)
                        record.note("lost", why=str(error))
                        if error.moved and moves:
                            moves -= 1
                            if sent and (attempt.handed_off or attempt.plan.decode is None):
                                self._holds(attempt, prompt, sent)
                            continue
                        _log.warning("request %s: %s", attempt.request.request_id, error)
                        left, full = (left, full - 1) if error.busy else (left - 1, full)
                        if not full or (error.busy and error.workers <= avoid):  # it was asked again
                            raise overloaded(str(error)) from None
                        if not left:
                            raise failed(f"the request could not be completed: {error}") from None
                        avoid |= error.workers
                    finally:
                        self._end(attempt)
        except ApiError as error:
            record.end("failed", error.message)
            raise
        finally:
            wait.left()
            self.in_flight -= 1
            record.end("cancelled")  # unless whoever wanted it has all of it

    def _start(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        sent: list[int],
        deadline: float,
        avoid: frozenset[str],
        span: Span,
        record: Record,
    ) -> _Attempt:
        if sent:  # what was asked about the prompt has been told
            sampling = replace(sampling, max_tokens=sampling.max_tokens - len(sent), prompt_logprobs=None)
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt=prompt.tokens + pack_tokens(sent),
            sampling=sampling,
            gateway=self._name,
            timeout_s=max(0.0, deadline - time.monotonic()),
            salt=prompt.salt,
            priority=prompt.priority,
            keep_s=prompt.keep_s,
            tenant=prompt.tenant,
            weight=prompt.weight,
            answered=len(sent),
            embed=prompt.embed,
            traceparent=carried(span),
        )
        begun = time.time_ns()
        plan, avoid = self._plan(prompt, request, avoid)
        tracing.routed(span, request.request_id, begun, plan)
        attempt = _Attempt(request, plan, self._dispatch(plan, prompt, request), span, record)
        record.planned(plan)
        self._attempts[request.request_id] = attempt
        self._spawn(self._carry_out(attempt, prompt, avoid))
        return attempt

    def _plan(self, prompt: Prompt, request: Request, avoid: frozenset[str]) -> tuple[Plan, frozenset[str]]:
        """A plan without the workers of attempts that failed, and which of them it is without. Of a pair one may be at
        fault alone, and the view may not know yet that it is dead: so only where a role has no others left, those of
        this role are asked again."""
        generate = request.sampling.max_tokens > 1
        workers = self._router.view.workers
        decode = frozenset(name for name in avoid if name in workers and workers[name].role == DECODE)
        reason = ""
        for some in dict.fromkeys((avoid, decode, avoid - decode, frozenset[str]())):
            try:
                return self._router.plan(prompt.chain, request.prompt_tokens, generate, some), some
            except NoWorkers as error:
                reason = str(error)
        raise unavailable(reason)

    async def _carry_out(self, attempt: _Attempt, prompt: Prompt, avoid: frozenset[str]) -> None:
        """Whatever goes wrong, who waits for the answer hears of it."""
        try:
            await self._run(attempt, prompt, avoid)
        except Exception as error:
            attempt.queue.put_nowait(AttemptFailed(f"internal error: {type(error).__name__}", attempt.workers))
            raise

    async def _run(self, attempt: _Attempt, prompt: Prompt, avoid: frozenset[str]) -> None:
        """Call prefill workers until one takes the request, and watch over its part."""
        request, failing = attempt.request, avoid
        willing: frozenset[str] = frozenset()  # refused because they had more to do than was believed
        left, local_tokens = self._router_config.candidates, None
        while True:
            plan = attempt.plan
            dispatch = self._router.numbered(plan, attempt.ticket, last=left == 1)
            name, arguments = plan.prefill, (request, plan.decode, plan.fetch, plan.new_tokens, dispatch)
            timeout = request.timeout_s + ABORT_TIMEOUT_S
            attempt.record.note("sent", worker=name)
            try:
                outcome: Outcome = await self._directory.call(name, "generate", *arguments, timeout=timeout)
            except PeerDead:
                self._router.view.mark_dead(name)
                self.worker_died(name)
                return
            except PeerError as error:
                attempt.queue.put_nowait(AttemptFailed(str(error), frozenset([name])))
                return
            if outcome.status in ("done", "handed off"):
                attempt.ticket.computed()
            attempt.handed_off = outcome.status == "handed off"
            attempt.record.called(plan, outcome)
            if request.request_id not in self._attempts:
                # The abort may have come before the call.
                await asyncio.gather(*(self._abort(one, request.request_id) for one in attempt.workers))
                return
            if outcome.status in ("refused", "failed", "aborted"):
                attempt.queue.put_nowait(_problem(outcome, attempt.workers))
            if outcome.status == "handed off" and plan.decode is not None:
                self._router.holds(plan.decode, prompt.chain)
            if outcome.status == "stale":
                # Not a candidate that was busy: it was wrong to ask, and no decode worker is asked so again.
                self._router.lacks(name, prompt.chain, 0)
                local_tokens = 0
            elif outcome.status != "busy":
                return
            elif outcome.worker:
                # The decode worker. This request's transfer is over, so another one is for another attempt.
                self._router.view.full(outcome.worker)
                full = f"{outcome.worker} is busy with {outcome.queued} requests queued"
                attempt.queue.put_nowait(AttemptFailed(full, frozenset([outcome.worker]), busy=True))
                return
            else:
                left, avoid = left - 1, avoid | {name}
                self._router.view.queue_is(name, outcome.queued_tokens, dispatch.router, dispatch.number)
                more = dispatch.most_queued is not None and outcome.queued_tokens > dispatch.most_queued
                willing = willing | {name} if more else willing - {name}
            attempt.ticket.close()
            if left > 0 and self._again(attempt, prompt, avoid, local_tokens):
                continue
            # Of those the least busy takes it, unless it is at its bound; then the next one.
            others = frozenset(one.name for one in self._router.view.living(PREFILL, BOTH)) - willing
            if willing and self._again(attempt, prompt, failing | others, local_tokens):
                left = 1
                continue
            lost = AttemptFailed(f"{name} does not have what was believed", frozenset())
            attempt.queue.put_nowait(self._all_busy(outcome) if outcome.status == "busy" else lost)
            return

    def _all_busy(self, last: Outcome) -> ApiError:
        """What a client hears where everybody is busy, and when it should try again."""
        view = self._router.view
        waits = [one.wait_s(view.now()) for one in view.living(PREFILL, BOTH)]
        full = f"every candidate is busy; the last had {last.queued} requests queued"
        return overloaded(full, min(waits, default=0.0))

    def _again(self, attempt: _Attempt, prompt: Prompt, avoid: frozenset[str], local_tokens: int | None) -> bool:
        """Plan for other workers; False when there are none."""
        tokens, generate = attempt.request.prompt_tokens, attempt.request.sampling.max_tokens > 1
        begun = time.time_ns()
        try:
            attempt.plan = self._router.plan(prompt.chain, tokens, generate, avoid, local_tokens)
        except NoWorkers:
            return False
        tracing.routed(attempt.span, attempt.request.request_id, begun, attempt.plan)
        attempt.ticket, attempt.begun = self._dispatch(attempt.plan, prompt, attempt.request), False
        attempt.record.planned(attempt.plan)
        return True

    def _dispatch(self, plan: Plan, prompt: Prompt, request: Request) -> Ticket:
        """Count a plan, here and at the other routers."""
        ticket = self._router.dispatch(plan, prompt.chain, request.prompt_tokens)
        self._notify(ticket.notice)
        _log.debug("request %s: %s", request.request_id, plan)
        prompt.plans.append(plan)
        return ticket

    def _holds(self, attempt: _Attempt, prompt: Prompt, sent: list[int]) -> None:
        """The worker that answers has all of a request cached, but for the last token's KV, which is not computed."""
        known = prompt.tokens + pack_tokens(sent[:-1])
        self._router.holds(attempt.answers, prompt.chain.extended(known))

    def _computed(self, attempt: _Attempt, chain: PrefixChain, cached: int) -> None:
        """The first token has come: the prompt is computed, and `cached` says how much of it did not have to be."""
        attempt.begun = True
        plan = attempt.plan
        metrics.prediction_error.record(abs(plan.cached - cached))
        if cached < plan.cached:
            self._router.lacks(plan.fetch.worker if plan.fetch else plan.prefill, chain, cached)
        attempt.ticket.computed()

    async def _ordered(self, attempt: _Attempt, deadline: float, allowed: float) -> AsyncGenerator[Delta, None]:
        """Deltas in order and without repetition, however prefill and decode worker raced. Raises AttemptFailed."""
        waiting: dict[int, Delta] = {}
        given: list[int] = []
        late = errors.deadline(f"no complete answer within {allowed:g} s")
        # Not `wait_for`: before Python 3.12 it can swallow the cancellation of a client that leaves.
        timer = asyncio.get_running_loop().call_later(deadline - time.monotonic(), attempt.queue.put_nowait, late)
        attempt.timer = timer
        while True:
            item = await attempt.queue.get()
            if isinstance(item, Exception):
                raise item
            if item.error is not None and item.refused:
                raise invalid(item.error)
            if item.error is not None:
                raise AttemptFailed(item.error, attempt.workers, moved=item.moved)
            again = given[item.start : item.start + len(item.tokens)]
            if again and tuple(again) != item.tokens:
                # Prefill and decode worker both sampled this token and rounding made them differ. Whoever continues
                # must continue from what the client has seen.
                raise AttemptFailed("two workers disagree about a token", frozenset())
            waiting[item.start] = item
            while (delta := waiting.pop(len(given), None)) is not None:
                given.extend(delta.tokens)
                yield delta

    def _end(self, attempt: _Attempt) -> None:
        """An attempt is over: stop counting it, and stop whoever still works on it."""
        del self._attempts[attempt.request.request_id]
        attempt.ticket.close()
        if attempt.timer is not None:
            attempt.timer.cancel()
        if not attempt.finished:
            for name in attempt.workers:
                self._spawn(self._abort(name, attempt.request.request_id))

    async def _abort(self, worker: str, request_id: str) -> None:
        try:
            await self._directory.call(worker, "abort", request_id, timeout=ABORT_TIMEOUT_S)
        except PeerError as error:
            _log.info("request %s: abort: %s", request_id, error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s: background task failed", self._name, exc_info=error)


def _output(delta: Delta, first: Delta) -> Output:
    told = (delta.logprobs, delta.prompt_logprobs, delta.embedding)
    return Output(delta.tokens, first.cached_tokens, delta.finish_reason, *told, first.loaded)


def _problem(outcome: Outcome, workers: frozenset[str]) -> Exception:
    if outcome.status == "refused":
        return invalid(f"no worker can answer this: {outcome.error}")
    return AttemptFailed(outcome.error or outcome.status, workers)
