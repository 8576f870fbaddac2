"""Answers: pieces as OpenAI's response objects, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from router.gateway.choice import Piece
from router.gateway.errors import ApiError
from router.gateway.jobs import Job
from router.gateway.logprobs import LogprobsView
from router.gateway.parsers import CallDelta
from router.gateway.schemas.chat import ChatRequest
from router.gateway.schemas.common import Sampling
from router.gateway.schemas.completions import CompletionRequest
from router.gateway.text import Text
from router.gateway.usage import Usage
from transfer.messages import TokenLogprobs, unpack_tokens

R = TypeVar("R", bound=Sampling)
Pieces = AsyncGenerator[Piece, None]


def event(data: Any) -> bytes:
    """One server-sent event, in ASCII: some clients end lines at separators of Unicode, which a text may contain."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class Answer(ABC):
    """Renders the pieces of a request's choices."""

    @abstractmethod
    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        """The response object, once everything is there."""

    @abstractmethod
    def stream(self, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        """Server-sent events; a failure ends the stream with an error event, never with a made-up finish."""


@dataclass(slots=True)
class Collected:
    """What has come of one choice."""

    text: str = ""
    reasoning: str = ""
    tokens: list[int] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.tokens.extend(piece.tokens)
        self.logprobs.extend(piece.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs
        self.finish_reason = piece.finish_reason
        for call in piece.calls:
            if call.index == len(self.calls):
                self.calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}})
            self.calls[call.index]["function"]["arguments"] += call.arguments

    @property
    def mean_logprob(self) -> float:
        """By which the best of several answers are chosen."""
        return sum(entry.logprob for entry in self.logprobs) / max(1, len(self.logprobs))


class OpenAIAnswer(Answer, Generic[R]):
    """What chat and completions have in common. `tier_format` is that of blocks below the workers' devices."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, request: R, jobs: Sequence[Job], text: Text, tier_format: str) -> None:
        self._request = request
        self._jobs = jobs
        self._text = text
        self._id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._usage = Usage(jobs, tier_format)
        self._views = [LogprobsView(text) for _ in jobs]

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        collected = [Collected() for _ in self._jobs]
        async for piece in pieces:
            self._add(piece)
            collected[piece.index].add(piece)
        # Beside the event loop: log-probabilities of thousands of tokens take long to show.
        return await asyncio.to_thread(self._shown, collected)

    def _shown(self, collected: list[Collected]) -> dict[str, Any]:
        choices = [self._choice(job, one) for job, one in zip(self._jobs, collected, strict=True)]
        return {
            **self._head(self.object_name),
            "choices": self._returned(choices, collected),
            "usage": self._usage.openai(),
        }

    async def stream(self, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        head = self._head(self.chunk_name)
        if self._request.wants_usage:
            head["usage"] = None
        for job in self._jobs:
            if (opening := self._opening()) is not None:
                yield event({**head, "choices": [_empty_chunk(job.index, opening)]})
        try:
            async for piece in pieces:
                if data := self._render(head, piece):
                    yield data
        except ApiError as error:
            yield event(error.body())
            return
        if self._request.wants_usage:
            yield event({**head, "choices": [], "usage": self._usage.openai()})
        yield b"data: [DONE]\n\n"

    def _render(self, head: dict[str, Any], piece: Piece) -> bytes:
        """Nothing for a piece that shows nothing: its text is held back and it does not end the choice."""
        self._add(piece)
        shows = piece.text or piece.reasoning or piece.calls or piece.logprobs or piece.finish_reason
        if not (shows or self._request.return_token_ids):
            return b""
        running = {"usage": self._usage.openai()} if self._request.wants_running_usage else {}
        return event({**head, **running, "choices": [self._chunk(piece)]})

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        chunk = _empty_chunk(piece.index, self._delta(piece), piece.finish_reason)
        if self._shows_logprobs:
            chunk["logprobs"] = self._logprobs(piece.index, piece.logprobs)
        if self._request.return_token_ids:
            chunk["token_ids"] = list(piece.tokens)
        return chunk

    def _add(self, piece: Piece) -> None:
        self._usage.add(piece)

    def _choice(self, job: Job, collected: Collected) -> dict[str, Any]:
        choice = {"index": job.index, **self._content(job, collected)}
        if self._request.return_token_ids:
            choice["token_ids"] = collected.tokens
        choice["logprobs"] = self._logprobs(job.index, collected.logprobs) if self._shows_logprobs else None
        choice["finish_reason"] = collected.finish_reason
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = (
                LogprobsView(self._text).prompt(collected.prompt_logprobs) if job.leads else None
            )
        return choice

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._id, "object": name, "created": self._created, "model": self._request.model}

    def _returned(self, choices: list[dict[str, Any]], collected: list[Collected]) -> list[dict[str, Any]]:
        """The choices that are returned."""
        return choices

    @property
    @abstractmethod
    def _shows_logprobs(self) -> bool:
        """Whether the client asked for log-probabilities."""

    @abstractmethod
    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next log-probabilities of a choice."""

    @abstractmethod
    def _content(self, job: Job, collected: Collected) -> dict[str, Any]:
        """A choice's content in a whole response."""

    @abstractmethod
    def _delta(self, piece: Piece) -> dict[str, Any]:
        """A choice's content in a chunk."""

    def _opening(self) -> dict[str, Any] | None:
        """Content of a chunk before the first piece, if there is one."""
        return None


