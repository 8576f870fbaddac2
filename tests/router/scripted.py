"""A service whose answers are written down, behind the real application and HTTP server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from router.config import GatewayConfig
from router.gateway.accounts import Keyring
from router.gateway.app import create_app
from router.gateway.choice import Piece
from router.gateway.errors import ApiError
from router.gateway.parsers import CallDelta
from router.gateway.schemas.chat import ChatRequest
from tests.router.serving import serving

MODEL = "model"
PROMPT_TOKENS, CACHED_TOKENS = 20, 16
JOBS: Any = [SimpleNamespace(index=0, leads=True, prompt_tokens=PROMPT_TOKENS)]
Step = Piece | ApiError | asyncio.Event


def piece(text: str = "", finish: str | None = None, **more: Any) -> Piece:
    """A piece of one token."""
    return Piece(index=0, text=text, tokens=(1,), cached_tokens=CACHED_TOKENS, finish_reason=finish, **more)


def text_pieces(*texts: str, finish: str = "stop", **more: Any) -> list[Piece]:
    """An answer of plain text."""
    return [*(piece(text) for text in texts[:-1]), piece(texts[-1], finish, **more)]


def tool_pieces() -> list[Piece]:
    """An answer that thinks, says something and calls two functions."""
    return [
        piece(reasoning="I need ", reasoning_tokens=1),
        piece("\n\n", reasoning="both.", reasoning_tokens=1),
        piece("Let me "),
        piece("look.\n"),
        piece(calls=(CallDelta(0, "call_a", "weather", ""),)),
        piece(calls=(CallDelta(0, None, None, '{"city": '),)),
        piece("\n", calls=(CallDelta(0, None, None, '"Paris"}'), CallDelta(1, "call_b", "time", "{}"))),
        piece(finish="tool_calls"),
    ]


async def played(steps: list[Step]) -> AsyncIterator[Piece]:
    """What a service does: pieces, waits for an event, or fails."""
    for step in steps:
        if isinstance(step, ApiError):
            raise step
        if isinstance(step, asyncio.Event):
            await step.wait()
        else:
            yield step


class Letters:
    """The text of tokens that are characters' numbers."""

    def name(self, token: int) -> str:
        return chr(token)

    def bytes_of(self, token: int, first: bool = False) -> bytes:
        return chr(token).encode()


TEXT: Any = Letters()


class Scripted:
    """Answers each chat with the next of `answers`, the last one again and again; `asked` are the chats, and `closed`
    counts answers that are over."""

    def __init__(self, *answers: list[Step]) -> None:
        self.answers = list(answers)
        self.asked: list[ChatRequest] = []
        self.closed = 0
        self.text = TEXT
        self.limits = SimpleNamespace(model=MODEL, max_model_len=1000, tier_format="exact")

    def check_model(self, name: str) -> None:
        if name != MODEL:
            raise ApiError(404, f"the model {name!r} does not exist", "model", "model_not_found")

    async def chat(self, request: ChatRequest) -> list[Any]:
        self.check_model(request.model)
        if (request.max_tokens or request.max_completion_tokens or 0) > self.limits.max_model_len:
            field = "max_tokens" if request.max_tokens else "max_completion_tokens"
            raise ApiError(400, f"{field}: more than the context", field, "context_length_exceeded")
        self.asked.append(request)
        return JOBS

    async def prompt_tokens(self, request: ChatRequest) -> int:
        jobs = await self.chat(request)
        return int(jobs[0].prompt_tokens)

    async def pieces(self, jobs: list[Any]) -> AsyncIterator[Piece]:
        steps = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        try:
            async for one in played(steps):
                yield one
        finally:
            self.closed += 1


@asynccontextmanager
async def gateway(*answers: list[Step], ready: Callable[[], bool] = lambda: True) -> AsyncIterator[Any]:
    """Serve scripted answers; has `service` and `url`."""
    config, service = GatewayConfig(), Scripted(*answers)
    app = create_app(service, ready, lambda: b"", config, Keyring())  # type: ignore[arg-type]
    async with serving(app, config) as (port, _):
        yield SimpleNamespace(service=service, url=f"http://127.0.0.1:{port}")


def events_of(data: bytes) -> list[tuple[str, str]]:
    """Names and data of server-sent events."""
    events = []
    for block in data.decode().split("\n\n"):
        if block and not block.startswith(":"):
            name, text = block.split("\n")
            events.append((name.removeprefix("event: "), text.removeprefix("data: ")))
    return events
