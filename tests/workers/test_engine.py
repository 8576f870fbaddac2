"""The engine in one process: the tokens are the reference's, and afterwards every block is accounted for.

Free blocks hold NaN in all of these tests, so reading what was never written, or no longer belongs to anybody, shows.
"""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workers.engine.engine
from tests import model_zoo
from tests.seeds import seeds
from tests.workers.drive import HandOff, answers, assert_idle, engine, finish, output, poison, request, step
from transfer.messages import CacheStats, Delta, Request, SamplingParams, pack_tokens
from workers.config import WorkerConfig
from workers.engine.engine import Engine
from workers.engine.layerwise import cuts
from workers.engine.model import Model
from workers.engine.step import Produced, StepResult

BLOCK = 16
TOKENS = 24
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5, 150)  # the tiny models' window is 24


class Case:
    """A model with prompts and what the reference answers to them."""

    def __init__(self, arch: str, path: Path) -> None:
        self.model = Model(path, "float32", "cpu")
        drawn = [model_zoo.clear_prompt(path, length, TOKENS, seed=length) for length in LENGTHS]
        self.prompts = [prompt for prompt, _ in drawn]
        self.expected = [ids for _, ids in drawn]

    def requests(self) -> list[Request]:
        return [request(prompt, TOKENS) for prompt in self.prompts]


@pytest.fixture(scope="module")
def case(zoo: Callable[[str], Path]) -> Callable[[str], Case]:
    return functools.cache(lambda arch: Case(arch, zoo(arch)))


each_architecture = pytest.mark.parametrize("arch", model_zoo.ARCHITECTURES)
long = pytest.mark.long


@each_architecture
@pytest.mark.parametrize("step_tokens", [BLOCK, pytest.param(512, marks=long)])
def test_one_at_a_time(case: Callable[[str], Case], arch: str, step_tokens: int) -> None:
    """Cold and then warm: the second answer uses what the first one left."""
    this = case(arch)
    one = engine(this.model, step_tokens=step_tokens)
    for prompt, expected in zip(this.prompts, this.expected, strict=True):
        assert answers(one, [request(prompt, TOKENS)]) == [expected]
    assert_idle(one)
    cold = one.cache.stats.cached_tokens
    for prompt, expected in zip(this.prompts, this.expected, strict=True):
        assert answers(one, [request(prompt, TOKENS)]) == [expected]
    assert_idle(one)
    assert one.cache.stats.cached_tokens - cold == sum(length - 1 for length in LENGTHS)


@each_architecture
@pytest.mark.parametrize(
    ("step_tokens", "prefix_cache"),
    [(BLOCK, True), (512, True), (BLOCK, False), pytest.param(512, False, marks=long)],
)
def test_all_at_once(case: Callable[[str], Case], arch: str, step_tokens: int, prefix_cache: bool) -> None:
    """Equal prompts in flight, at most four at a time, then everything warm. Batches mix prompts and decodes."""
    this = case(arch)
    one = engine(this.model, step_tokens=step_tokens, max_running=4, prefix_cache=prefix_cache)
    assert answers(one, this.requests() + this.requests()) == this.expected + this.expected
    assert_idle(one)
    assert answers(one, this.requests()[::-1]) == this.expected[::-1]
    assert_idle(one)
    assert (one.cache.stats.cached_tokens > 0) == prefix_cache


