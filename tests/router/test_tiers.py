"""What workers hold below their devices: how much of a prompt, what it costs to use it, and what a plan says of it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from router.config import GatewayConfig
from router.cost import DISK_BYTES_S, HOST_BYTES_S, Usable, reach, saved, usable
from router.gateway.jobs import Limits
from router.view import NOTHING, Held, Ladder
from tests.router.test_route import BLOCK, LONG, chain, fetched, report
from tests.router.test_view import House
from transfer.gossip.ladder import checkpoints
from transfer.gossip.summary import DEVICE, DISK, HOST
from transfer.messages import Plan, TierStats, TierStatus

MORE = [*LONG, 7]
NONE = Usable(0, 0.0)
TOKEN_BYTES = 10_000
HOST_S = TOKEN_BYTES / HOST_BYTES_S
DISK_S = HOST_S + TOKEN_BYTES / DISK_BYTES_S
"""To load a token, at the speeds that are assumed; to compute one takes a millisecond."""
WHOLE = 1792
"""Of the prompt of 2,000 tokens that is up to the last checkpoint."""


def house(prefill: int = 2, decode: int = 1, local_tokens: int = 0, **speeds: float) -> House:
    """Workers that have said what they are."""
    made = House(prefill, decode, local_tokens=local_tokens)
    for name in made.view.workers:
        report(made.view, name, **speeds)
    return made


def holds(made: House, name: str, tokens: Sequence[int], device: int = 0, host: int = 0) -> None:
    """A worker publishes that it has a prompt: so many tokens on the device, up to `host` in host memory, all else on
    disk."""
    depths = checkpoints(len(tokens) // BLOCK, BLOCK)
    for depth, key in zip(depths.tolist(), chain(list(tokens)).numbers(depths).tolist(), strict=True):
        tier = DEVICE if depth * BLOCK <= device else HOST if depth * BLOCK <= host else DISK
        made.summaries[name].add(key, tier)
    made.hear(name)


def there(made: House, name: str) -> Held:
    return made.view.holdings(Ladder.of(chain(LONG))).there(name)


@pytest.mark.parametrize(
    ("device", "host"), [(2000, 2000), (0, 0), (0, 2000), (512, 2000), (512, 512), (64, 1280), (1536, 1536)]
)
def test_how_much_lies_in_which_tier(device: int, host: int) -> None:
    made = house()
    holds(made, "p0", LONG, device, host)
    assert there(made, "p0") == Held(WHOLE, min(host, WHOLE), min(device, WHOLE))
    assert there(made, "p1") == NOTHING


def test_what_was_just_computed_is_on_the_device() -> None:
    made = house()
    holds(made, "p0", LONG, device=64, host=128)
    made.router.holds("p0", chain(LONG[:640]))
    assert there(made, "p0") == Held(WHOLE, 640, 640)
    made.router.holds("p0", chain(LONG))
    assert there(made, "p0") == Held(2000, 2000, 2000)


def test_only_what_is_of_use_counts() -> None:
    assert Held(1792, 640, 64).cut(512) == Held(512, 512, 64)
    assert Held(1792, 640, 64).by_tier == {"device": 64, "host": 576, "disk": 1152}


@pytest.mark.parametrize("better", ["p0", "p1", "p2"])
def test_the_better_tier_wins(better: str) -> None:
    """Whoever is the prompt's home."""
    made = house(prefill=3)
    for name in ("p0", "p1", "p2"):
        holds(made, name, LONG, device=0, host=2000 if name == better else 0)
    plan = made.plan(MORE)
    assert (plan.prefill, plan.cached, plan.fetch) == (better, WHOLE, None)
    assert plan.why["seconds"] == pytest.approx(WHOLE * HOST_S + (2001 - WHOLE) / 1000, abs=1e-4)
    assert plan.why["tiers"] == {better: {"device": 0, "host": WHOLE, "disk": 0}}


def test_a_plan_names_no_tiers_where_all_is_on_the_device() -> None:
    made = house()
    holds(made, "p0", LONG, device=2000)
    assert "tiers" not in made.plan(MORE).why


