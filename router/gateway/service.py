"""Service: from a parsed request to text. It tokenizes, checks limits, dispatches, and turns tokens into pieces."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from router.gateway import metrics
from router.gateway.dispatch import Dispatcher, Output, Prompt
from router.gateway.errors import ApiError, invalid
from router.gateway.schemas import MAX_PROMPTS, ChatRequest, CompletionRequest
from router.gateway.text import Text, TextStream
from transfer.messages import SamplingParams, pack_tokens
from transfer.prefix import PrefixChain

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the workers serve: model name, longest sequence and block in tokens, vocabulary, prefix root key; and what
    the operator lets clients ask for."""

    model: str
    max_model_len: int
    block_size: int
    vocab_size: int
    root: bytes
    max_priority: int
    max_cache_ttl_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to answer; `index` is its place among the request's choices."""

    index: int
    prompt: Prompt
    sampling: SamplingParams
    stops: list[str]

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt.tokens) // 4


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of a choice's answer."""

    index: int
    text: str
    tokens: tuple[int, ...]
    cached_tokens: int
    finish_reason: str | None


class Service:
    """What the routes call."""

    def __init__(self, text: Text, dispatcher: Dispatcher, limits: Limits) -> None:
        self._text = text
        self._dispatcher = dispatcher
        self.limits = limits

    async def chat(self, request: ChatRequest) -> list[Job]:
        """The job of a chat. Raises ApiError for what cannot be served."""
        self.check_model(request.model)
        messages = [message.plain() for message in request.messages]
        self._check_size(sum(len(message["content"]) for message in messages), "messages")
        tokens = await asyncio.to_thread(self._text.chat, messages)
        wanted, name = request.max_completion_tokens, "max_completion_tokens"
        if wanted is None:
            wanted, name = request.max_tokens, "max_tokens"
        return [self._job(0, tokens, request, wanted, name, "messages")]

    async def completion(self, request: CompletionRequest) -> list[Job]:
        """The jobs of a completion request, one a prompt. Raises ApiError for what cannot be served."""
        self.check_model(request.model)
        prompts = await asyncio.to_thread(self._prompts, request.prompt)
        wanted = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        return [self._job(index, one, request, wanted, "max_tokens", "prompt") for index, one in enumerate(prompts)]

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for a model that is not served."""
        if name != self.limits.model:
            raise ApiError(404, f"the model {name[:100]!r} does not exist", "model", "model_not_found")

    async def pieces(self, jobs: list[Job]) -> AsyncGenerator[Piece, None]:
        """The answers of all jobs, interleaved as they come. Closing the iterator aborts what still runs."""
        if len(jobs) == 1:
            async with aclosing(self._answer(jobs[0])) as answer:
                async for piece in answer:
                    yield piece
            return
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._feed(job, queue)) for job in jobs]
        try:
            open_jobs = len(jobs)
            while open_jobs:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    open_jobs -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, job: Job, queue: asyncio.Queue[Piece | BaseException | None]) -> None:
        try:
            async with aclosing(self._answer(job)) as answer:
                async for piece in answer:
                    queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    async def _answer(self, job: Job) -> AsyncGenerator[Piece, None]:
        stream = self._text.stream(job.stops)
        arrived, first = time.monotonic(), True
        async with aclosing(self._dispatcher.generate(job.prompt, job.sampling)) as outputs:
            async for output in outputs:
                if first:
                    first = False
                    metrics.first_token.record(time.monotonic() - arrived)
                    metrics.prompt_tokens.add(job.prompt_tokens)
                    metrics.cached_tokens.add(output.cached_tokens)
                piece = _piece(job.index, output, stream)
                metrics.output_tokens.add(len(piece.tokens))
                yield piece
                if piece.finish_reason is not None:
                    metrics.duration.record(time.monotonic() - arrived)
                    return

    def _prompts(self, prompt: str | list[int] | list[str] | list[list[int]]) -> list[list[int]]:
        """Every prompt as token ids."""
        if isinstance(prompt, str):
            self._check_size(len(prompt), "prompt")
            return [self._text.encode(prompt)]
        if not prompt:
            raise invalid("prompt: must not be empty", "prompt")
        if isinstance(prompt[0], int):
            return [self._known(prompt, "prompt")]
        if len(prompt) > MAX_PROMPTS:
            raise invalid(f"prompt: {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed", "prompt")
        for index, one in enumerate(prompt):
            if isinstance(one, str):
                self._check_size(len(one), f"prompt.{index}")
        return [
            self._text.encode(one) if isinstance(one, str) else self._known(one, f"prompt.{index}")  # type: ignore[arg-type]
            for index, one in enumerate(prompt)
        ]

    def _check_size(self, characters: int, field: str) -> None:
        limit = self.limits.max_model_len
        if self._text.certainly_over(characters, limit):
            raise invalid(
                f"{field}: {characters} characters are more than the context of {limit} tokens can hold",
                field,
                "context_length_exceeded",
            )

    def _check_allowed(self, field: str, value: float, limit: float, setting: str) -> None:
        """Whoever is served first or kept longest is so at the others' cost: the operator decides."""
        if value > limit:
            raise invalid(f"{field}: at most {limit:g} is allowed here ({setting}), got {value:g}", field)

    def _known(self, tokens: list[int], field: str) -> list[int]:
        for position, token in enumerate(tokens):
            if not 0 <= token < self.limits.vocab_size:
                raise invalid(
                    f"{field}.{position}: token id {token} is outside the vocabulary of {self.limits.vocab_size}", field
                )
        return tokens

    def _job(
        self,
        index: int,
        tokens: list[int],
        request: ChatRequest | CompletionRequest,
        wanted: int | None,
        wanted_name: str,
        prompt_name: str,
    ) -> Job:
        limit, length = self.limits.max_model_len, len(tokens)
        if length == 0:
            raise invalid(f"{prompt_name}: must not be empty", prompt_name)
        if length >= limit:
            raise invalid(
                f"{prompt_name}: {length} tokens leave no room for output in the context of {limit} tokens",
                prompt_name,
                "context_length_exceeded",
            )
        if wanted is not None and length + wanted > limit:
            raise invalid(
                f"{wanted_name}: {length} prompt tokens + {wanted} output tokens are more than the context of "
                f"{limit} tokens",
                wanted_name,
                "context_length_exceeded",
            )
        self._check_allowed("priority", request.priority or 0, self.limits.max_priority, "gateway.max_priority")
        self._check_allowed("cache_ttl", request.cache_ttl or 0, self.limits.max_cache_ttl_s, "gateway.max_cache_ttl_s")
        sampling = SamplingParams(
            max_tokens=limit - length if wanted is None else wanted,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(0, request.top_k or 0),
            seed=secrets.randbits(63) if request.seed is None else request.seed,
            ignore_eos=bool(request.ignore_eos),
        )
        packed = pack_tokens(tokens)
        chain = PrefixChain.of(self.limits.root, packed, self.limits.block_size)
        prompt = Prompt(packed, chain, request.priority or 0, request.cache_ttl or 0.0, request.tenant)
        return Job(index, prompt, sampling, request.stops)


def _piece(index: int, output: Output, stream: TextStream) -> Piece:
    """An output as text. A stop string ends the answer at the token that completed it."""
    text, finish, used = "", output.finish_reason, len(output.tokens)
    for number, token in enumerate(output.tokens, 1):
        text += stream.push(token)
        if stream.stopped:
            used = number
            break
    if finish is not None:
        text += stream.finish()
    if stream.stopped:
        finish = "stop"
    return Piece(index, text, output.tokens[:used], output.cached_tokens, finish)