@each_architecture
@pytest.mark.parametrize("step_tokens", [BLOCK + 3, pytest.param(512, marks=long)])
def test_handed_over(case: Callable[[str], Case], arch: str, step_tokens: int) -> None:
    """Prompts computed on one engine and decoded on another; the second time both have them cached."""
    this = case(arch)
    prefill = engine(this.model, step_tokens=step_tokens)
    decode = engine(this.model, step_tokens=step_tokens)
    for turn in range(2):
        for prompt, expected in zip(this.prompts, this.expected, strict=True):
            hand_off = HandOff(prefill, decode, request(prompt, TOKENS))
            assert hand_off.run() == expected
            assert hand_off.reserved is not None
            found = len(prompt) // BLOCK if turn else 0
            assert hand_off.reserved.first_block == found
            assert len(hand_off.reserved.blocks) == -(-len(prompt) // BLOCK) - found
            assert {delta.cached_tokens for delta in hand_off.deltas} == {len(prompt) - 1 if turn else 0}
    assert_idle(prefill)
    assert_idle(decode)


@each_architecture
def test_handed_over_layer_by_layer(case: Callable[[str], Case], arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D has room before P begins, and each part of a last chunk is copied the moment it is offered."""
    monkeypatch.setattr(workers.engine.engine, "EARLY_TOKENS", 2)
    this = case(arch)
    prefill, decode = engine(this.model, step_tokens=32), engine(this.model)
    layers = len(this.model.layers)
    for prompt, expected in zip(this.prompts, this.expected, strict=True):
        hand_off = HandOff(prefill, decode, request(prompt, TOKENS))
        hand_off.reserved = next(iter(step(decode).reserved))
        assert hand_off.run() == expected
        last = (len(prompt) - 1) % 32 + 1
        ends = sorted({*cuts(layers), layers}) if last >= 2 else [layers]
        assert [end for _, end in hand_off.offers[-len(ends) :]] == ends
        assert hand_off.offers[-len(ends)][0] == 0
    assert_idle(prefill)
    assert_idle(decode)


def test_what_is_cached_is_offered_before_anything_is_computed(tiny: Model) -> None:
    prefill, decode = engine(tiny, step_tokens=32), engine(tiny)
    prompt = list(range(100))
    HandOff(prefill, decode, request(prompt, TOKENS)).run()
    again = request([*prompt[:80], *range(300, 350)], TOKENS)
    prefill.add(again, hand_off=True)
    offered: list[Produced] = []
    plan = prefill.plan()
    monitored = prefill.model.compute

    def compute(*args: Any) -> Any:
        assert [(made.chunk.first, len(made.chunk.blocks)) for made in offered] == [(0, 80 // BLOCK)]
        return monitored(*args)

    prefill.model.compute = compute  # type: ignore[method-assign]
    try:
        result = prefill.run(plan.works, offered.append)
    finally:
        prefill.model.compute = monitored  # type: ignore[method-assign]
    assert [made.chunk.first for made in result.produced] == [80 // BLOCK]
    prefill.abort(again.request_id)


@each_architecture
def test_preempted(case: Callable[[str], Case], arch: str) -> None:
    """Blocks for about half of what is asked for: some are pushed back and resume."""
    this = case(arch)
    probe = engine(this.model)
    block_bytes = probe.memory.layout.block_bytes
    one = engine(this.model, kv_memory=15 * block_bytes, max_model_len=192, step_tokens=64)
    requests = this.requests()
    for each in requests:
        one.add(each)
    deltas: list[Delta] = []
    admitted = _count_admissions(one)
    finish(one, [each.request_id for each in requests], deltas)
    assert [output(deltas, each.request_id) for each in requests] == this.expected
    assert len(admitted) > len(requests)
    assert_idle(one)


def _count_admissions(one: Engine) -> list[str]:
    """Ids of all that are admitted from now on."""
    admitted: list[str] = []
    original = one._count
    one._count = lambda sequence: (admitted.append(sequence.id), original(sequence))[1]  # type: ignore[method-assign]
    return admitted


# --- SmolLM2 ------------------------------------------------------------------------------------------------------


TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because" * 6,
)


@pytest.fixture(scope="module")
def smol() -> tuple[Model, list[list[int]], list[list[int]]]:
    """The default model, prompts, and what the reference answers to them."""
    import transformers

    from cluster import models

    path = models.pull(models.DEFAULT_MODEL, progress=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    return Model(path, "float32", "cpu"), prompts, [model_zoo.reference(path, prompt, 16) for prompt in prompts]


def test_smollm2(smol: tuple[Model, list[list[int]], list[list[int]]]) -> None:
    model, prompts, expected = smol
    one = engine(model, kv_memory=64 << 20, max_model_len=512, step_tokens=40)
    for _ in range(2):
        assert answers(one, [request(prompt, 16) for prompt in prompts]) == expected
        assert_idle(one)
    assert one.cache.stats.cached_tokens > 0


def test_smollm2_handed_over(smol: tuple[Model, list[list[int]], list[list[int]]]) -> None:
    model, prompts, expected = smol
    prefill, decode = (engine(model, kv_memory=64 << 20, max_model_len=512, step_tokens=32) for _ in range(2))
    assert [HandOff(prefill, decode, request(prompt, 16)).run() for prompt in prompts] == expected


# --- sampling -----------------------------------------------------------------------------------------------------


def test_seeded_sampling_is_the_same_everywhere(tiny: Model) -> None:
    draw = random.Random(1)
    prompts = [[draw.randrange(512) for _ in range(length)] for length in (5, 16, 40, 90)]

    def requests() -> list[Request]:
        return [request(p, 40, temperature=0.8, top_p=0.9, seed=7 + i) for i, p in enumerate(prompts)]

    cold = engine(tiny)
    expected = [answers(cold, [one])[0] for one in requests()]
    assert len({tuple(tokens) for tokens in expected}) == 4
    assert answers(cold, requests()) == expected
    assert answers(engine(tiny, step_tokens=16, max_running=3), requests()) == expected
    assert answers(engine(tiny, prefix_cache=False, block_size=8), requests()) == expected
    prefill, decode = engine(tiny, step_tokens=16), engine(tiny)
    assert [HandOff(prefill, decode, one).run() for one in requests()] == expected
    block_bytes = cold.memory.layout.block_bytes
    assert answers(engine(tiny, kv_memory=9 * block_bytes, max_model_len=144), requests()) == expected

    other = [request(p, 40, temperature=0.8, top_p=0.9, seed=107 + i) for i, p in enumerate(prompts)]
    assert all(a != b for a, b in zip(answers(cold, other), expected, strict=True))


# --- ends and errors ----------------------------------------------------------------------------------------------


def test_it_stops_at_the_stop_token_unless_told_not_to(tiny: Model) -> None:
    one = engine(tiny)
    prompt = list(range(40))
    (full,) = answers(one, [request(prompt, 20)])
    token = full[7]
    end = full.index(token)
    eos, tiny.eos = tiny.eos, frozenset([token])
    try:
        deltas: list[Delta] = []
        each = request(prompt, 20, ignore_eos=False)
        one.add(each)
        finish(one, [each.request_id], deltas)
        assert output(deltas, each.request_id) == full[: end + 1]
        assert [delta.finish_reason for delta in deltas] == [None] * end + ["stop"]
        assert answers(one, [request(prompt, 20)]) == [full]
    finally:
        tiny.eos = eos
    assert_idle(one)


@pytest.mark.parametrize("hand_off", [False, True])
def test_one_token_is_one_token(tiny: Model, hand_off: bool) -> None:
    one = engine(tiny)
    each = request(range(40), 1)
    one.add(each, hand_off)
    deltas: list[Delta] = []
    finish(one, [each.request_id], deltas)
    assert [(delta.start, len(delta.tokens), delta.finish_reason) for delta in deltas] == [(0, 1, "length")]
    assert_idle(one)


@pytest.mark.parametrize(
    ("prompt", "output_tokens", "says"),
    [
        (0, 5, "0 \\+ 5"),
        (5, 0, "5 \\+ 0"),
        (100, 29, "100 \\+ 29 tokens do not fit 128"),
        (129, 1, "129"),
        (1, 10**12, "1 \\+ 1000000000000"),
    ],
)
def test_what_can_never_run_is_refused_and_leaves_nothing(
    tiny: Model, prompt: int, output_tokens: int, says: str
) -> None:
    one = engine(tiny, max_model_len=128)
    with pytest.raises(ValueError, match=says):
        one.add(request([1] * prompt, output_tokens))
    with pytest.raises(ValueError, match=says):
        one.reserve(request([1] * prompt, output_tokens))
    assert_idle(one)
    assert len(answers(one, [request([1] * 100, 28)])[0]) == 28


def test_an_id_that_is_here_already_is_refused(tiny: Model) -> None:
    one = engine(tiny)
    each = request(range(10))
    one.add(each)
    with pytest.raises(ValueError, match=each.request_id):
        one.add(each)
    finish(one, [each.request_id], [])
    assert_idle(one)


def test_two_requests_of_sixty_percent_of_the_pool(tiny: Model) -> None:
    roomy = engine(tiny)
    prompts = [[7] * 30, [9] * 30]
    expected = [answers(roomy, [request(prompt, 60)])[0] for prompt in prompts]
    one = engine(tiny, kv_memory=10 * roomy.memory.layout.block_bytes, max_model_len=160)
    assert answers(one, [request(prompt, 60) for prompt in prompts]) == expected
    assert_idle(one)


def test_two_handed_over_requests_of_sixty_percent_of_the_pool(tiny: Model) -> None:
    roomy = engine(tiny)
    prompts = [[7] * 30, [9] * 30]
    expected = [answers(roomy, [request(prompt, 60)])[0] for prompt in prompts]
    prefill = engine(tiny)
    decode = engine(tiny, kv_memory=10 * roomy.memory.layout.block_bytes, max_model_len=160)
    hand_offs: list[HandOff] = []
    deltas: list[Delta] = []
    for prompt in prompts:
        one = HandOff(prefill, decode, request(prompt, 60))
        assert one.accept(one.compute())
        deltas += one.deltas
        hand_offs.append(one)
    finish(decode, [one.request.request_id for one in hand_offs], deltas)
    assert [output(deltas, one.request.request_id) for one in hand_offs] == expected
    assert_idle(prefill)
    assert_idle(decode)


# --- hand-offs that go wrong --------------------------------------------------------------------------------------


def test_blocks_that_never_came_are_computed_here(tiny: Model) -> None:
    prompt = list(range(70))
    (expected,) = answers(engine(tiny), [request(prompt, 20)])
    prefill, decode = engine(tiny, step_tokens=32), engine(tiny)
    hand_off = HandOff(prefill, decode, request(prompt, 20))
    hand_off.compute()
    assert hand_off.reserved is not None
    prefill.sent(hand_off.request.request_id)
    held = decode.recompute(hand_off.request.request_id, hand_off.reserved.blocks)
    assert held == list(hand_off.reserved.blocks)
    deltas = [*hand_off.deltas]
    finish(decode, [hand_off.request.request_id], computed := [])
    assert output(computed, hand_off.request.request_id) == expected
    assert output(deltas, hand_off.request.request_id) == expected[:1]
    assert decode.cache.counts()["quarantined"] == len(held)
    decode.cache.end_quarantine(held)
    assert_idle(prefill)
    assert_idle(decode)
    assert decode.recompute(hand_off.request.request_id, ()) is None


def test_a_manifest_for_a_request_that_is_gone_is_told_so(tiny: Model) -> None:
    prefill, decode = engine(tiny), engine(tiny)
    hand_off = HandOff(prefill, decode, request(range(40)))
    ending = hand_off.compute()
    assert hand_off.reserved is not None
    held = decode.abort(hand_off.request.request_id, hand_off.reserved.blocks)
    assert not hand_off.accept(ending)
    assert decode.cache.counts()["quarantined"] == len(held) == 3
    decode.cache.end_quarantine(held)
    assert_idle(decode)
    assert_idle(prefill)


def test_blocks_of_a_hand_off_stay_until_they_are_sent(tiny: Model) -> None:
    """Other requests fill the pool while the transfer is slow."""
    roomy = engine(tiny)
    prompt = list(range(64))
    (expected,) = answers(roomy, [request(prompt, 16)])
    prefill = engine(tiny, kv_memory=9 * roomy.memory.layout.block_bytes, max_model_len=144)
    decode = engine(tiny)
    slow = HandOff(prefill, decode, request(prompt, 16))
    produced: list[StepResult] = []
    while not any(made.ending for result in produced for made in result.produced):
        produced.append(step(prefill))
        slow.deltas += produced[-1].deltas
    for token in range(5):
        answers(prefill, [request([token] * 40, 30)])
    (slow.reserved,) = step(decode).reserved
    for result in produced:
        slow.take(result)
    assert slow.ending is not None
    assert slow.accept(slow.ending)
    finish(decode, [slow.request.request_id], slow.deltas)
    assert output(slow.deltas, slow.request.request_id) == expected
    assert_idle(prefill)
    assert_idle(decode)


# --- random loads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(3, 8))
def test_random_requests_and_aborts_leave_nothing_behind(tiny: Model, seed: int) -> None:
    """Requests of every kind, aborted at every stage; those that finish have the right tokens."""
    draw = random.Random(seed)
    pages = engine(tiny).memory.layout.block_bytes
    config: dict[str, Any] = {"kv_memory": 24 * pages, "max_model_len": 200, "max_running": 6}
    config |= {"step_tokens": draw.choice([16, 40, 512]), "prefix_cache": draw.random() < 0.8}
    prefill, decode = engine(tiny, **config), engine(tiny, **config)
    families = [[draw.randrange(512) for _ in range(150)] for _ in range(3)]
    live: dict[str, tuple[Request, HandOff | None]] = {}
    quarantined: list[list[int]] = []
    deltas: list[Delta] = []
    finished: list[Request] = []
    for _ in range(150):
        if draw.random() < 0.3 and len(live) < 10:
            prompt = draw.choice(families)[: draw.randint(1, 150)]
            each = request(prompt, draw.randint(1, 40))
            engine_for = draw.choice([prefill, decode])
            if draw.random() < 0.5:
                engine_for.add(each)
                live[each.request_id] = (each, None)
            elif each.sampling.max_tokens > 1:
                live[each.request_id] = (each, HandOff(prefill, decode, each))
        if draw.random() < 0.1 and live:
            each, hand_off = live.pop(draw.choice(sorted(live)))
            blocks = hand_off.reserved.blocks if hand_off and hand_off.reserved else ()
            prefill.abort(each.request_id)
            quarantined.append(decode.abort(each.request_id, blocks))
        if draw.random() < 0.1 and quarantined:
            decode.cache.end_quarantine(quarantined.pop())
        made, kept = step(prefill), step(decode)
        deltas += made.deltas + kept.deltas
        by_id = {one.request_id: one for one in kept.reserved}
        for request_id, (each, hand_off) in list(live.items()):
            if hand_off is None:
                continue
            hand_off.reserved = hand_off.reserved or by_id.get(request_id)
            hand_off.take(made)
            if hand_off.ready and draw.random() < 0.5:
                if draw.random() < 0.2:
                    prefill.sent(request_id)
                    assert hand_off.reserved is not None
                    held = decode.recompute(request_id, hand_off.reserved.blocks)
                    assert held is not None
                    quarantined.append(held)
                    # The first token has been said; computing here says it again.
                    deltas = [delta for delta in deltas if delta.request_id != request_id]
                else:
                    assert hand_off.ending is not None
                    assert hand_off.accept(hand_off.ending)
                live[request_id] = (each, None)
        for delta in made.deltas + kept.deltas:
            if delta.finish_reason and delta.request_id in live:
                finished.append(live.pop(delta.request_id)[0])
        poison(prefill)
        poison(decode)
    for each, _ in live.values():
        prefill.abort(each.request_id)
        decode.abort(each.request_id)
    for held in quarantined:
        decode.cache.end_quarantine(held)
    assert_idle(prefill)
    assert_idle(decode)
    assert len(finished) >= 3
    alone = engine(tiny)
    for each in finished:
        repeated = Request(each.request_id, each.prompt, each.sampling, "", 60.0)
        assert output(deltas, each.request_id) == answers(alone, [repeated])[0]


def test_a_failed_step_drops_what_ran_and_the_next_request_works(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine(tiny)
    (expected,) = answers(one, [request(range(30))])
    each = request(range(40), 9)
    one.add(each)
    step(one)
    with monkeypatch.context() as patched:
        patched.setattr(tiny, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            one.run(one.plan().works)
    assert one.drop_running() == [each.request_id]
    poison(one)
    assert_idle(one)
    assert answers(one, [request(range(30))]) == [expected]


@pytest.mark.parametrize("length", [2, 3, 17])
def test_warming_up_works_for_the_shortest_context_and_leaves_nothing(tiny: Model, length: int) -> None:
    one = Engine(tiny, WorkerConfig(dtype="float32", device="cpu", kv_memory=1 << 20, max_model_len=length))
    one.warm_up()
    assert_idle(one)
    assert one.cache.counts()["cached"] == 0
    assert one.cache.stats == CacheStats()
    assert len(answers(one, [Request("r", pack_tokens([1]), SamplingParams(1, temperature=0), "", 1.0)])[0]) == 1