def test_speeds_that_were_measured_count() -> None:
    made = house(prefill=1)
    worker = made.view.workers["p0"]
    held = Held(1500, 1000, 500)
    assert reach(worker, 2000, held, None, NONE).seconds == pytest.approx(0.5 + 500 * HOST_S + 500 * DISK_S)
    report(made.view, "p0", host_bytes_s=5e8, disk_bytes_s=1e8)
    way = reach(worker, 2000, held, None, NONE)
    assert (way.missing, way.seconds) == (500, pytest.approx(0.5 + 500 * 0.02e-3 + 500 * 0.12e-3))
    assert saved(worker, usable(worker, held)) == pytest.approx(1500 - 10 - 60)


def test_what_is_computed_sooner_than_loaded_counts_as_missing() -> None:
    """Of each tier for itself. A worker that was never heard of is not expected to load anything."""
    made = house(prefill=1, disk_bytes_s=0.9e7)  # a millisecond for 10 kB is 1e7
    worker = made.view.workers["p0"]
    held = Held(1500, 1000, 500)
    way = reach(worker, 2000, held, None, NONE)
    assert (way.missing, way.seconds) == (1000, pytest.approx(1.0 + 500 * HOST_S))
    assert saved(worker, usable(worker, held)) == pytest.approx(1000 - 500 * HOST_S * 1000)
    worker.status = None
    assert reach(worker, 2000, held, None, NONE).missing == 1500


def test_a_decode_worker_is_not_asked_to_compute_what_it_has_on_a_slow_disk() -> None:
    """More than `local_tokens` might have to be computed beside its answers."""
    plans: list[Plan] = []
    for disk_bytes_s in (1e9, 1e6):
        made = house(prefill=1, local_tokens=512, disk_bytes_s=disk_bytes_s)
        holds(made, "d0", LONG)
        plans.append(made.plan(MORE))
    assert [(plan.prefill, plan.decode, plan.new_tokens) for plan in plans] == [("d0", None, 512), ("p0", "d0", None)]
    assert plans[0].cached == WHOLE
    assert plans[0].why["tiers"] == {"d0": {"device": 0, "host": 0, "disk": WHOLE}}


@pytest.mark.parametrize(("device", "host", "load_s"), [(512, 2000, 1280 * HOST_S), (512, 512, 1280 * DISK_S)])
def test_a_lender_loads_first(device: int, host: int, load_s: float) -> None:
    made = house(prefill=1)
    holds(made, "d0", LONG, device, host)
    plan = made.plan(MORE)
    assert fetched(plan) == ("d0", WHOLE)
    assert plan.fetch is not None
    assert plan.fetch.seconds == pytest.approx(0.02 + WHOLE * TOKEN_BYTES / 1e9 + load_s)
    assert set(plan.why["tiers"]) == {"d0"}


def test_what_would_be_loaded_later_than_computed_is_not_fetched() -> None:
    made = house(prefill=1, disk_bytes_s=0.9e7)
    holds(made, "d0", LONG)
    assert made.plan(MORE).fetch is None


def test_who_would_rather_compute_it_does_not_lend_it() -> None:
    made = house(prefill=1, disk_bytes_s=0.9e7)
    holds(made, "d0", LONG, device=64, host=1280)
    plan = made.plan(MORE)
    assert fetched(plan) == ("d0", 1280)
    assert (plan.cached, plan.fetch and plan.fetch.seconds) == (
        1280,
        pytest.approx(0.02 + 1280 * TOKEN_BYTES / 1e9 + (1280 - 64) * HOST_S),
    )


def test_nothing_is_fetched_from_who_has_less_on_its_device() -> None:
    made = house(prefill=1)
    prompt = list(range(9000))
    holds(made, "p0", prompt, device=9000)
    holds(made, "d0", prompt[:640], device=640)
    plan = made.plan(prompt)
    assert (plan.fetch, plan.why["missing"]) == (None, 9000 - 8704)
    report(made.view, "d0", disk_bytes_s=1e6)
    worker, other = made.view.workers["p0"], made.view.workers["d0"]
    way = reach(worker, 10_000, Held(9000, 9000, 9000), other, usable(other, Held(9500, 640, 640)))
    assert (way.fetch, way.missing) == (None, 1000)


