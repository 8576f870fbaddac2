"""Admission over a simulated cluster: prompts come at random, and some servers answer them in turn."""

import heapq
import random
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import httpx
import pytest

from router.admission import FEW, HEADROOM, SPAN_S, Admission, Wait
from router.config import GatewayConfig
from router.gateway.dispatch import Dispatcher
from router.gateway.errors import ApiError
from router.gateway.text import Text
from tests.router.serving import MODEL, Played, application
from tests.router.test_dispatch import told
from transfer.messages import Delta, Outcome, Request

TARGET_S = 2.0
SERVERS, SERVICE_S = 4, 0.2
CAPACITY = SERVERS / SERVICE_S
COLD_S = 5.0
"""Until the pace is known, more or fewer may be admitted than should be."""
SEEDS = range(4)


@dataclass(frozen=True)
class Flow:
    """Prompts that come at random, so many a second, from one second to another."""

    rate: float
    begin: float = 0.0
    end: float = 60.0
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True)
class Asked:
    """One prompt: when it came, and when it was answered; if refused, when to come again."""

    flow: Flow
    at: float
    answered: float | None = None
    again_s: float | None = None

    @property
    def in_time(self) -> bool:
        return self.answered is not None and self.answered - self.at <= TARGET_S


@dataclass
class Cluster:
    """Servers that take the next prompt by priority, then of the tenant that was served least, then by age; behind one
    gateway."""

    seed: int
    speed: float = 1.0
    target_s: float | None = TARGET_S
    now: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    longest: int = 0

    def __post_init__(self) -> None:
        self.admission = Admission(self.target_s, lambda: self.now)
        self._draw = random.Random(self.seed)
        self._queue: list[tuple[Flow, float, Wait]] = []
        self._free = SERVERS
        self._served: defaultdict[str, float] = defaultdict(float)

    def run(self, *flows: Flow) -> "Cluster":
        """All that comes until the last flow ends, and until it is answered."""
        events: list[tuple[float, int, Any]] = []
        for flow in flows:
            at = flow.begin
            while (at := at + self._draw.expovariate(flow.rate)) < flow.end:
                heapq.heappush(events, (at, len(events), flow))
        number = len(events)
        while events:
            self.now, _, what = heapq.heappop(events)
            if isinstance(what, Flow):
                self._come(what)
            else:
                self._answer(*what)
            while self._free and self._queue:
                self._free -= 1
                until = self.now + self._draw.expovariate(1 / SERVICE_S) / self.speed
                heapq.heappush(events, (until, number := number + 1, self._next()))
            self.longest = max(self.longest, len(self._queue))
        return self

    def _come(self, flow: Flow) -> None:
        refusal = self.admission.check(flow.tenant, 1.0, flow.priority)
        if refusal is not None:
            self.asked.append(Asked(flow, self.now, again_s=refusal.again_s))
        else:
            self._queue.append((flow, self.now, self.admission.wait(flow.tenant, 1.0, flow.priority)))

    def _next(self) -> tuple[Flow, float, Wait]:
        one = min(self._queue, key=lambda one: (-one[0].priority, self._served[one[0].tenant], one[1]))
        self._queue.remove(one)
        tenant = one[0].tenant
        least = min((self._served[flow.tenant] for flow, *_ in self._queue), default=0.0)
        self._served[tenant] = max(self._served[tenant], least) + 1
        return one

    def _answer(self, flow: Flow, at: float, wait: Wait) -> None:
        self._free += 1
        wait.answered()
        self.asked.append(Asked(flow, at, answered=self.now))

    # --- what came of it ---

    def goodput(self, begin: float = 0.0, end: float = 60.0) -> float:
        """Prompts a second that were answered in time."""
        return sum(one.in_time for one in self.asked if begin <= one.at < end) / (end - begin)

    def waits(self, begin: float = 0.0, tenant: str = "") -> list[float]:
        """Of the answered ones that came later than `begin`, in order."""
        some = [one for one in self.asked if one.at >= begin and one.flow.tenant == tenant]
        return sorted(one.answered - one.at for one in some if one.answered is not None)

    def refused(self, begin: float = 0.0, end: float = 1e9, **of: Any) -> float:
        """The share of a flow that was refused."""
        some = [one for one in self.asked if begin <= one.at < end]
        some = [one for one in some if all(getattr(one.flow, name) == value for name, value in of.items())]
        return mean(one.answered is None for one in some)


def percentile(values: list[float], share: float) -> float:
    return values[int(share * (len(values) - 1))]


