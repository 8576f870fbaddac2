"""Routing decisions over a view: homes, bounded load, spill, roles."""

import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import RouterConfig
from router.ring import Ring
from router.route import NoWorkers, Router
from router.view import Ladder, View
from transfer.messages import CacheStats, Plan, Speeds, TransferStats, WorkerStatus, pack_tokens
from transfer.prefix import PrefixChain, root_key

BLOCK = 16


def chain(tokens: list[int]) -> PrefixChain:
    return PrefixChain.of(root_key("model"), pack_tokens(tokens), BLOCK)


def router(prefill: int = 4, decode: int = 4, both: int = 0, **settings: float) -> tuple[Router, View]:
    """Decode workers compute nothing themselves unless `local_tokens` lets them."""
    settings = {"local_tokens": 0, **settings}
    roles = [("prefill", prefill), ("decode", decode), ("both", both)]
    view = View([(f"{role}-{number}", role) for role, count in roles for number in range(count)], lambda: 100.0)
    return Router(view, RouterConfig(**settings)), view


def test_prompts_that_share_their_beginning_share_a_home() -> None:
    route, _ = router()
    system = list(range(200))
    homes = {route.plan(chain([*system, question]), 201, True).prefill for question in range(50)}
    assert len(homes) == 1
    other = {route.plan(chain([start] * 100), 100, True).prefill for start in range(50)}
    assert len(other) == 4


def test_the_pair_of_a_prompt_stays_the_same_when_idle() -> None:
    route, _ = router()
    plans = [route.plan(chain(list(range(100))), 100, True) for _ in range(5)]
    assert len({(plan.prefill, plan.decode) for plan in plans}) == 1


def test_no_worker_gets_more_than_the_bound_times_the_mean() -> None:
    """Neither of tokens, where all begin alike but not one is like another, nor of requests, where all are equal."""
    for prompts in ([chain([7] * 64 + [number + 8] * 36) for number in range(400)], [chain([7] * 100)] * 400):
        route, view = router()
        for prompt in prompts:
            route.dispatch(route.plan(prompt, 100, True), prompt, 100)
        sent = [one.in_flight for one in view.able("prefill").workers.values()]
        assert sum(sent) == 400
        assert max(sent) <= 1.3 * 100


def test_decodes_go_to_the_least_loaded() -> None:
    route, view = router()
    for number in range(40):
        route.dispatch(route.plan(chain([number] * 20), 20, True), chain([number] * 20), 20)
    assert [one.decodes for one in view.able("decode").workers.values()] == [10] * 4


def test_one_output_token_needs_no_decode_worker() -> None:
    route, _ = router()
    assert route.plan(chain([1]), 1, generate=False).decode is None


def test_a_worker_with_both_roles_answers_alone() -> None:
    route, _ = router(prefill=0, decode=0, both=2)
    plan = route.plan(chain([1] * 50), 50, True)
    assert plan.prefill.startswith("both")
    assert plan.decode is None


def test_the_dead_and_the_avoided_get_nothing() -> None:
    route, view = router(prefill=2)
    plan = route.plan(chain([1] * 50), 50, True)
    view.mark_dead(plan.prefill)
    second = route.plan(chain([1] * 50), 50, True)
    assert second.prefill != plan.prefill
    with pytest.raises(NoWorkers, match="prefill"):
        route.plan(chain([1] * 50), 50, True, avoid=frozenset([second.prefill]))


def test_without_decode_workers_only_both_can_answer() -> None:
    route, view = router(prefill=2, decode=1, both=1)
    view.mark_dead("decode-0")
    assert {route.plan(chain([number] * 50), 50, True).prefill for number in range(20)} == {"both-0"}
    view.mark_dead("both-0")
    with pytest.raises(NoWorkers):
        route.plan(chain([1]), 1, True)


def test_when_every_decode_worker_is_avoided_both_can_answer() -> None:
    route, _ = router(prefill=2, decode=1, both=1)
    avoid = frozenset(["decode-0"])
    assert {route.plan(chain([number] * 50), 50, True, avoid).prefill for number in range(20)} == {"both-0"}


@given(st.lists(st.tuples(st.integers(1, 500), st.booleans(), st.booleans()), max_size=60))
def test_counts_return_to_zero_however_requests_end(requests: list[tuple[int, bool, bool]]) -> None:
    route, view = router(both=1)
    tickets = []
    for tokens, computed, twice in requests:
        prompt = chain([tokens] * tokens)
        ticket = route.dispatch(route.plan(prompt, tokens, True), prompt, tokens)
        if computed:
            ticket.computed()
        tickets.append((ticket, twice))
    random.Random(0).shuffle(tickets)
    for ticket, twice in tickets:
        for _ in range(1 + twice):
            ticket.close()
            ticket.computed()
    assert all(one.in_flight == one.queue(100.0) == one.decodes == 0 for one in view.workers.values())


