"""Several choices of several prompts: in which order they begin, how they are counted and numbered."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from router.config import GatewayConfig
from router.gateway.text import Text
from tests.router.serving import MODEL, Played, application
from transfer.messages import Delta, Request, TokenLogprobs, unpack_tokens


class Numbered:
    """Answers each request with three tokens, the first of them once `open` is set; `begun` are prompts in order."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, played: Played, request: Request) -> None:
        first = int(unpack_tokens(request.prompt)[0])
        self.begun.append((first, request.sampling.seed))
        await self.open.wait()
        assert played.dispatcher is not None
        wanted = request.sampling.logprobs is not None
        likely = -0.1 * (request.sampling.seed % 3)
        for start, token in enumerate((300, 301, 302)):
            told = (TokenLogprobs(token, likely),) if wanted else ()
            finish = "length" if start == 2 else None
            delta = Delta(request.request_id, start, (token,), 16 * (request.sampling.seed > 5), finish, logprobs=told)
            played.dispatcher.deliver([delta])
            await asyncio.sleep(0)


async def sent(text: Text, play: Any, path: str, tier_format: str = "exact", **body: Any) -> httpx.Response:
    app = application(text, Played(play), GatewayConfig(), tier_format=tier_format)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        answer = await http.post(path, json={"model": MODEL, "max_tokens": 3, **body})
    assert answer.status_code == 200, answer.text
    return answer


async def post(text: Text, play: Any, **body: Any) -> dict[str, Any]:
    whole: dict[str, Any] = (await sent(text, play, "/v1/completions", **body)).json()
    return whole


async def test_choices_are_prompt_major_and_each_prompt_is_counted_once(text: Text) -> None:
    whole = await post(text, Numbered(), prompt=[[1] * 20, [2] * 30], n=3, seed=5)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (50, 18)
    # The first choices found nothing; that the others found their prompt does not count.
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_cached_tokens_are_told_by_tier(text: Text) -> None:
    """As the first choice of each prompt found them; a worker says so with the first token only."""

    async def play(played: Played, request: Request) -> None:
        assert played.dispatcher is not None
        first, other = int(unpack_tokens(request.prompt)[0]), request.sampling.seed > 5
        for start, token in enumerate((300, 301)):
            loaded = (0, 0) if start else (16 * first, 8 * first) if not other else (1, 1)
            delta = Delta(request.request_id, start, (token,), 64, "length" if start else None, loaded=loaded)
            played.dispatcher.deliver([delta])
            await asyncio.sleep(0)

    whole = await post(text, play, prompt=[[1] * 70, [2] * 80], n=2, seed=5)
    details = whole["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 128, "cached_tokens_by_tier": {"device": 56, "host": 48, "disk": 24}}
    whole = await post(text, Numbered(), prompt=[1] * 20, seed=6)
    details = whole["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 16, "cached_tokens_by_tier": {"device": 16, "host": 0, "disk": 0}}


CHAT = {"messages": [{"role": "user", "content": "What is a headwater, and where does it go?"}]}


@pytest.mark.parametrize(("path", "body"), [("completions", {"prompt": [1] * 20}), ("chat/completions", CHAT)])
async def test_a_lossy_format_is_told_with_cached_tokens(text: Text, path: str, body: dict[str, Any]) -> None:
    """Wherever they came from, and only if there are any; also in streams."""
    for seed, tier_format, told in ((6, "int8", "int8"), (6, "exact", None), (5, "fp8", None)):
        whole = (await sent(text, Numbered(), f"/v1/{path}", tier_format, seed=seed, **body)).json()
        details = whole["usage"]["prompt_tokens_details"]
        assert (details["cached_tokens"], details.get("cached_tokens_format")) == (16 if seed > 5 else 0, told)
        assert ("cached_tokens_format" in details) == (told is not None)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = await sent(text, Numbered(), f"/v1/{path}", "fp8", seed=6, **options, **body)
    last = json.loads(stream.text.split("data: ")[-2])
    assert last["usage"]["prompt_tokens_details"]["cached_tokens_format"] == "fp8"


async def test_other_choices_begin_when_the_first_has_a_token(text: Text) -> None:
    play = Numbered()
    play.open.clear()
    asking = asyncio.create_task(post(text, play, prompt=[[1] * 20, [2] * 30], n=3, seed=5))
    while len(play.begun) < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # for those that should not begin
    assert sorted(play.begun) == [(1, 5), (2, 5)]
    play.open.set()
    await asking
    assert sorted(play.begun) == [(prompt, seed) for prompt in (1, 2) for seed in (5, 6, 7)]


async def test_the_likeliest_of_several_are_returned(text: Text) -> None:
    whole = await post(text, Numbered(), prompt=[[1] * 20, [2] * 30], best_of=3, n=2, seed=5, echo=True)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in whole["choices"]] == [None] * 4
    assert whole["usage"]["completion_tokens"] == 18
    whole = await post(text, Numbered(), prompt=[1] * 20, best_of=3, n=2, seed=5, logprobs=0)
    assert [choice["logprobs"]["token_logprobs"][0] for choice in whole["choices"]] == pytest.approx([0.0, -0.1])


async def test_a_failure_of_one_choice_ends_all(text: Text) -> None:
    async def play(played: Played, request: Request) -> None:
        assert played.dispatcher is not None
        error = Delta(request.request_id, 0, (), 0, error="no", refused=True)
        played.dispatcher.deliver([error if unpack_tokens(request.prompt)[0] == 2 else Delta("", 0, (), 0)])
        await asyncio.sleep(60)

    played = Played(play)
    app = application(text, played, GatewayConfig())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": [[1] * 20, [2] * 30], "n": 2})
    assert answer.status_code == 400
    await played.all_aborted()
    assert len(played.requests) == 2