class ChatAnswer(OpenAIAnswer[ChatRequest]):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    @property
    def _shows_logprobs(self) -> bool:
        return bool(self._request.logprobs)

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._views[index].chat(entries)

    def _content(self, job: Job, collected: Collected) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": collected.text, "refusal": None}
        if collected.calls:
            message.update(content=collected.text or None, tool_calls=collected.calls)
        if collected.reasoning:
            message["reasoning_content"] = collected.reasoning
        return {"message": message}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
        return {"delta": delta}

    def _opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}


class CompletionAnswer(OpenAIAnswer[CompletionRequest]):
    """`/v1/completions`."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, request: CompletionRequest, jobs: Sequence[Job], text: Text, tier_format: str) -> None:
        super().__init__(request, jobs, text, tier_format)
        self._begun: set[int] = set()
        self._of_prompts: dict[int, tuple[TokenLogprobs, ...]] = {}

    @property
    def _shows_logprobs(self) -> bool:
        return self._request.logprobs is not None

    def _add(self, piece: Piece) -> None:
        super()._add(piece)
        if piece.prompt_logprobs:
            self._of_prompts[self._jobs[piece.index].source] = piece.prompt_logprobs

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """With the first ones come those of a prompt that is shown."""
        job, echoed = self._jobs[index], []
        if self._request.echo and index not in self._begun:
            first, *_ = unpack_tokens(job.prompt.tokens).tolist()
            echoed = [first, *self._of_prompts.get(job.source, ())]
        return self._views[index].completion([*echoed, *entries])

    def _content(self, job: Job, collected: Collected) -> dict[str, Any]:
        return {"text": self._echo(job) + collected.text}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        first = piece.index not in self._begun
        return {"text": (self._echo(self._jobs[piece.index]) if first else "") + piece.text}

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        chunk = super()._chunk(piece)
        self._begun.add(piece.index)
        return chunk

    def _echo(self, job: Job) -> str:
        if not self._request.echo:
            return ""
        return job.text if job.text is not None else self._text.decode(unpack_tokens(job.prompt.tokens).tolist())

    def _returned(self, choices: list[dict[str, Any]], collected: list[Collected]) -> list[dict[str, Any]]:
        """Of each prompt the `n` choices that the model found likeliest."""
        count, made = self._request.n or 1, self._request.choices
        if made == count:
            return choices
        best: list[dict[str, Any]] = []
        for start in range(0, len(choices), made):
            of_prompt = range(start, start + made)
            ranked = sorted(of_prompt, key=lambda index: collected[index].mean_logprob, reverse=True)[:count]
            best += [{**choices[index], "index": len(best) + rank} for rank, index in enumerate(ranked)]
        return best


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _empty_chunk(index: int, content: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": finish}