def test_of_many_that_share_a_disk_the_one_that_has_it_at_hand_is_a_candidate() -> None:
    made = house(prefill=60)
    for name in made.summaries:
        holds(made, name, LONG, device=2000 if name == "p41" else 0)
    plan = made.plan(MORE)
    assert (plan.prefill, plan.why["candidates"] < 20) == ("p41", True)
    for number in range(8):
        made.router.holds(f"p{number}", chain(LONG[:64]))  # what is believed beside the summaries has its place, too
    assert made.view.holdings(Ladder.of(chain(MORE))).deepest(8)[0] == "p41"


def test_pieces_below_the_device_count_wherever_they_lie() -> None:
    made = house()
    depths = checkpoints(len(LONG) // BLOCK, BLOCK)
    for number, key in enumerate(chain(LONG).numbers(depths).tolist()):
        made.summaries["p0"].add(key, (DISK, HOST)[number % 2])
    made.hear("p0")
    assert there(made, "p0").by_tier == {"device": 0, "host": 576, "disk": WHOLE - 576}


def test_of_lenders_the_one_that_has_it_at_hand() -> None:
    made = house(prefill=1, decode=3)
    for name in made.summaries:
        holds(made, name, LONG[:64], device=64)
    holds(made, "d0", LONG)
    holds(made, "d1", LONG, device=2000)
    holds(made, "d2", LONG, host=2000)
    assert fetched(made.plan(MORE)) == ("d1", WHOLE)
    made = house(prefill=1, decode=2, disk_bytes_s=2e7)
    holds(made, "d0", LONG)
    holds(made, "d1", LONG[:1280], device=1280)
    assert fetched(made.plan(MORE)) == ("d1", 1280)


def test_what_lies_on_the_own_disk_is_fetched_from_a_device_when_that_is_faster() -> None:
    """The rest is loaded or computed behind it."""
    made = house(prefill=1, disk_bytes_s=2e7)
    worker, other = made.view.workers["p0"], made.view.workers["d0"]
    way = reach(worker, 2000, Held(1500, 0, 0), other, Usable(1000, 0.0))
    assert (way.missing, way.fetch and way.fetch.tokens) == (500, 1000)
    assert way.seconds == pytest.approx(0.02 + 1000 * TOKEN_BYTES / 1e9 + 500 * (0.5e-3 + HOST_S) + 0.5)
    report(made.view, "p0", disk_bytes_s=2e9)
    way = reach(worker, 2000, Held(1500, 0, 0), other, Usable(1000, 0.0))
    assert (way.missing, way.fetch) == (500, None)


def test_of_decode_workers_the_one_that_has_it_at_hand() -> None:
    made = house(prefill=1, decode=3)
    holds(made, "d0", LONG)
    holds(made, "d1", LONG[:1536], device=1536)
    holds(made, "d2", LONG, host=2000)
    assert made.plan(LONG).decode == "d2"  # 1,792 tokens, each of which saves its computing but for 5 us
    report(made.view, "d2", host_bytes_s=2e7)
    assert made.plan(LONG).decode == "d0"
    report(made.view, "d0", disk_bytes_s=2e7)
    assert made.plan(LONG).decode == "d1"


def test_a_decode_worker_needs_room_for_what_it_loads() -> None:
    made = house(prefill=1, decode=2)
    holds(made, "d0", LONG, host=2000)
    assert made.plan(LONG).decode == "d0"
    made.hear("d0", free_blocks=100)
    assert made.plan(LONG).decode == "d1"


def test_gateways_know_the_format_of_tiers() -> None:
    made = house()
    statuses = [one.status for one in made.view.workers.values() if one.status is not None]
    assert Limits.of(statuses, GatewayConfig()).tier_format == "exact"
    tiers = TierStatus("int8", 9, 3, 0, 0, 0, False, 0, 0, TierStats())
    assert Limits.of([replace(one, tiers=tiers) for one in statuses], GatewayConfig()).tier_format == "int8"
