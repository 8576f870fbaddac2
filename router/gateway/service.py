"""Service: what the routes call. It tokenizes, checks limits, dispatches, and turns tokens into pieces of answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from llguidance import LLMatcher

from router.gateway import accounts, metrics, tracing
from router.gateway.choice import Choice, Piece
from router.gateway.conversation import conversation, shown_tools
from router.gateway.dispatch import Dispatcher
from router.gateway.errors import ApiError, invalid
from router.gateway.guides import grammar
from router.gateway.jobs import Form, Job, Limits, Wanted, jobs
from router.gateway.observed import Observed
from router.gateway.parsers import ReasoningParser, ToolParser, ToolSpec
from router.gateway.schemas.chat import ChatRequest, NamedTool
from router.gateway.schemas.common import Sampling
from router.gateway.schemas.completions import CompletionRequest
from router.gateway.text import Text
from router.gateway.trial import Trials

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""
MAX_PROMPTS = 128
TextOrTokens = str | list[int] | list[str] | list[list[int]]


class Service:
    """`tools` and `reasoning` are how this model's output is parsed; `trials` try grammars before workers
    get them."""

    def __init__(
        self,
        text: Text,
        dispatcher: Dispatcher,
        limits: Limits,
        trials: Trials,
        tools: type[ToolParser],
        reasoning: type[ReasoningParser] | None,
    ) -> None:
        self.text = text
        self.limits = limits
        self._dispatcher = dispatcher
        self._trials = trials
        self._tools = tools
        self._reasoning = reasoning

    async def chat(self, request: ChatRequest) -> list[Job]:
        """The jobs of a chat, one a choice. Raises ApiError for what cannot be served."""
        self.check_model(request.model)
        self.admit(request.tenant, request.priority or 0)
        made, field = await asyncio.to_thread(self._chat, request)
        tracing.asked("chat", request.model, made)
        return await self._tried(made, field)

    async def prompt_tokens(self, request: ChatRequest) -> int:
        """How many tokens the prompt of a chat has. Raises ApiError for what cannot be served."""
        self.check_model(request.model)
        made, _ = await asyncio.to_thread(self._chat, request)
        return made[0].prompt_tokens

    async def completion(self, request: CompletionRequest) -> list[Job]:
        """The jobs of a completion request, one a choice. Raises ApiError for what cannot be served."""
        self.check_model(request.model)
        self.admit(request.tenant, request.priority or 0)
        made, field = await asyncio.to_thread(self._completion, request)
        tracing.asked("text_completion", request.model, made)
        return await self._tried(made, field)

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for a model that is not served."""
        if name != self.limits.model:
            raise ApiError(404, f"the model {name[:100]!r} does not exist", "model", "model_not_found")

    def admit(self, user: str, priority: int = 0) -> None:
        """Raises ApiError 429 for what would wait too long. It is asked before there are tokens: under overload most
        are refused, and that must cost little."""
        account = accounts.current.get()
        self._dispatcher.admit(account.name or user, account.tenant.weight, priority)

    async def tokenized(self, prompt: TextOrTokens, field: str) -> list[list[int]]:
        """What a client sent as `field`, as token ids. Raises ApiError."""
        return [tokens for tokens, _ in await asyncio.to_thread(self._prompts, prompt, field)]

    async def pieces(self, jobs: Sequence[Job]) -> AsyncGenerator[Piece, None]:
        """The answers of all jobs, interleaved as they come. Closing the iterator aborts what still runs. A prompt's
        other choices begin once its first one has: then the prompt is cached."""
        seen = Observed(jobs)
        if len(jobs) == 1:
            async with aclosing(self._answer(jobs[0], seen)) as answer:
                async for piece in answer:
                    yield piece
            return
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        begun = {job.source: asyncio.Event() for job in jobs}
        tasks = [asyncio.create_task(self._feed(job, seen, queue, begun[job.source])) for job in jobs]
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

    async def _tried(self, made: list[Job], field: str) -> list[Job]:
        """The same jobs. Raises ApiError for a grammar that does not compile or that nothing fits."""
        if text := made[0].sampling.guide:
            await self._trials.check(text, field)
        return made

    async def _feed(
        self, job: Job, seen: Observed, queue: asyncio.Queue[Piece | BaseException | None], begun: asyncio.Event
    ) -> None:
        try:
            if not job.leads:
                await begun.wait()  # or this task is cancelled, since the first one has failed
            async with aclosing(self._answer(job, seen)) as answer:
                async for piece in answer:
                    queue.put_nowait(piece)
                    begun.set()
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    async def _answer(self, job: Job, seen: Observed) -> AsyncGenerator[Piece, None]:
        choice = self._choice(job)
        given, last, reason = 0, 0.0, None
        account = accounts.current.get()
        record = self._dispatcher.recent.begin(job.prompt.tokens, job.prompt.tenant, job.sampling.max_tokens)
        try:
            async with aclosing(self._dispatcher.generate(job.prompt, job.sampling, record)) as outputs:
                async for output in outputs:
                    now = time.monotonic()
                    if given:
                        metrics.token_gaps.record(now - last)
                    else:
                        seen.begun(job, output.cached_tokens)
                        account.used(job.prompt_tokens)
                    last = now
                    piece = choice.piece(output)
                    given += len(output.tokens)
                    account.used(len(output.tokens))
                    if job.empty:
                        piece = replace(piece, text="", tokens=(), logprobs=(), calls=(), finish_reason="length")
                    reason = piece.finish_reason
                    yield piece
                    if reason is not None:
                        record.end(reason)
                        return
        finally:
            seen.ended(job, given, reason)

    def _choice(self, job: Job) -> Choice:
        form = job.form
        reasoning = form.reasoning(form.thinking) if form.reasoning is not None else None
        tools = form.tools() if form.tools is not None else None
        return Choice(job.index, self.text.stream(job.stops, form.visible), reasoning, tools, form.single_call)

    # --- in threads: templates, tokenizing and hashing of long prompts take tens of milliseconds -------------------

    def _chat(self, request: ChatRequest) -> tuple[list[Job], str]:
        """The jobs, and the field that their grammar comes from."""
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs: only with logprobs", "top_logprobs")
        _check_stream(request)
        forced = self._forced_calls(request)
        made, field = grammar(request, forced)
        messages, tools = conversation(request, self.text.template or "")
        tokens, end = self.text.chat(messages, tools, request.chat_template_kwargs, self.limits.max_model_len)
        # What follows a grammar is that alone: calls where it forces them, and no reasoning.
        reasoning = None if made else self._reasoning
        form = Form(
            reasoning=reasoning,
            tools=self._tools if forced or (shown_tools(request) and not made) else None,
            thinking=reasoning is not None and reasoning.opened_by(end),
            single_call=request.parallel_tool_calls is False,
        )
        wanted = Wanted(request.max_completion_tokens, "max_completion_tokens", "messages")
        if request.max_completion_tokens is None:
            wanted = Wanted(request.max_tokens, "max_tokens", "messages")
        return jobs(request, [(tokens, None)], wanted, self.limits, made, form), field

    def _completion(self, request: CompletionRequest) -> tuple[list[Job], str]:
        _check_stream(request)
        if request.best_of is not None and request.best_of < (request.n or 1):
            raise invalid(f"best_of: {request.best_of} is less than n: {request.n or 1}", "best_of")
        if request.best_of is not None and request.best_of > (request.n or 1) and request.stream:
            raise invalid("best_of: a stream cannot be chosen from, best_of must be n", "best_of")
        if request.max_tokens == 0 and not request.echo:
            raise invalid("max_tokens: 0 is only allowed with echo, must be at least 1", "max_tokens")
        length = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        prompts = self._prompts(request.prompt, "prompt")
        made, field = grammar(request)
        return jobs(request, prompts, Wanted(length, "max_tokens", "prompt"), self.limits, made), field

    def _prompts(self, prompt: TextOrTokens, field: str) -> list[tuple[list[int], str | None]]:
        """Every prompt as token ids, and as the text that the client sent."""
        if isinstance(prompt, str):
            return [self._prompt(prompt, field)]
        if not prompt:
            raise invalid(f"{field}: must not be empty", field)
        if isinstance(prompt[0], int):
            return [(self.known(prompt, field), None)]
        if len(prompt) > MAX_PROMPTS:
            raise invalid(f"{field}: {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed", field)
        several = cast("list[str | list[int]]", prompt)
        return [self._prompt(one, f"{field}.{index}") for index, one in enumerate(several)]

    def _prompt(self, prompt: str | list[int], field: str) -> tuple[list[int], str | None]:
        if isinstance(prompt, str):
            self.text.check_size(len(prompt), self.limits.max_model_len, field)
            return self.known(self.text.encode(prompt), field), prompt
        return self.known(prompt, field), None

    def known(self, tokens: list[int], field: str) -> list[int]:
        """The same tokens. Raises ApiError for one that the model does not have."""
        for position, token in enumerate(tokens):
            if not 0 <= token < self.limits.vocab_size:
                raise invalid(
                    f"{field}.{position}: token id {token} is outside the vocabulary of {self.limits.vocab_size}", field
                )
        return tokens

    def _forced_calls(self, request: ChatRequest) -> str:
        """The grammar of the calls that have to be made; empty where none has to."""
        choice, tools = request.tool_choice, request.tools or []
        if choice is None or choice in ("auto", "none"):
            return ""
        names = [tool.function.name for tool in tools]
        if isinstance(choice, NamedTool):
            if choice.function.name not in names:
                raise invalid(f"tool_choice: {choice.function.name[:64]!r} is not among the tools", "tool_choice")
            tools = [tool for tool in tools if tool.function.name == choice.function.name]
        elif not tools:
            raise invalid("tool_choice: required needs tools", "tool_choice")
        many = not isinstance(choice, NamedTool) and request.parallel_tool_calls is not False
        specs = [ToolSpec(tool.function.name, tool.function.parameters) for tool in tools]
        try:
            return LLMatcher.grammar_from_lark(self._tools.grammar(specs, many, self.text.added))
        except ValueError as error:
            raise invalid(f"tools: {error}", "tools") from None


def _check_stream(request: Sampling) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options: only with stream", "stream_options")
    if request.wants_running_usage and not request.wants_usage:
        field = "stream_options.continuous_usage_stats"
        raise invalid(f"{field}: only with include_usage", field)
    if request.stream and request.prompt_logprobs is not None:
        raise invalid("prompt_logprobs: not with stream", "prompt_logprobs")
