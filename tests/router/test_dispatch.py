"""The dispatcher over workers that are not there: whom it asks when some of them have failed."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from router.config import GatewayConfig, RouterConfig
from router.gateway.dispatch import Dispatcher, Output, Prompt
from router.gateway.errors import ApiError
from router.route import Router
from router.view import Ladder, View
from transfer.messages import Delta, Outcome, Request, SamplingParams, TokenLogprobs, pack_tokens
from transfer.prefix import PrefixChain, root_key


class Dead:
    """A directory of workers of which one has died, which nobody has noticed yet: the one that is asked first."""

    def __init__(self, role: str) -> None:
        self.dispatcher: Dispatcher | None = None
        self._role = role
        self._dead = ""

    async def call(self, name: str, method: str, *args: Any, timeout: float) -> Any:
        assert self.dispatcher is not None
        if method != "generate":
            return None
        request, decode, *_ = args
        needed = name if self._role == "prefill" else decode
        self._dead = self._dead or needed
        if needed == self._dead:
            return Outcome("failed", error=f"no answer from {needed}")
        self.dispatcher.deliver([Delta(request.request_id, 0, (7, 8), 0, "length")])
        return Outcome("handed off")


@pytest.mark.parametrize(("failing", "workers"), [("decode", (1, 2)), ("prefill", (2, 1)), ("decode", (2, 2))])
async def test_a_worker_that_failed_is_asked_again_only_where_its_role_has_no_other(
    failing: str, workers: tuple[int, int]
) -> None:
    roles = zip(("prefill", "decode"), workers, strict=True)
    view = View([(f"{role}-{number}", role) for role, count in roles for number in range(count)])
    config = RouterConfig(local_tokens=0, attempts=2)
    directory = Dead(failing)
    directory.dispatcher = Dispatcher("g", Router(view, config), directory, config, GatewayConfig(request_timeout_s=5))
    tokens = pack_tokens(range(50))
    prompt = Prompt(tokens, PrefixChain.of(root_key("model"), tokens, 16))
    given = [output async for output in directory.dispatcher.generate(prompt, SamplingParams(2))]
    assert [output.tokens for output in given] == [(7, 8)]
    await asyncio.sleep(0)


class Forgetful:
    """A directory of decode workers that have lost everything."""

    def __init__(self) -> None:
        self.dispatcher: Dispatcher | None = None
        self.asked: list[tuple[str, str | None]] = []

    async def call(self, name: str, method: str, *args: Any, timeout: float) -> Any:
        assert self.dispatcher is not None
        if method != "generate":
            return None
        request, decode, _, new_tokens, _ = args
        self.asked.append((name, decode))
        if new_tokens is not None:
            return Outcome("stale")
        self.dispatcher.deliver([Delta(request.request_id, 0, (7, 8), 0, "length")])
        return Outcome("handed off")


async def test_decode_workers_that_lack_what_was_believed_cost_one_detour_and_no_candidate() -> None:
    view = View([("prefill-0", "prefill"), *((f"decode-{number}", "decode") for number in range(3))])
    config = RouterConfig(candidates=1)
    directory, router = Forgetful(), Router(view, config)
    directory.dispatcher = Dispatcher("g", router, directory, config, GatewayConfig(request_timeout_s=5))
    tokens = pack_tokens(range(2000))
    prompt = Prompt(tokens, PrefixChain.of(root_key("model"), tokens, 16))
    for number in range(3):
        router.holds(f"decode-{number}", prompt.chain)
    given = [output async for output in directory.dispatcher.generate(prompt, SamplingParams(2))]
    assert [output.tokens for output in given] == [(7, 8)]
    (first, nobody), (second, decode) = directory.asked
    assert (first[:6], nobody, second) == ("decode", None, "prefill-0")
    assert decode is not None
    await asyncio.sleep(0)
    assert all(one.in_flight == one.sent.tokens == one.decodes == 0 for one in view.workers.values())
    assert bool(view.holdings(Ladder.of(prompt.chain)).soon(first).total) == (first == decode)


class Fickle(Forgetful):
    """The only decode worker fails once and has then lost everything."""

    async def call(self, name: str, method: str, *args: Any, timeout: float) -> Any:
        if method == "generate" and not self.asked:
            self.asked.append((name, args[1]))
            return Outcome("failed", error="engine")
        return await super().call(name, method, *args, timeout=timeout)


async def test_a_decode_worker_that_failed_and_then_lacks_what_was_believed_is_not_called_busy() -> None:
    view = View([("prefill-0", "prefill"), ("decode-0", "decode")])
    config = RouterConfig()
    directory, router = Fickle(), Router(view, config)
    directory.dispatcher = Dispatcher("g", router, directory, config, GatewayConfig(request_timeout_s=5))
    tokens = pack_tokens(range(2000))
    prompt = Prompt(tokens, PrefixChain.of(root_key("model"), tokens, 16))
    router.holds("decode-0", prompt.chain)
    given = [output async for output in directory.dispatcher.generate(prompt, SamplingParams(2))]
    assert [output.tokens for output in given] == [(7, 8)]
    assert directory.asked[-1] == ("prefill-0", "decode-0")
    await asyncio.sleep(0)
    assert all(one.in_flight == one.sent.tokens == one.decodes == 0 for one in view.workers.values())


async def test_what_an_answer_leaves_is_believed_without_its_last_token() -> None:
    """Whose KV nobody has computed: with it the second block would be whole."""
    view = View([("prefill-0", "prefill"), ("decode-0", "decode")])
    config = RouterConfig(local_tokens=0)
    directory, router = Forgetful(), Router(view, config)
    directory.dispatcher = Dispatcher("g", router, directory, config, GatewayConfig(request_timeout_s=5))
    tokens = pack_tokens(range(30))
    prompt = Prompt(tokens, PrefixChain.of(root_key("model"), tokens, 16))
    given = [output async for output in directory.dispatcher.generate(prompt, SamplingParams(2))]
    assert [output.tokens for output in given] == [(7, 8)]
    await asyncio.sleep(0)
    whole = prompt.chain.extended(tokens + pack_tokens([7, 8]))
    assert len(whole.keys) == 2
    held = view.holdings(Ladder.of(whole))
    assert (held.there("prefill-0").total, held.there("decode-0").total) == (0, 0)
    held = view.holdings(Ladder.of(prompt.chain))
    assert (held.there("prefill-0").total, held.there("decode-0").total) == (16, 16)


class Busy(Forgetful):
    """A directory in which whoever is in `full` is busy, and all others are if the router believes them idle. With
    `last_full` the first that is asked without a condition turns out to be full, too."""

    def __init__(self, *full: str, last_full: bool = False) -> None:
        super().__init__()
        self._full = full
        self._last_full = last_full
        self.limits: list[int | None] = []

    async def call(self, name: str, method: str, *args: Any, timeout: float) -> Any:
        assert self.dispatcher is not None
        if method != "generate":
            return None
        request, decode, _, _, dispatch = args
        self.asked.append((name, decode))
        self.limits.append(dispatch.most_queued)
        if name in self._full:
            return Outcome("busy", queued=9, queued_tokens=5000)
        if self._last_full and dispatch.most_queued is None:
            self._full, self._last_full = (*self._full, name), False
            return Outcome("busy", queued=9, queued_tokens=5000)
        if decode in self._full:
            return Outcome("busy", queued=7, worker=decode)
        if dispatch.most_queued is not None and dispatch.most_queued < 5000:
            return Outcome("busy", queued_tokens=5000)
        self.dispatcher.deliver([Delta(request.request_id, 0, (7, 8), 0, "length")])
        return Outcome("handed off")


async def busy(directory: Busy, prefill: int, decode: int) -> list[Output]:
    roles = (("prefill", prefill), ("decode", decode))
    view = View([(f"{role}-{number}", role) for role, count in roles for number in range(count)])
    config = RouterConfig(local_tokens=0)
    router = Router(view, config)
    directory.dispatcher = Dispatcher("g", router, directory, config, GatewayConfig(request_timeout_s=5))
    tokens = pack_tokens(range(100))
    prompt = Prompt(tokens, PrefixChain.of(root_key("model"), tokens, 16))
    try:
        return [output async for output in directory.dispatcher.generate(prompt, SamplingParams(2))]
    finally:
        await asyncio.sleep(0)
        assert all(one.in_flight == one.sent.tokens == one.decodes == 0 for one in view.workers.values())


async def test_the_last_candidate_takes_what_is_more_than_was_believed() -> None:
    directory = Busy()
    assert [output.tokens for output in await busy(directory, 4, 1)] == [(7, 8)]
    assert len({name for name, _ in directory.asked}) == 3
    assert [limit is None for limit in directory.limits] == [False, False, True]


async def test_the_only_candidate_is_asked_again_without_a_condition() -> None:
    directory = Busy()
    assert [output.tokens for output in await busy(directory, 1, 1)] == [(7, 8)]
    assert [limit is None for limit in directory.limits] == [False, True]


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
async def test_whoever_only_had_more_to_do_than_was_believed_is_asked_before_the_client_is_turned_away(
    workers: int,
) -> None:
    """The last candidate turns out to be at its bound, and so does the next one that is asked for certain."""
    directory = Busy(last_full=True)
    assert [output.tokens for output in await busy(directory, workers, 1)] == [(7, 8)]
    asked = [name for name, _ in directory.asked]
    certain = [number for number, limit in enumerate(directory.limits) if limit is None]
    assert len(certain) == 2
    assert asked[certain[1]] in asked[: certain[0]]  # it had refused before


async def test_when_all_are_full_the_client_is_told_so() -> None:
    with pytest.raises(ApiError, match="every candidate is busy; the last had 9 requests queued") as error:
        await busy(Busy("prefill-0", "prefill-1"), 2, 1)
    assert error.value.status == 429


async def test_a_decode_worker_that_is_full_is_avoided_and_not_the_prefill_worker() -> None:
    directory = Busy("decode-0", "decode-1")
    with pytest.raises(ApiError, match=r"decode-\d is busy with 7 requests queued") as error:
        await busy(directory, 1, 2)
    assert error.value.status == 429
    directory = Busy("decode-0", "decode-1")
    assert [output.tokens for output in await busy(directory, 1, 3)] == [(7, 8)]
    assert directory.asked[-1] == ("prefill-0", "decode-2")


class Told:
    """A directory of one worker, which does what each of `steps` says, one a request."""

    def __init__(self, *steps: Outcome | tuple[Delta, ...]) -> None:
        self.dispatcher: Dispatcher | None = None
        self.requests: list[Request] = []
        self._steps = list(steps)

    async def call(self, name: str, method: str, *args: Any, timeout: float) -> Any:
        assert self.dispatcher is not None
        if method != "generate":
            return None
        self.requests.append(args[0])
        step = self._steps.pop(0)
        if isinstance(step, Outcome):
            return step
        self.dispatcher.deliver([replace(delta, request_id=args[0].request_id) for delta in step])
        return Outcome("done")


def told(*steps: Outcome | tuple[Delta, ...], **prompt: Any) -> tuple[Told, AsyncGenerator[Output, None]]:
    directory = Told(*steps)
    router = Router(View([("both-0", "both")]), RouterConfig())
    directory.dispatcher = Dispatcher("g", router, directory, RouterConfig(), GatewayConfig(request_timeout_s=5))
    tokens = pack_tokens(range(50))
    one = Prompt(tokens, PrefixChain.of(root_key("model"), tokens, 16), **prompt)
    params = SamplingParams(5, temperature=0, prompt_logprobs=0, min_tokens=3, guide="g", frequency_penalty=1.0)
    return directory, directory.dispatcher.generate(one, params)


async def test_who_goes_on_knows_what_was_answered_and_is_not_asked_about_the_prompt_again() -> None:
    first = Delta("", 0, (7, 8), 3, prompt_logprobs=(TokenLogprobs(1, -1.0),))
    directory, outputs = told((first, Delta("", 2, (), 0, error="gone")), (Delta("", 0, (9, 10, 11), 0, "length"),))
    given = [output async for output in outputs]
    assert [output.tokens for output in given] == [(7, 8), (9, 10, 11)]
    assert given[0].prompt_logprobs == first.prompt_logprobs
    begun, resumed = directory.requests
    assert (begun.answered, begun.sampling.max_tokens, begun.sampling.prompt_logprobs) == (0, 5, 0)
    assert (resumed.answered, resumed.sampling.max_tokens, resumed.sampling.prompt_logprobs) == (2, 3, None)
    assert resumed.prompt == begun.prompt + pack_tokens([7, 8])
    assert (resumed.sampling.min_tokens, resumed.sampling.guide, resumed.sampling.frequency_penalty) == (3, "g", 1.0)


@pytest.mark.parametrize(
    "step", [Outcome("refused", error="no token fits"), (Delta("", 0, (), 0, error="no token fits", refused=True),)]
)
async def test_what_no_worker_can_answer_is_asked_once_and_is_the_client_s_mistake(step: Any) -> None:
    directory, outputs = told(step)
    with pytest.raises(ApiError, match="no token fits") as caught:
        await anext(outputs)
    assert caught.value.status == 400
    assert len(directory.requests) == 1


async def test_a_request_ends_at_its_own_deadline() -> None:
    directory, outputs = told((), timeout_s=0.2)
    begun = time.monotonic()
    with pytest.raises(ApiError, match=r"within 0\.2 s") as caught:
        await anext(outputs)
    assert caught.value.status == 504
    assert 0.15 < time.monotonic() - begun < 2
    assert directory.requests[0].timeout_s <= 0.2