@pytest.mark.parametrize("seed", SEEDS)
def test_below_its_capacity_nobody_is_refused(seed: int) -> None:
    cluster = Cluster(seed).run(Flow(0.5 * CAPACITY))
    assert cluster.refused() == 0
    assert len(cluster.asked) > 500


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("load", [1, 2, 5, 20])
def test_admitted_prompts_are_answered_in_time_and_the_cluster_stays_busy(seed: int, load: int) -> None:
    cluster = Cluster(seed).run(Flow(load * CAPACITY))
    waits = cluster.waits(COLD_S)
    assert percentile(waits, 0.5) <= 0.8 * TARGET_S
    assert percentile(waits, 0.9) <= 1.1 * TARGET_S
    assert waits[-1] <= 2 * TARGET_S
    assert cluster.goodput() >= 0.85 * Cluster(seed).run(Flow(CAPACITY)).goodput()
    assert cluster.longest <= 2 * TARGET_S * CAPACITY


def test_without_a_target_all_are_admitted_and_hardly_any_is_in_time() -> None:
    cluster = Cluster(0, target_s=None).run(Flow(2 * CAPACITY))
    assert cluster.refused() == 0
    assert cluster.goodput() < 0.2 * CAPACITY


@pytest.mark.parametrize("seed", SEEDS)
def test_after_an_overload_all_is_as_before(seed: int) -> None:
    calm = Flow(0.5 * CAPACITY, end=60)
    cluster = Cluster(seed).run(calm, Flow(5 * CAPACITY, begin=20, end=40))
    assert cluster.refused(0, 20) == 0
    assert cluster.refused(20, 40) > 0.5
    assert cluster.refused(42, 60) == 0
    assert all(one.in_time for one in cluster.asked if one.at >= 42)