def test_few_keys_move_when_a_worker_leaves() -> None:
    names = [f"worker-{number}" for number in range(8)]
    keys = [number.to_bytes(8, "little") for number in range(500)]
    ring = Ring(names)
    before = {key: ring.order(key, 1, names)[0] for key in keys}
    assert all(sorted(ring.order(key, 8, names)) == sorted(names) for key in keys[:20])
    smaller = Ring(names[1:])
    moved = [key for key in keys if smaller.order(key, 1, names)[0] != before[key]]
    assert all(before[key] == names[0] for key in moved)
    # Without a place of its own, as with one that may not be asked.
    assert {key: ring.order(key, 1, names[1:])[0] for key in keys} == {
        key: smaller.order(key, 1, names)[0] for key in keys
    }


def test_homes_are_equal_in_every_process() -> None:
    program = (
        "from router.ring import Ring; ring = Ring(f'w{i}' for i in range(5));"
        "print([ring.order(bytes([i] * 8), 5, {f'w{j}' for j in range(5)}) for i in range(20)])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def report(
    view: View, name: str, fingerprint: str = "f", incarnation: int = 1, prefix_cache: bool = True, **speeds: float
) -> None:
    """A worker says what it has measured; 10 kB of KV a token."""
    view.update(
        WorkerStatus(
            name=name,
            role=view.workers[name].role,
            node="n",
            pid=1,
            state="ready",
            model="m",
            incarnation=incarnation,
            running=0,
            waiting=0,
            queued_tokens=0,
            prefix_cache=prefix_cache,
            blocks={"total": 1000},
            fragmentation=0.0,
            cache=CacheStats(),
            transfer=TransferStats(),
            speeds=Speeds(**{"prompt_tokens_s": 1000.0, "handover_s": 0.02, "bytes_s": 1e9, **speeds}),
            token_bytes=10_000,
            resident_bytes=0,
            block_size=BLOCK,
            max_model_len=8192,
            vocab_size=100,
            fingerprint=fingerprint,
        )
    )


def pair(local_tokens: int = 512, **speeds: float) -> tuple[Router, View]:
    route, view = router(1, 1, local_tokens=local_tokens)
    for name in view.workers:
        report(view, name, **speeds)
    return route, view


LONG = list(range(2000))


def ask(route: Router, prompt: list[int]) -> Plan:
    return route.plan(chain(prompt), len(prompt), True)


def held(view: View, prompt: list[int]) -> dict[str, int]:
    """Tokens of it by worker that are there by now."""
    holdings = view.holdings(Ladder.of(chain(prompt)))
    return {name: holdings.there(name).total for name in view.workers if holdings.there(name).total}


def fetched(plan: Plan) -> tuple[str, int] | None:
    return (plan.fetch.worker, plan.fetch.tokens) if plan.fetch else None


def test_a_short_prompt_is_computed_where_it_is_answered() -> None:
    route, _ = pair()
    plan = ask(route, [1] * 40)
    assert (plan.prefill, plan.decode, plan.new_tokens) == ("decode-0", None, 512)
    assert plan.why["until_decode"]["decode-0"] < plan.why["until_decode"]["prefill-0"]


def test_a_long_prompt_is_handed_over() -> None:
    route, _ = pair()
    plan = ask(route, LONG)
    assert (plan.prefill, plan.decode, plan.new_tokens) == ("prefill-0", "decode-0", None)


def test_without_local_tokens_everything_is_handed_over() -> None:
    route, _ = pair(local_tokens=0)
    assert ask(route, [1]).decode == "decode-0"


def test_a_short_suffix_of_a_long_prompt_is_computed_where_it_is_answered() -> None:
    route, _ = pair()
    route.holds("decode-0", chain(LONG))
    assert ask(route, [*LONG, *[5] * 100]).prefill == "decode-0"
    assert ask(route, [*LONG, *[5] * 600]).decode == "decode-0"


def test_answers_under_way_weigh_against_computing_beside_them() -> None:
    route, view = pair()
    view.workers["decode-0"].decodes = 8
    assert ask(route, [1] * 40).prefill == "prefill-0"
    # Two tokens cost eight answers less than a hand-over takes.
    assert ask(route, [1] * 2).prefill == "decode-0"


def test_a_queue_before_the_prefill_worker_weighs_against_it() -> None:
    route, view = pair()
    view.workers["decode-0"].decodes = 8
    view.queue_is("prefill-0", 4000)
    assert ask(route, [1] * 40).prefill == "decode-0"


def test_what_another_worker_holds_is_fetched() -> None:
    route, _ = pair(local_tokens=0)
    route.holds("decode-0", chain(LONG))
    assert fetched(ask(route, [*LONG, 7])) == ("decode-0", 2000)
    # All of it: one token is left to compute, and blocks are whole.
    assert fetched(ask(route, LONG)) == ("decode-0", 1984)


