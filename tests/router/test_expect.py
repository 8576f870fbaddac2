"""Workers that come, leave, go and change their roles while a router decides."""

import asyncio

import pytest

from router.config import GatewayConfig, RouterConfig
from router.gateway.dispatch import Dispatcher, Prompt
from router.gateway.errors import ApiError
from router.route import NoWorkers, Router
from router.view import View
from tests.router.test_dispatch import Forgetful
from tests.router.test_route import LONG, chain, report
from tests.router.test_view import House
from transfer.messages import Delta, Outcome, SamplingParams, WorkerSpec, pack_tokens, unpack_tokens
from transfer.prefix import PrefixChain, root_key


def specs(*roles: str, leaving: str = "") -> list[WorkerSpec]:
    """From names and roles, as `name:role`."""
    return [WorkerSpec(name, role, name == leaving) for name, role in (one.split(":") for one in roles)]


def test_one_that_is_new_gets_work_once_it_has_answered() -> None:
    view = View([("p0", "prefill"), ("d0", "decode")])
    router = Router(view, RouterConfig(local_tokens=0))
    router.expect(specs("p0:prefill", "p1:prefill", "d0:decode"))
    plans = {router.plan(chain([number] * 40), 40, True).prefill for number in range(20)}
    assert plans == {"p0"}
    report(view, "p1")
    plans = {router.plan(chain([number] * 40), 40, True).prefill for number in range(20)}
    assert plans == {"p0", "p1"}


def test_one_that_leaves_gets_nothing_but_lends() -> None:
    house = House(prefill=2, decode=2)
    house.holds("d0", LONG)
    for name in house.view.workers:
        report(house.view, name, bytes_s=1e9)
    house.router.expect(specs("p0:prefill", "p1:prefill", "d0:decode", "d1:decode", leaving="d0"))
    plan = house.plan(LONG)
    assert plan.decode == "d1"
    assert plan.fetch is not None
    assert plan.fetch.worker == "d0"
    house.router.expect(specs("p0:prefill", "p1:prefill", "d0:decode", "d1:decode"))
    assert house.plan(LONG).decode == "d0"


def test_where_the_last_of_a_role_leaves_nobody_is_left() -> None:
    view = View([("p0", "prefill"), ("d0", "decode")])
    router = Router(view, RouterConfig())
    router.expect(specs("p0:prefill", "d0:decode", leaving="d0"))
    assert not view.ready
    with pytest.raises(NoWorkers, match="no decode worker"):
        router.plan(chain(LONG), len(LONG), True)


def test_roles_change_while_prompts_are_under_way() -> None:
    """And what is counted comes back to nothing."""
    view = View([("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")])
    router = Router(view, RouterConfig(local_tokens=0))
    plans = [router.plan(chain([number] * 40), 40, True) for number in range(12)]
    tickets = [router.dispatch(plan, chain([number] * 40), 40) for number, plan in enumerate(plans)]
    router.expect(specs("p0:prefill", "p1:decode", "d0:decode"))
    assert {router.plan(chain([number] * 40), 40, True).prefill for number in range(20)} == {"p0"}
    given = [router.plan(chain([number] * 40), 40, True) for number in range(12)]
    more = [router.dispatch(plan, chain([number] * 40), 40) for number, plan in enumerate(given)]
    assert {plan.decode for plan in given} <= {"p1", "d0"}
    assert "p1" in {plan.decode for plan in given}
    router.expect(specs("p0:prefill", "d0:decode"))
    assert list(view.workers) == ["p0", "d0"]
    for ticket in tickets + more:
        ticket.close()
    assert view.computing == 0


def test_what_is_said_of_workers_that_are_gone_is_ignored() -> None:
    view = View([("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")])
    router = Router(view, RouterConfig())
    report(view, "p1")
    late = view.workers["p1"].status
    assert late is not None
    router.holds("p1", chain(LONG))
    router.expect(specs("p0:prefill", "d0:decode"))
    view.mark_dead("p1")
    view.full("p1")
    view.queue_is("p1", 100)
    router.holds("p1", chain(LONG))
    router.lacks("p1", chain(LONG), 0)
    assert not view.update(late)
    assert router.plan(chain(LONG), len(LONG), True).fetch is None


class Leaving(Forgetful):
    """Workers that leave under a request, each after three tokens more, until `stays` of them have left."""

    def __init__(self, stays: int) -> None:
        super().__init__()
        self.stays = stays
        self.prompts: list[list[int]] = []

    async def call(self, name: str, method: str, *args: object, timeout: float) -> object:
        assert self.dispatcher is not None
        if method != "generate":
            return None
        request = args[0]
        self.asked.append((name, args[1]))  # type: ignore[arg-type]
        self.prompts.append(unpack_tokens(request.prompt).tolist())  # type: ignore[attr-defined]
        left = len(self.asked) <= self.stays
        tokens = tuple(range(100, 103))
        said = [Delta(request.request_id, 0, tokens, 0, None if left else "length")]  # type: ignore[attr-defined]
        if left:
            said.append(Delta(request.request_id, 0, (), 0, error="leaves", moved=True))  # type: ignore[attr-defined]
        self.dispatcher.deliver(said)
        return Outcome("handed off")


@pytest.mark.parametrize("stays", [1, 7])
async def test_what_a_worker_that_leaves_has_begun_goes_on_elsewhere_and_is_no_failure(stays: int) -> None:
    view = View([("p0", "prefill"), ("d0", "decode"), ("d1", "decode")])
    config = RouterConfig(local_tokens=0, attempts=1)
    directory, router = Leaving(stays), Router(view, config)
    directory.dispatcher = Dispatcher("g", router, directory, config, GatewayConfig(request_timeout_s=5))
    tokens = pack_tokens(range(50))
    prompt = Prompt(tokens, PrefixChain.of(root_key("model"), tokens, 16))
    given = [output async for output in directory.dispatcher.generate(prompt, SamplingParams(3 * (stays + 1)))]
    assert [output.tokens for output in given] == [(100, 101, 102)] * (stays + 1)
    assert directory.prompts == [[*range(50), *[100, 101, 102] * times] for times in range(stays + 1)]
    last = directory.asked[-2][1]
    assert last is not None
    whole = prompt.chain.extended(tokens + pack_tokens(([100, 101, 102] * stays)[:-1]))
    assert router.view.soon.depths(whole.keys)[last][1] == len(
        whole.keys
    )  # what the last one holds can be copied from there
    await asyncio.sleep(0)
    assert all(one.in_flight == one.decodes == 0 for one in view.workers.values())


async def test_a_request_does_not_move_for_ever() -> None:
    view = View([("p0", "prefill"), ("d0", "decode")])
    config = RouterConfig(local_tokens=0, attempts=1)
    directory = Leaving(1000)
    directory.dispatcher = Dispatcher("g", Router(view, config), directory, config, GatewayConfig(request_timeout_s=5))
    tokens = pack_tokens(range(50))
    prompt = Prompt(tokens, PrefixChain.of(root_key("model"), tokens, 16))
    with pytest.raises(ApiError, match="could not be completed"):
        async for _ in directory.dispatcher.generate(prompt, SamplingParams(10_000)):
            pass
    assert len(directory.asked) == 65