def test_who_is_refused_is_told_when_there_is_room_again() -> None:
    """Ten a second are answered, and two thirds of 4.5 seconds are allowed."""
    now = [0.0]
    admission = Admission(4.5, lambda: now[0])
    waits = [admission.wait("", 1, 0) for _ in range(200)]

    def answer(seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            now[0] += 0.1
            waits.pop().answered()

    answer(10)
    refusal, low = admission.check("", 1, 0), admission.check("", 1, -1)
    assert refusal is not None
    assert low is not None
    assert (refusal.expected_s, refusal.allowed_s, refusal.again_s) == pytest.approx((10, 3, 7))
    assert low.again_s == pytest.approx(8.5)
    answer(6.9)
    assert admission.check("", 1, 0) is not None
    answer(0.2)
    assert admission.check("", 1, 0) is None
    assert admission.check("", 1, -1) is not None
    answer(1.5)
    assert admission.check("", 1, -1) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_low_priorities_are_refused_first(seed: int) -> None:
    """The others hardly notice them, and they get what is left."""
    batch, chat = Flow(5 * CAPACITY, priority=-1), Flow(0.7 * CAPACITY)
    cluster = Cluster(seed).run(batch, chat)
    assert cluster.refused(priority=0) == 0
    assert cluster.refused(priority=-1) > 0.5
    assert len(cluster.waits()) / 60 >= 0.9 * CAPACITY
    both = Cluster(seed).run(batch, Flow(2 * CAPACITY))
    assert both.refused(COLD_S, priority=-1) > 0.99
    assert both.refused(COLD_S, priority=0) < 0.6


@pytest.mark.parametrize("seed", SEEDS)
def test_a_quiet_tenant_is_not_refused_because_of_a_loud_one(seed: int) -> None:
    cluster = Cluster(seed).run(Flow(10 * CAPACITY, tenant="loud"), Flow(0.2 * CAPACITY, tenant="quiet"))
    assert cluster.refused(COLD_S, tenant="quiet") == 0
    assert cluster.refused(tenant="loud") > 0.8
    assert percentile(cluster.waits(tenant="quiet"), 0.9) < TARGET_S / 2


def test_many_names_do_not_get_around_it() -> None:
    flows = [Flow(0.05 * CAPACITY, tenant=f"user {number}") for number in range(100)]
    cluster = Cluster(0).run(*flows)
    assert cluster.refused() > 0.7
    assert cluster.longest <= 1.5 * TARGET_S * CAPACITY


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_cluster_still_serves(seed: int) -> None:
    """None of its answers is in time, but that is not made worse by refusing all."""
    cluster = Cluster(seed, speed=0.05).run(Flow(0.2 * CAPACITY, end=300))
    assert cluster.goodput(0, 300) < 0.01 * CAPACITY
    assert len(cluster.waits()) >= 0.8 * 300 * 0.05 * CAPACITY
    assert cluster.longest <= FEW + SERVERS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cluster_that_becomes_slower_gets_less(seed: int) -> None:
    cluster = Cluster(seed, speed=2).run(Flow(3 * CAPACITY, end=20))
    begin, before = cluster.now, len(cluster.asked)
    cluster.speed = 0.5
    cluster.run(Flow(2 * CAPACITY, begin=begin, end=begin + 40))
    late = [one for one in cluster.asked[before:] if one.answered is not None and one.at > begin + 2 * SPAN_S]
    assert mean(one.answered - one.at <= 1.25 * TARGET_S for one in late) > 0.9
    assert len(late) > 0.8 * (40 - 2 * SPAN_S) * cluster.speed * CAPACITY


def test_idle_times_say_nothing_about_the_pace() -> None:
    cluster = Cluster(0).run(Flow(2 * CAPACITY, end=20))
    for _ in range(2):
        cluster.now += 10_000
        before = len(cluster.asked)
        cluster.run(Flow(0.9 * CAPACITY, begin=cluster.now, end=cluster.now + 20))
        assert mean(one.answered is None for one in cluster.asked[before:]) < 0.05


def test_a_cold_cluster_takes_all_until_it_is_late() -> None:
    now = [0.0]
    admission = Admission(10.0, lambda: now[0])
    for _ in range(1000):
        assert admission.check("", 1, 0) is None
        admission.wait("", 1, 0)
    now[0] = HEADROOM * 10.0 - 0.1
    assert admission.check("", 1, 0) is None
    now[0] += 0.2
    assert admission.check("", 1, 0) is not None


def test_one_answer_is_no_pace() -> None:
    """That another one takes a second does not mean that all do."""
    now = [0.0]
    admission = Admission(10.0, lambda: now[0])
    waits = [admission.wait("", 1, 0) for _ in range(30)]
    waits[0].answered()
    now[0] = 1.0
    assert admission.check("", 1, 0) is None
    waits[1].answered()
    assert admission.check("", 1, 0) is None
    now[0] = 3.0
    assert admission.check("", 1, 0) is not None


def test_who_leaves_makes_room_but_no_pace() -> None:
    now = [0.0]
    admission = Admission(10.0, lambda: now[0])
    waits = [admission.wait("", 1, 0) for _ in range(100)]
    now[0] = 20.0
    assert admission.check("", 1, 0) is not None
    for wait in waits[FEW - 1 :]:
        wait.left()
        wait.left()
    assert admission.check("", 1, 0) is None
    admission.wait("", 1, 0)
    assert admission.check("", 1, 0) is not None


# --- in the gateway ---


def late(dispatcher: Dispatcher) -> None:
    """More wait than can be answered in time."""
    dispatcher._admission._target_s = 1e-9
    for _ in range(FEW):
        dispatcher._admission.wait("other", 1, 0)


async def test_a_request_that_was_admitted_goes_on_whatever_happens() -> None:
    """Its worker fails when the gateway refuses everybody else."""
    directory, outputs = told(
        (Delta("", 0, (7, 8), 3), Delta("", 2, (), 0, error="gone")), (Delta("", 0, (9,), 0, "stop"),)
    )
    given = [await anext(outputs)]
    assert directory.dispatcher is not None
    late(directory.dispatcher)
    given += [output async for output in outputs]
    assert [output.tokens for output in given] == [(7, 8), (9,)]
    assert directory.dispatcher._admission._waiting == FEW


async def test_what_is_refused_reaches_no_worker(text: Text) -> None:
    async def play(played: Played, request: Request) -> None:
        played.deliver(request, 0, (1,), "length")

    directory = Played(play)
    app = application(text, directory, GatewayConfig())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        wanted = {"model": MODEL, "prompt": [[1, 2], [3, 4]], "max_tokens": 1}
        assert (await client.post("/v1/completions", json=wanted)).status_code == 200
        assert len(directory.requests) == 2
        assert directory.dispatcher is not None
        late(directory.dispatcher)
        for stream in (False, True):
            answer = await client.post("/v1/completions", json={**wanted, "stream": stream})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert "gateway.first_token_target_s" in answer.json()["error"]["message"]
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        inputs = {"/v1/chat/completions": chat, "/v1/messages": chat, "/v1/embeddings": {"model": MODEL, "input": "Hi"}}
        for path, body in inputs.items():
            assert (await client.post(path, json=body)).status_code == 429
        assert len(directory.requests) == 2
        count = await client.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": chat["messages"]})
        assert count.status_code == 200


async def test_the_first_token_alone_ends_no_wait() -> None:
    """It comes before there is a place at a decode worker."""
    directory, outputs = told((Delta("", 0, (7,), 3), Delta("", 1, (8,), 3)), timeout_s=0.1)
    assert directory.dispatcher is not None
    late(directory.dispatcher)
    admission = directory.dispatcher._admission
    await anext(outputs)
    assert (admission._waiting, len(admission._answers)) == (FEW + 1, 0)
    await anext(outputs)
    assert (admission._waiting, len(admission._answers)) == (FEW, 1)
    with pytest.raises(ApiError):
        await anext(outputs)
    assert (admission._waiting, len(admission._answers)) == (FEW, 1)


async def test_who_gets_no_answer_does_not_wait_any_more() -> None:
    directory, outputs = told(Outcome("refused", error="no token fits"))
    assert directory.dispatcher is not None
    late(directory.dispatcher)
    with pytest.raises(ApiError):
        await anext(outputs)
    admission = directory.dispatcher._admission
    assert (admission._waiting, len(admission._answers)) == (FEW, 0)