@pytest.mark.parametrize("speeds", [{"bytes_s": 1e6}, {"handover_s": 3.0}, {"prompt_tokens_s": 1e6}])
def test_what_is_computed_sooner_than_it_comes_is_not_fetched(speeds: dict[str, float]) -> None:
    route, _ = pair(local_tokens=0, **speeds)
    route.holds("decode-0", chain(LONG))
    assert ask(route, [*LONG, 7]).fetch is None


def test_nothing_is_fetched_from_the_dead_from_other_layouts_or_without_need() -> None:
    route, view = router(1, 2, local_tokens=0)
    for name in view.workers:
        report(view, name)
    route.holds("decode-0", chain(LONG))
    assert ask(route, LONG).fetch is not None
    report(view, "decode-0", fingerprint="g")
    assert ask(route, LONG).fetch is None
    report(view, "decode-0")
    route.holds("prefill-0", chain(LONG))
    assert ask(route, LONG).fetch is None
    route.lacks("prefill-0", chain(LONG), 0)
    assert ask(route, LONG).fetch is not None
    view.mark_dead("decode-0")
    assert ask(route, LONG).fetch is None


def test_nothing_is_fetched_from_a_worker_that_has_just_failed() -> None:
    route, view = router(2, 1, local_tokens=0)
    for name in view.workers:
        report(view, name)
    first = ask(route, LONG).prefill
    route.holds(first, chain(LONG))
    assert fetched(route.plan(chain(LONG), 2000, True, frozenset([first]))) is None


def test_the_speed_that_counts_is_the_lenders() -> None:
    route, view = pair(local_tokens=0)
    route.holds("decode-0", chain(LONG))
    report(view, "prefill-0", bytes_s=1.0)
    plan = ask(route, [*LONG, 7])
    assert fetched(plan) == ("decode-0", 2000)
    assert plan.fetch is not None
    assert plan.fetch.seconds == pytest.approx(0.02 + 2000 * 10_000 / 1e9)


def test_without_a_prefix_cache_nothing_is_believed() -> None:
    route, view = pair()
    report(view, "decode-0", prefix_cache=False)
    route.holds("decode-0", chain(LONG))
    assert ask(route, LONG).prefill == "prefill-0"


def test_what_was_sent_in_vain_is_not_counted_on() -> None:
    route, view = pair()
    busy, computed = (route.dispatch(ask(route, prompt), chain(prompt), 2000) for prompt in (LONG, LONG[::-1]))
    busy.close()
    computed.computed()
    computed.close()
    assert held(view, LONG) == {}
    assert held(view, LONG[::-1]) == {"prefill-0": 2000}
    assert view.workers["prefill-0"].queue(100.0) == 0


def test_local_tokens_can_be_overruled_for_one_prompt() -> None:
    route, _ = pair()
    assert route.plan(chain([1] * 40), 40, True, local_tokens=0).decode == "decode-0"


def test_a_worker_that_restarts_holds_nothing() -> None:
    route, view = pair(local_tokens=0)
    route.holds("decode-0", chain(LONG))
    report(view, "decode-0", incarnation=2)
    assert ask(route, LONG).fetch is None


def test_a_worker_that_lacks_what_was_believed_is_not_asked_again() -> None:
    route, _ = pair()
    route.holds("decode-0", chain(LONG))
    assert ask(route, LONG).prefill == "decode-0"
    route.lacks("decode-0", chain(LONG), 0)
    plan = ask(route, LONG)
    assert (plan.prefill, plan.decode, plan.fetch) == ("prefill-0", "decode-0", None)


def test_what_was_just_sent_to_a_worker_will_soon_be_there() -> None:
    route, view = pair()
    ticket = route.dispatch(ask(route, LONG), chain(LONG), len(LONG))
    assert view.workers["prefill-0"].queue(100.0) == 2000
    # The next one waits for it there, and does not count it again.
    plan = ask(route, [*LONG, 7])
    assert plan.prefill == "prefill-0"
    route.dispatch(plan, chain([*LONG, 7]), 2001)
    assert view.workers["prefill-0"].queue(100.0) == 2001
    # Only what is there by now is lent, here past a queue.
    view.queue_is("prefill-0", 1000)
    assert ask(route, [*LONG, 7]).fetch is None
    ticket.computed()
    assert view.workers["prefill-0"].queue(100.0) == 1001
    plan = ask(route, [*LONG, 7])
    assert (plan.prefill, fetched(plan)) == ("decode-0", ("prefill-0", 2000))


def test_of_equally_loaded_decode_workers_the_one_that_holds_most_is_chosen() -> None:
    route, view = router(1, 4)
    for name in view.workers:
        route.holds(name, chain(LONG[:160]))
    for name in ("decode-2", "decode-3"):
        route.holds(name, chain(LONG))
    view.workers["decode-3"].decodes = 1
    assert ask(route, LONG).decode == "decode-2"
