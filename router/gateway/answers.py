"""Answers: pieces of text as OpenAI's response objects, whole or as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from router.gateway.errors import ApiError
from router.gateway.schemas import ChatRequest, CompletionRequest
from router.gateway.service import Job, Piece


def event(data: Any) -> bytes:
    """One server-sent event, in ASCII: some clients end lines at separators of Unicode, which a text may contain."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class Answer(ABC):
    """Collects the pieces of a request's choices and renders them."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, request: ChatRequest | CompletionRequest, jobs: list[Job]) -> None:
        self._request = request
        self._jobs = jobs
        self._id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._texts = [""] * len(jobs)
        self._tokens: list[list[int]] = [[] for _ in jobs]
        self._cached = [0] * len(jobs)
        self._finish: list[str | None] = [None] * len(jobs)

    async def whole(self, pieces: AsyncGenerator[Piece, None]) -> dict[str, Any]:
        """The response object, once everything is there."""
        async for piece in pieces:
            self._add(piece)
        choices = [
            {"index": index, **self._content(text), **self._ids(index, tokens), "logprobs": None, "finish_reason": end}
            for index, (text, tokens, end) in enumerate(zip(self._texts, self._tokens, self._finish, strict=True))
        ]
        return {**self._head(self.object_name), "choices": choices, "usage": self._usage()}

    async def stream(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[bytes, None]:
        """Server-sent events; a failure ends the stream with an error event, never with a made-up finish."""
        head = self._head(self.chunk_name)
        if self._request.wants_usage:
            head["usage"] = None
        for index in range(len(self._jobs)):
            if (opening := self._opening()) is not None:
                yield event({**head, "choices": [self._chunk(index, opening, None)]})
        try:
            async for piece in pieces:
                if data := self._render(head, piece):
                    yield data
        except ApiError as error:
            yield event(error.body())
            return
        if self._request.wants_usage:
            yield event({**head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _render(self, head: dict[str, Any], piece: Piece) -> bytes:
        """Nothing for a piece that shows nothing: its text is held back and it does not end the choice."""
        self._add(piece)
        if not (piece.text or piece.finish_reason or self._request.return_token_ids):
            return b""
        chunk = self._chunk(piece.index, self._delta(piece.text), piece.finish_reason)
        if self._request.return_token_ids:
            chunk["token_ids"] = list(piece.tokens)
        return event({**head, "choices": [chunk]})

    def _add(self, piece: Piece) -> None:
        self._texts[piece.index] += piece.text
        self._tokens[piece.index].extend(piece.tokens)
        self._cached[piece.index] = piece.cached_tokens
        self._finish[piece.index] = piece.finish_reason

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._id, "object": name, "created": self._created, "model": self._request.model}

    def _chunk(self, index: int, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": finish}

    def _ids(self, index: int, tokens: list[int]) -> dict[str, Any]:
        return {"token_ids": tokens} if self._request.return_token_ids else {}

    def _usage(self) -> dict[str, Any]:
        prompt = sum(job.prompt_tokens for job in self._jobs)
        completion = sum(len(tokens) for tokens in self._tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """A choice's content in a whole response."""

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """A choice's content in a chunk."""

    def _opening(self) -> dict[str, Any] | None:
        """Content of a chunk before the first text, if the format has one."""
        return None


class ChatAnswer(Answer):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}


class CompletionAnswer(Answer):
    """`/v1/completions`."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}
