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
from router.view import View
from transfer.messages import pack_tokens
from transfer.prefix import PrefixChain, root_key

BLOCK = 16


def chain(tokens: list[int]) -> PrefixChain:
    return PrefixChain.of(root_key("model"), pack_tokens(tokens), BLOCK)


def router(prefill: int = 4, decode: int = 4, both: int = 0, **settings: float) -> tuple[Router, View]:
    roles = [("prefill", prefill), ("decode", decode), ("both", both)]
    view = View([(f"{role}-{number}", role) for role, count in roles for number in range(count)])
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
    route, view = router(load_slack_tokens=0)
    for _ in range(400):
        route.dispatch(route.plan(chain([7] * 100), 100, True), 100)
        loads = [one.prefill_tokens for one in view.able("prefill")]
        assert max(loads) <= max(100, 1.25 * (sum(loads) + 100) / len(loads) + 100)
    assert max(one.prefill_tokens for one in view.able("prefill")) <= 1.3 * 100 * 100


def test_decodes_go_to_the_least_loaded() -> None:
    route, view = router()
    for number in range(40):
        route.dispatch(route.plan(chain([number] * 20), 20, True), 20)
    assert [one.decodes for one in view.able("decode")] == [10] * 4


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


@given(st.lists(st.tuples(st.integers(1, 500), st.booleans(), st.booleans()), max_size=60))
def test_counts_return_to_zero_however_requests_end(requests: list[tuple[int, bool, bool]]) -> None:
    route, view = router(both=1)
    tickets = []
    for tokens, computed, twice in requests:
        ticket = route.dispatch(route.plan(chain([tokens] * tokens), tokens, True), tokens)
        if computed:
            ticket.computed()
        tickets.append((ticket, twice))
    random.Random(0).shuffle(tickets)
    for ticket, twice in tickets:
        for _ in range(1 + twice):
            ticket.close()
            ticket.computed()
    assert all(one.prefill_tokens == one.decodes == 0 for one in view.workers.values())


def test_few_keys_move_when_a_worker_leaves() -> None:
    names = [f"worker-{number}" for number in range(8)]
    keys = [number.to_bytes(8, "little") for number in range(500)]
    ring = Ring(names)
    before = {key: ring.order(key)[0] for key in keys}
    assert all(sorted(ring.order(key)) == sorted(names) for key in keys[:20])
    ring.set(names[1:])
    moved = [key for key in keys if ring.order(key)[0] != before[key]]
    assert all(before[key] == names[0] for key in moved)
    ring.set(names)
    assert before == {key: ring.order(key)[0] for key in keys}


def test_homes_are_equal_in_every_process() -> None:
    program = (
        "from router.ring import Ring; ring = Ring(f'w{i}' for i in range(5));"
        "print([ring.order(bytes([i] * 8)) for i in range(20)])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
