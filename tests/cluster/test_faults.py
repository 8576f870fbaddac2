"""Faults of KV transfer on real processes: Ray actors and NIXL, while blocks that nobody owns hold NaN.

After each fault: every answer that was asked for is right or, where no gateway could try again, a clear error in time;
on every worker all blocks are free or cached, and no job, lease or transfer is left; the next request is answered.
docs/transfer.md says which test covers which failure.
"""

import asyncio
import itertools
import json
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray

from cluster.launch import Cluster
from tests.cluster.checks import assert_alive, assert_balance, statuses
from tests.cluster.conftest import Launch
from tests.cluster.faulty_worker import LISTENER, Fault, FaultyWorker, listener, restart
from tests.cluster.test_failures import MODEL, Judge, body
from tests.cluster.test_who_computes import now, words
from transfer.messages import Outcome, Request, Reserve, SamplingParams, Source, pack_tokens

OUTPUT = 12
DEADLINE_S = 15.0
BALANCE_S = 10.0
PAUSE_S = 1.5
"""Longer than a lease and than a transfer may stand still."""
SETTINGS = {
    "worker__kv_memory": "3MiB",
    "worker__step_tokens": 128,
    "transfer__lease_s": 0.6,
    "transfer__stall_s": 0.8,
    "transfer__call_timeout_s": 1.0,
    "gateway__request_timeout_s": DEADLINE_S,
}
LATE_S = 2.0
"""How late a write is, at least, that outlives its request."""
POOL_TOKENS = 4096
STEPS = 1100
"""Tokens of a prompt that is computed in several steps, and sent in as many pieces."""
LENGTHS = (5, 100, 600, STEPS)
WHOLE = 160
"""Tokens of a prompt of whole blocks: when it comes again, nothing of it travels but the manifest."""
PREFIX = 592
"""Tokens in whole blocks of a prompt of 600."""
_seeds = itertools.count(1000)


def fresh(length: int) -> list[int]:
    """A prompt that nobody has seen."""
    return words(next(_seeds), length)


@dataclass
class Asked:
    """A request that a worker was given directly."""

    prompt: list[int]
    tokens: int
    request_id: str
    outcome: Any


