"""Other routers' rules, by hand, and what a router of a baseline knows."""

from random import Random

from cluster.simulate.baselines import BoundedLoad, CacheAware, Overlap, Product, RoundRobin, Rule, TwoChoices
from cluster.simulate.engine import Engine
from cluster.simulate.informed import Informed
from cluster.simulate.knowledge import Knowledge
from cluster.simulate.loop import Loop
from cluster.simulate.policies import HEADWATER, PEERS, POLICIES
from cluster.simulate.run import Settings, World
from tests.cluster.simulate.conftest import chats, request

RATE = 512.0


class House:
    """Workers, and one router's exact knowledge of them."""

    def __init__(self, workers: int, capacity: int = 1000) -> None:
        self.loop = Loop()
        self.engines = [Engine(f"w{number}", RATE, capacity, self.loop.clock) for number in range(workers)]
        self.known = Knowledge(workers, RATE, Random(1))
        self.number = 0

    def put(self, worker: int, *blocks: int) -> None:
        """A request that runs and stays."""
        self.number += 1
        asked = request(self.number, self.loop.now, *blocks)
        self.known.placed(worker, asked, self.engines[worker].accept(asked), self.loop.now)

    def choose(self, rule: Rule, *blocks: int) -> int:
        return rule.choose(self.known, request(0, self.loop.now, *blocks), self.loop.now)


def test_round_robin_takes_turns() -> None:
    house, rule = House(3), RoundRobin()
    assert [house.choose(rule, 1) for _ in range(4)] == [0, 1, 2, 0]


def test_two_choices_take_the_one_that_is_free_sooner() -> None:
    house = House(2)
    house.put(0, 1, 2, 3)
    assert {house.choose(TwoChoices(), 9) for _ in range(20)} == {1}
    house.loop.now = 100.0
    assert {house.choose(TwoChoices(), 9) for _ in range(40)} == {0, 1}


def test_one_worker_needs_no_second_choice() -> None:
    assert House(1).choose(TwoChoices(), 1) == 0


def test_hashing_keeps_to_one_worker_until_that_has_a_quarter_more_than_its_share() -> None:
    house, rule = House(4), BoundedLoad(blocks=2, load="requests")
    home = house.choose(rule, 1, 2, 3)
    assert house.choose(rule, 1, 2, 99) == home
    assert {house.choose(rule, block, block + 1) for block in range(50)} == {0, 1, 2, 3}
    house.put(home, 1, 2, 3)
    # 1.25 times its share of two requests is 0.6; once everybody has one, its share of five is 1.25.
    assert house.choose(rule, 1, 2, 3) != home
    for other in {0, 1, 2, 3} - {home}:
        house.put(other, 50 + other)
    assert house.choose(rule, 1, 2, 3) == home


def test_bounded_load_counts_tokens_where_it_is_to() -> None:
    house, rule = House(2), BoundedLoad(blocks=1, load="tokens")
    home = house.choose(rule, 1)
    house.put(home, 1, 2, 3, 4, 5, 6)
    house.put(1 - home, 7)
    house.put(1 - home, 8)
    # 1.25 times its share is 5.6 of 9 blocks, or 2.5 of 4 requests.
    assert house.choose(rule, 1) != home
    assert house.choose(BoundedLoad(blocks=1, load="requests"), 1) == home


def test_cache_aware_follows_the_cache_until_the_load_is_out_of_balance() -> None:
    house, rule = House(3), CacheAware(threshold=0.3, absolute=2)
    house.put(0, 1, 2)
    assert house.choose(rule, 1, 2, 3) == 0
    assert house.choose(rule, 1, 4, 5, 6) != 0  # too little of it, so the least loaded
    house.put(0, 50)
    assert house.choose(rule, 1, 2, 3) == 0
    house.put(0, 51)
    assert house.choose(rule, 1, 2, 3) != 0


def test_overlap_weighs_what_is_missing_against_what_runs() -> None:
    house = House(2)
    house.put(0, 1, 2, 3, 4)
    house.known.computed(0, house.engines[0].accept(request(9, 0, 1, 2, 3, 4)))
    house.known.queued_tokens[0] = 0
    # Worker 0: weight * (5 - 4) + 4; worker 1: weight * 5.
    assert house.choose(Overlap(weight=0.9), 1, 2, 3, 4, 5) == 1
    assert house.choose(Overlap(weight=1.1), 1, 2, 3, 4, 5) == 0


def test_the_product_of_missing_tokens_and_batch() -> None:
    house = House(2)
    house.put(0, 1, 2, 3)
    # Worker 0: 1 block * 2; worker 1: 4 blocks * 1. Of 2 and 4 missing blocks, with what waits: (2 + 3) * 2 and 4 * 1.
    assert house.choose(Product(tokens="own", alone=1), 1, 2, 3, 4) == 0
    assert house.choose(Product(tokens="queued", alone=1), 1, 2, 8, 9) == 1


def test_ties_are_broken_at_random() -> None:
    house = House(4)
    for rule in (CacheAware(), Overlap(), Product()):
        assert {house.choose(rule, 1, 2) for _ in range(100)} == {0, 1, 2, 3}


def test_every_peer_has_as_many_constants_to_choose_from() -> None:
    assert PEERS == ["chwbl", "sglang", "dynamo", "lmetric"]
    assert {len(POLICIES[name].choices) for name in (HEADWATER, *PEERS)} == {12}


def test_no_constant_by_default_is_the_least_or_the_greatest_that_was_tried() -> None:
    """Then a better one could be beyond it."""
    for name, rule in {"chwbl": BoundedLoad, "sglang": CacheAware, "dynamo": Overlap, "lmetric": Product}.items():
        for constant, values in POLICIES[name].grid.items():
            default = getattr(rule(), constant)
            assert default in values
            if not isinstance(default, str):
                assert min(values) < default < max(values), (name, constant)


def test_exact_knowledge_is_what_the_caches_hold() -> None:
    """Also when blocks are evicted."""
    house, draw = House(5, capacity=40), Random(3)
    trace = chats(20, 8, seed=3, beginning=2)
    evicted = 0
    for asked in trace:
        assert house.known.depths(asked) == [engine.cached(asked) for engine in house.engines]
        worker = draw.randrange(5)
        job = house.engines[worker].accept(asked)
        house.engines[worker].release(job)
        evicted += len(job.removed)
        house.known.placed(worker, asked, job, 0.0)
        house.known.computed(worker, job)
        house.known.ended(worker, asked)
    assert evicted > 50
    assert house.known.requests == house.known.queued_tokens == house.known.blocks == [0] * 5


def test_a_router_knows_its_own_requests_at_once_and_others_late() -> None:
    loop = Loop()
    engines = [Engine(f"w{number}", RATE, 100, loop.clock) for number in range(2)]
    world = World(Settings(workers=2, routers=2, rate=RATE, staleness_s=0.5), engines, loop, Random(1))
    routers = Informed(world, CacheAware(absolute=0))
    asked = request(0, 0, 1, 2)
    job = engines[0].accept(asked)
    routers.placed(0, asked, 0, job)
    seen = []
    for moment in (0.4, 0.6, 2.4, 2.6):
        loop.at(moment, lambda: seen.append([routers._known_to(router).requests[0] for router in (0, 1)]))
    loop.at(2.0, routers.ended, 0, asked, 0, job)
    loop.run()
    assert seen == [[1, 0], [1, 1], [0, 1], [0, 0]]