@dataclass
class Scene:
    """Two prefill and two decode workers with faults, asked through the gateway or directly."""

    cluster: Cluster
    judge: Judge
    listener: Any
    folder: Path

    def inject(self, name: str, fault: Fault) -> None:
        """A worker, or all of a role, have this fault from now on."""
        ray.get([self.cluster.worker(one).inject.remote(fault) for one in self._named(name)], timeout=10)

    def once(self, fault: Fault) -> Fault:
        """The fault, for whichever worker is the first."""
        return replace(fault, once=str(self.folder / uuid.uuid4().hex))

    def struck(self, name: str) -> int:
        """How often the fault of a worker, or of all of a role, has struck."""
        return sum(ray.get([self.cluster.worker(one).struck.remote() for one in self._named(name)], timeout=10))

    async def ask(self, client: httpx.AsyncClient, prompt: Sequence[int], stream: bool = False) -> list[int]:
        """What a client gets; anything but a complete answer in time is an error."""
        wanted = body(list(prompt), OUTPUT, return_token_ids=True)
        if not stream:
            answer = await client.post("/v1/completions", json=wanted)
            assert answer.status_code == 200, answer.text
            return list(answer.json()["choices"][0]["token_ids"])
        ids: list[int] = []
        async with client.stream("POST", "/v1/completions", json={**wanted, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:]).get("choices", []):
                        ids += choice["token_ids"]
        return ids

    async def ask_all(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        async with httpx.AsyncClient(base_url=self.cluster.url, timeout=DEADLINE_S + 1) as client:
            asked = (self.ask(client, prompt, stream=bool(number % 2)) for number, prompt in enumerate(prompts))
            return await asyncio.gather(*asked)

    def check(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Every answer is complete, and the reference model's."""
        for prompt, ids in zip(prompts, answers, strict=True):
            assert len(ids) == OUTPUT
            assert self.judge.right(prompt, ids), f"a prompt of {len(prompt)} tokens is answered wrongly"

    def right(self, prompts: Sequence[list[int]]) -> None:
        """Ask these at once."""
        self.check(prompts, asyncio.run(self.ask_all(prompts)))

    def give(
        self, prompt: list[int], worker: str, decode: str | None = None, fetch: Source | None = None, salt: bytes = b""
    ) -> Asked:
        """Ask a worker of one's choice, with nobody to try again."""
        sampling = SamplingParams(OUTPUT, temperature=0.0, ignore_eos=True)
        request = Request(uuid.uuid4().hex, pack_tokens(prompt), sampling, LISTENER, DEADLINE_S, salt=salt)
        outcome = self.cluster.worker(worker).generate.remote(request, decode, fetch)
        return Asked(prompt, OUTPUT, request.request_id, outcome)

    def take(self, asked: Asked) -> None:
        """What was asked for directly, which must be right."""
        answer = self.listener.answer.remote(asked.request_id, asked.tokens, DEADLINE_S)
        outcome, (ids, error) = ray.get([asked.outcome, answer], timeout=DEADLINE_S + 1)
        assert (error, outcome.error) == (None, None)
        self.check([asked.prompt], [ids])

    def fill(self, worker: str) -> list[list[int]]:
        """Use every block of a worker's pool anew; the prompts that it surely holds then, the last three."""
        asked = [self.give(fresh(600), worker) for _ in range(POOL_TOKENS // 600 - 2)]
        for one in asked:
            self.take(one)
        last = [fresh(600) for _ in range(3)]
        for prompt in last:
            self.take(self.give(prompt, worker))
        return last

    def rest(self) -> None:
        """Without faults, everything comes to rest, and the next request is answered."""
        for name, _ in self.cluster.config.workers:
            self.inject(name, Fault())
        assert_balance(self.cluster, BALANCE_S)
        until = time.monotonic() + BALANCE_S
        while ends := self.open_ends():
            assert time.monotonic() < until, ends
            time.sleep(0.05)
        self.right([fresh(40)])

    def open_ends(self) -> list[str]:
        names = [name for name, _ in self.cluster.config.workers]
        found = ray.get([self.cluster.worker(name).open_ends.remote() for name in names], timeout=10)
        return [f"{name}: {end}" for name, ends in zip(names, found, strict=True) for end in ends]

    def _named(self, name: str) -> list[str]:
        return [one for one, role in self.cluster.config.workers if name in (one, role)]


@pytest.fixture(scope="module")
def shared(launch: Launch, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster.launch.Worker", FaultyWorker)
        cluster = launch(tiny, prefill__replicas=2, decode__replicas=2, **SETTINGS)
    scene = Scene(cluster, Judge(tiny), listener(cluster), tmp_path_factory.mktemp("struck"))
    ray.get(scene.listener.ping.remote(), timeout=60)
    return scene


@pytest.fixture
def scene(shared: Scene) -> Iterator[Scene]:
    yield shared
    shared.rest()


def some(names: Iterable[str], short: Collection[str] = (), long: Collection[str] = ()) -> list[Any]:
    """Parameters, of which `make test` takes only the `short` ones, or all but the `long` ones."""
    later = {name for name in names if name in long or (short and name not in short)}
    return [pytest.param(name, marks=pytest.mark.long if name in later else ()) for name in names]


HANDOVER = {
    "handshake": ("prefill", Fault("connect")),
    "post, the first": ("prefill", Fault("write")),
    "post, in the middle": ("prefill", Fault("write", skip=3)),
    "post, the manifest": ("prefill", Fault("last write")),
    "poll, the first": ("prefill", Fault("done")),
    "poll, in the middle": ("prefill", Fault("done", skip=3)),
    "poll, every one": ("prefill", Fault("done", times=1000)),
    "poll, of a write that is lost": ("prefill", Fault("lost", skip=2)),
    "notify": ("prefill", Fault("notify")),
    "notification lost": ("decode", Fault("drop")),
    "notifications doubled": ("decode", Fault("double", times=1000)),
    "notifications reordered": ("decode", Fault("hold", times=2, seconds=0.3)),
    "a bit of the first block": ("decode", Fault("flip")),
    "a bit of the last block": ("decode", Fault("flip", place=-1)),
    "writes are slow": ("prefill", Fault("delay", times=1000, seconds=0.1)),
    "a write is stuck": ("prefill", Fault("delay", seconds=2.5)),
}


HANDOVER_LONG = (
    "post, the first",
    "poll, the first",
    "poll, in the middle",
    "a bit of the first block",
    "writes are slow",
    "a write is stuck",
)


@pytest.mark.parametrize("name", some(HANDOVER, long=HANDOVER_LONG))
def test_a_hand_over_goes_wrong(scene: Scene, name: str) -> None:
    known = fresh(WHOLE)
    scene.right([known])
    role, fault = HANDOVER[name]
    fault = scene.once(fault) if fault.times == 1 else fault
    before = now(scene.cluster)
    scene.inject(role, fault)
    scene.right([known, *map(fresh, LENGTHS)])
    assert Path(fault.once).exists() if fault.once else scene.struck(role)
    after = now(scene.cluster)
    refused = sum(after[name].transfer.refused - before[name].transfer.refused for name in after)
    assert refused == (fault.what == "flip")


FETCH = {
    "handshake": ("decode-0", Fault("connect"), 0),
    "post": ("decode-0", Fault("last write"), 0),
    "poll": ("decode-0", Fault("lost"), 0),
    "poll, though it arrives": ("decode-0", Fault("done"), None),
    "notification lost": ("prefill-0", Fault("drop"), 0),
    "notification doubled": ("prefill-0", Fault("double"), PREFIX),
    "a bit of the first block": ("prefill-0", Fault("flip"), 0),
    "a bit of the last block": ("prefill-0", Fault("flip", place=-1), 0),
    "the write is slow": ("decode-0", Fault("delay", seconds=0.2), PREFIX),
    "the write is stuck": ("decode-0", Fault("delay", seconds=2.0), 0),
}


FETCH_LONG = ("a bit of the first block", "the write is slow", "the write is stuck")


@pytest.mark.parametrize("name", some(FETCH, long=FETCH_LONG))
def test_a_fetch_goes_wrong(scene: Scene, name: str) -> None:
    where, fault, expected = FETCH[name]
    prompt = fresh(600)
    scene.take(scene.give(prompt, "decode-0"))
    before = now(scene.cluster)["prefill-0"]
    scene.inject(where, fault)
    scene.take(scene.give(prompt, "prefill-0", "decode-1", Source("decode-0", PREFIX)))
    assert scene.struck(where) == 1
    after = now(scene.cluster)["prefill-0"]
    fetched = (after.transfer.fetched_blocks - before.transfer.fetched_blocks) * after.block_size
    assert fetched == expected or expected is None
    cached = len(prompt) - (after.cache.new_tokens - before.cache.new_tokens)
    assert fetched <= cached < fetched + after.block_size  # its first tokens may be another prompt's by chance
    assert after.transfer.refused - before.transfer.refused == (fault.what == "flip")


def test_nothing_to_lend_and_the_word_of_it_fails(scene: Scene) -> None:
    scene.inject("decode-0", Fault("notify"))
    scene.take(scene.give(fresh(600), "prefill-0", "decode-1", Source("decode-0", PREFIX)))
    assert scene.struck("decode-0") == 1


def test_tenants_get_nothing_of_each_other_by_fetch_or_hand_over(scene: Scene) -> None:
    prompt = fresh(600)
    source = Source("decode-0", PREFIX)
    scene.take(scene.give(prompt, "decode-0", salt=b"a"))
    for salt, fetched in ((b"b", 0), (b"a", PREFIX)):
        before = now(scene.cluster)
        scene.take(scene.give(prompt, "prefill-0", "decode-0", source, salt))
        after = now(scene.cluster)
        got = after["prefill-0"].transfer.fetched_blocks - before["prefill-0"].transfer.fetched_blocks
        sent = after["prefill-0"].transfer.sent_bytes - before["prefill-0"].transfer.sent_bytes
        block = 16 * after["prefill-0"].token_bytes
        assert got * 16 == fetched
        assert sent == block * (600 // 16 + 1 - fetched // 16)
        assert after["prefill-0"].cache.cached_tokens - before["prefill-0"].cache.cached_tokens == fetched


def test_an_aborted_request_s_blocks_are_reused_only_when_its_late_write_is_over(scene: Scene) -> None:
    """Not before: it would otherwise land in what others have cached there meanwhile."""
    scene.inject("prefill-0", Fault("gate", times=1000))
    asked = scene.give(fresh(STEPS), "prefill-0", "decode-0")
    until = time.monotonic() + 5
    while not scene.struck("prefill-0"):
        assert time.monotonic() < until
    begun = time.monotonic()
    for name in ("prefill-0", "decode-0"):
        ray.get(scene.cluster.worker(name).abort.remote(asked.request_id), timeout=5)
    outcome = ray.get(asked.outcome, timeout=DEADLINE_S)
    assert outcome.status == "aborted"
    assert not ray.get(scene.listener.finished.remote(asked.request_id), timeout=5)
    held = scene.fill("decode-0")
    time.sleep(max(0.0, begun + LATE_S - time.monotonic()))
    assert now(scene.cluster)["decode-0"].blocks["quarantined"] >= STEPS // 16
    scene.inject("prefill-0", Fault())
    assert_balance(scene.cluster, BALANCE_S)
    check_cached(scene, "decode-0", held)


def check_cached(scene: Scene, worker: str, prompts: Sequence[list[int]]) -> None:
    """A worker still has these prompts, and they are what they were."""
    before = now(scene.cluster)[worker].cache.cached_tokens
    for prompt in prompts:
        scene.take(scene.give(prompt, worker))
    assert now(scene.cluster)[worker].cache.cached_tokens - before >= len(prompts) * PREFIX


def test_leases_that_expire_under_load(scene: Scene) -> None:
    """Every second manifest is lost, while more is asked for than there is room: nothing is read that was freed."""
    before = now(scene.cluster)["decode-0"].transfer.expired
    scene.inject("decode-0", Fault("drop", times=5, skip=3))
    asked = [scene.give(fresh(length), "prefill-0", "decode-0") for length in (600, STEPS) * 6]
    for one in asked:
        scene.take(one)
    assert scene.struck("decode-0") == 5
    assert now(scene.cluster)["decode-0"].transfer.expired - before >= 5


def test_a_sender_that_is_stopped_for_longer_than_its_lease(scene: Scene) -> None:
    """The decode worker computes the prompt and goes on with others; what the sender had still to write, when it goes
    on, meets nobody's blocks."""
    process = psutil.Process(now(scene.cluster)["prefill-0"].pid)
    scene.inject("prefill-0", Fault("written", skip=1, signal=signal.SIGSTOP))
    asked = scene.give(fresh(STEPS), "prefill-0", "decode-0")
    wait_stopped(process)
    try:
        answer = scene.listener.answer.remote(asked.request_id, OUTPUT, DEADLINE_S)
        ids, error = ray.get(answer, timeout=DEADLINE_S)
        assert error is None
        scene.check([asked.prompt], [ids])
        held = scene.fill("decode-0")
        blocks = ray.get(scene.cluster.worker("decode-0").status.remote(), timeout=5).blocks
        assert blocks["quarantined"] >= STEPS // 16
    finally:
        process.resume()
    assert ray.get(asked.outcome, timeout=DEADLINE_S).status in ("failed", "handed off")
    assert_balance(scene.cluster, BALANCE_S)
    check_cached(scene, "decode-0", held)


def wait_stopped(process: psutil.Process) -> None:
    until = time.monotonic() + 10
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until, "it was not stopped"
        time.sleep(0.01)


def test_200_streams_closed_within_50_ms(scene: Scene) -> None:
    """Half of them of having been asked for, half of their first byte."""

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        draw = random.Random(number)
        came = asyncio.Event()

        async def read() -> None:
            wanted = body(words(number, draw.randrange(1, 300)), 900, stream=True)
            async with client.stream("POST", "/v1/completions", json=wanted) as answer:
                async for _ in answer.aiter_bytes():
                    came.set()

        reading = asyncio.create_task(read())
        if number % 2:
            await asyncio.wait({reading, asyncio.create_task(came.wait())}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(draw.random() * 0.05)
        reading.cancel()
        await asyncio.wait({reading})
        assert reading.cancelled() or reading.exception() is None

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=scene.cluster.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(leave(client, number) for number in range(200)))

    before = counted(scene.cluster)
    asyncio.run(run())
    assert_balance(scene.cluster, within_s=5)
    after = counted(scene.cluster)
    begun = after["headwater_requests_started_total"] - before["headwater_requests_started_total"]
    assert 100 <= begun <= 200  # of the others nothing has arrived
    assert after["headwater_requests_total"] - before["headwater_requests_total"] == begun
    assert after["headwater_requests_in_flight"] == 0
    assert_alive(scene.cluster, MODEL)


def counted(cluster: Cluster) -> Counter[str]:
    """Metrics of the gateway, summed up over their labels."""
    found: Counter[str] = Counter()
    for line in httpx.get(f"{cluster.url}/metrics").text.splitlines():
        if line and not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            found[series.partition("{")[0]] += float(value)  # type: ignore[assignment]
    return found


def test_four_workers_on_one_machine_are_told_apart(scene: Scene) -> None:
    names = [name for name, _ in scene.cluster.config.workers]
    peers = ray.get([scene.cluster.worker(name).describe.remote() for name in names])
    assert len({peer.agent for peer in peers}) == len({peer.metadata for peer in peers}) == 4
    assert len({one.node for one in statuses(scene.cluster)}) == 1
    check_pairs(scene)


def check_pairs(scene: Scene) -> None:
    """Every prefill worker hands over to every decode worker, which accepts what was written."""
    names = [name for name, _ in scene.cluster.config.workers]
    before = now(scene.cluster)
    asked = [scene.give(fresh(300), p, d) for p in names if p.startswith("p") for d in names if d.startswith("d")]
    for one in asked:
        scene.take(one)
    after = now(scene.cluster)
    accepted = {name: after[name].transfer.accepted - before[name].transfer.accepted for name in names}
    assert accepted == {"prefill-0": 0, "prefill-1": 0, "decode-0": 2, "decode-1": 2}


def test_a_prompt_that_is_too_long_is_refused_everywhere(scene: Scene) -> None:
    prompt = fresh(2048)
    answer = httpx.post(f"{scene.cluster.url}/v1/completions", json=body(prompt, OUTPUT), timeout=10)
    assert answer.status_code == 400
    asked = scene.give(prompt, "prefill-0", "decode-0")
    outcome: Outcome = ray.get(asked.outcome, timeout=5)
    assert (outcome.status, outcome.error) == ("failed", f"2048 + {OUTPUT} tokens do not fit 2048")
    sampling = SamplingParams(OUTPUT, temperature=0.0)
    reserve = Reserve(Request("too-long", pack_tokens(prompt), sampling, LISTENER, 5.0), "prefill-0", "p", 1)
    outcome = ray.get(scene.cluster.worker("decode-0").reserve.remote(reserve), timeout=5)
    assert outcome.status == "failed"


POINTS = {
    "P, asked to compute": ("prefill", Fault("generate")),
    "P, the first write is posted": ("prefill", Fault("written")),
    "P, in the middle of its writes": ("prefill", Fault("written", skip=4)),
    "P, the manifest is posted": ("prefill", Fault("last written")),
    "P, all is sent": ("prefill", Fault("sent")),
    "P, its first token is there": ("prefill", Fault("tokens")),
    "D, asked to reserve": ("decode", Fault("reserve")),
    "D, blocks are reserved": ("decode", Fault("reserved")),
    "D, the reservation is answered": ("decode", Fault("answered")),
    "D, the manifest has come": ("decode", Fault("manifest")),
    "D, the manifest is judged": ("decode", Fault("judged")),
    "D, its first token is there": ("decode", Fault("tokens")),
    "D, in the middle of its answer": ("decode", Fault("tokens", skip=6)),
}
TOGETHER = ("P, in the middle of its writes", "D, in the middle of its answer")
OTHERS = [("P, the manifest is posted", "D, the manifest is judged"), *((point,) for point in POINTS)]


@pytest.mark.parametrize(
    "points", [TOGETHER, *(pytest.param(points, marks=pytest.mark.long) for points in OTHERS)], ids=" and ".join
)
def test_workers_killed_and_started_again(scene: Scene, points: tuple[str, ...]) -> None:
    faults = [scene.once(replace(POINTS[point][1], signal=signal.SIGKILL)) for point in points]
    for point, fault in zip(points, faults, strict=True):
        scene.inject(POINTS[point][0], fault)
    scene.right([fresh(length) for length in LENGTHS * 2])
    check_restart(scene, [Path(fault.once).read_text() for fault in faults])


ITEM = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "name": {"type": "string", "maxLength": 9},
    },
    "required": ["size", "name"],
    "additionalProperties": False,
}


def test_an_answer_goes_on_with_its_grammar_penalties_and_seed(scene: Scene) -> None:
    """Its decode worker is killed in the middle of it; the text is that of the answer that nobody disturbed."""
    penalties = {"presence_penalty": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "logit_bias": {"70": 2}}
    drawn = {
        "temperature": 1.0,
        "seed": 5,
        "guided_json": {"type": "array", "items": ITEM, "minItems": 5, "maxItems": 5},
    }
    wanted = {**body(fresh(100), 600, return_token_ids=True), **penalties, **drawn}
    whole = httpx.post(f"{scene.cluster.url}/v1/completions", json=wanted, timeout=DEADLINE_S).json()["choices"][0]
    assert whole["finish_reason"] == "stop"
    assert len(json.loads(whole["text"])) == 5
    assert len(whole["token_ids"]) > 60
    fault = scene.once(Fault("tokens", skip=30, signal=signal.SIGKILL))
    scene.inject("decode", fault)
    text, ids = "", []
    with httpx.stream("POST", f"{scene.cluster.url}/v1/completions", json={**wanted, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text, ids = text + choice["text"], ids + choice["token_ids"]
    assert (text, ids) == (whole["text"], whole["token_ids"])
    check_restart(scene, [Path(fault.once).read_text()])


def check_restart(scene: Scene, killed: Sequence[str]) -> None:
    """The others are at rest; the next lives of these serve the next 20 requests with them."""
    until = time.monotonic() + 10
    while {one.name for one in statuses(scene.cluster)} & set(killed):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert_balance(scene.cluster, BALANCE_S)
    restart(scene.cluster, killed)
    until = time.monotonic() + 10
    while {one.incarnation for one in ray.get(scene.cluster.gateways[0].statuses.remote())} != {
        one.incarnation for one in statuses(scene.cluster)
    }:
        assert time.monotonic() < until, "the gateway does not find the new life"
        time.sleep(0.05)
    scene.right([fresh(100 + 10 * number) for number in range(20)])
    # Not all may have had to do with all, and of who is asked directly no gateway asks again.
    pairs = itertools.permutations((name for name, _ in scene.cluster.config.workers), 2)
    ray.get([scene.cluster.worker(one).meet.remote(other) for one, other in pairs], timeout=10)
    check_pairs(scene)


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "what"),
    [("decode-0", "lend"), ("decode-0", "last written"), ("prefill-0", "manifest"), ("prefill-0", "judged")],
)
def test_lender_or_borrower_is_killed(scene: Scene, victim: str, what: str) -> None:
    prompt = fresh(600)
    scene.take(scene.give(prompt, "decode-0"))
    scene.inject(victim, Fault(what, signal=signal.SIGKILL))
    asked = scene.give(prompt, "prefill-0", "decode-1", Source("decode-0", PREFIX))
    if victim == "decode-0":
        scene.take(asked)
    else:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(asked.outcome, timeout=DEADLINE_S)
    check_restart(scene, [victim])


@pytest.mark.long
def test_a_sender_that_is_killed_when_its_blocks_are_wanted_back(scene: Scene) -> None:
    fault = scene.once(Fault("cancel", signal=signal.SIGKILL))
    scene.inject("prefill", fault)
    scene.inject("decode", Fault("drop", times=3))
    scene.right([fresh(length) for length in LENGTHS])
    check_restart(scene, [Path(fault.once).read_text()])


PAUSES = ["P, in the middle of its writes", "D, the manifest has come"]


@pytest.mark.parametrize("point", some(POINTS, short=PAUSES))
def test_a_worker_is_stopped_and_goes_on(scene: Scene, point: str) -> None:
    """For longer than a lease and than a transfer may stand still. Who asks meanwhile is answered, at once or later."""
    processes = {one.name: psutil.Process(one.pid) for one in statuses(scene.cluster)}
    role, fault = POINTS[point]
    fault = scene.once(replace(fault, signal=signal.SIGSTOP))
    scene.inject(role, fault)
    prompts = [fresh(length) for length in LENGTHS]

    def resume() -> None:
        until = time.monotonic() + 10
        while not (Path(fault.once).exists() and (name := Path(fault.once).read_text())):
            assert time.monotonic() < until, "nobody was stopped"
            time.sleep(0.01)
        wait_stopped(processes[name])
        time.sleep(PAUSE_S)
        processes[name].resume()

    async def run() -> list[list[int]]:
        answers, _ = await asyncio.gather(scene.ask_all(prompts), asyncio.to_thread(resume))
        return answers

    try:
        scene.check(prompts, asyncio.run(run()))
    finally:
        for process in processes.values():
            process.resume()
