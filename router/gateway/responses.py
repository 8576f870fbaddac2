"""OpenAI's Responses API: from pieces to its objects and events."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from router.gateway.answers import Answer
from router.gateway.choice import Piece
from router.gateway.errors import ApiError
from router.gateway.jobs import Job
from router.gateway.logprobs import LogprobsView
from router.gateway.response_items import ID_PREFIX
from router.gateway.schemas.responses import ResponsesRequest, TextConfig
from router.gateway.sections import Section, Sections, Step
from router.gateway.text import Text
from router.gateway.translate import new_id, typed_event
from router.gateway.usage import Usage

ITEM_TYPE = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
"""Of the items that sections become."""
CONTENT_NAME = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
"""In the names of events."""
ENDINGS = {"length": ("incomplete", {"reason": "max_output_tokens"})}
"""Status and details of an answer that did not end by itself."""


class ResponsesAnswer(Answer):
    """`/v1/responses`. `listed` are the items that it answers, as JSON; `keep` is called when nothing will change it
    any more."""

    def __init__(
        self,
        request: ResponsesRequest,
        jobs: Sequence[Job],
        text: Text,
        listed: bytes,
        keep: Callable[[ResponsesAnswer], None],
    ) -> None:
        self.id = new_id("resp")
        self.request = request
        self.listed = listed
        self.status = "queued" if request.background else "in_progress"
        self._keep = keep
        self._echo = _echo(request)
        self._created, self._completed_at = int(time.time()), 0
        self._sections = Sections()
        self._output: list[dict[str, Any]] = []
        self._usage = Usage(jobs)
        self._view = LogprobsView(text) if request.wants_logprobs else None
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # of messages, by output index
        self._unsaid: list[dict[str, Any]] = []  # of tokens whose text is still held back
        self._details: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None

    @property
    def over(self) -> bool:
        """Whether the response is as it stays."""
        return self.status not in ("queued", "in_progress")

    def response(self) -> dict[str, Any]:
        """The response object as it is now."""
        usage = self._usage_object() if self._usage.completion_tokens else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self.status,
            "completed_at": self._completed_at or None,
            "error": self._error,
            "incomplete_details": self._details,
            "output": list(self._output),
            "usage": usage,
            **self._echo,
        }

    async def whole(self, pieces: AsyncGenerator[Piece, None]) -> dict[str, Any]:
        """The response object, once everything is there."""
        async for piece in pieces:
            self._take(piece)
        return self.response()

    async def stream(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[bytes, None]:
        """Server-sent events. A failure is an error event, and the response has failed."""
        numbers = itertools.count()

        def sent(kind: str, **data: Any) -> bytes:
            return typed_event({"type": kind, "sequence_number": next(numbers), **data})

        yield sent("response.created", response=self.response())
        yield sent("response.in_progress", response=self.response())
        try:
            async for piece in pieces:
                for kind, data in self._take(piece):
                    yield sent(kind, **data)
        except ApiError as error:
            self.fail(error)
            yield sent("error", code=error.code, message=error.message, param=error.param)
        yield sent(f"response.{self.status}", response=self.response())

    def fail(self, error: ApiError) -> None:
        """The response ends with an error; what it had so far stays in it."""
        code = "invalid_prompt" if error.status < 500 else "server_error"
        self._error = {"code": "rate_limit_exceeded" if error.status == 429 else code, "message": error.message}
        self._end("failed")

    def cancel(self) -> None:
        """The response ends since its client wants no more of it."""
        self._end("cancelled")

    def _end(self, status: str) -> None:
        for step in self._sections.stop():
            self._events(step, "incomplete")
        self.status = status
        if status == "completed":
            self._completed_at = int(time.time())
        self._keep(self)

    def _take(self, piece: Piece) -> list[tuple[str, dict[str, Any]]]:
        """The events of a piece."""
        self.status = "in_progress"
        self._usage.add(piece)
        if self._view is not None:
            self._unsaid += self._view.chat(piece.logprobs[piece.reasoning_tokens :])["content"]
        ended, self._details = ENDINGS.get(piece.finish_reason or "", ("completed", None))
        events = []
        for step in self._sections.push(piece):
            events += self._events(step, ended if step.section is self._sections.all[-1] else "completed")
        if piece.finish_reason is not None:
            self._end(ended)
        return events

    def _events(self, step: Step, ended: str) -> list[tuple[str, dict[str, Any]]]:
        """Of one step; a section that is closed ends up `ended`."""
        section, index = step.section, step.section.number
        if section.kind == "call" and step.what != "close":
            self._unsaid = []  # what came till here was the call's, or white space before it
        if step.what == "open":
            return self._opened(section)
        place: dict[str, Any] = {"item_id": self._output[index]["id"], "output_index": index}
        if section.kind != "call":
            place["content_index"] = 0
        if step.what == "grow":
            delta: dict[str, Any] = {"delta": step.text}
            if section.kind == "text":
                delta["logprobs"], self._unsaid = self._unsaid, []
                self._logprobs[index] += delta["logprobs"]
            return [(f"response.{CONTENT_NAME[section.kind]}.delta", {**place, **delta})]
        item = self._output[index] = self._item(section, self._output[index]["id"], ended)
        if section.kind == "call":
            whole = {"name": section.name, "arguments": item["arguments"]}
        else:
            whole = {key: value for key, value in item["content"][0].items() if key in ("text", "logprobs")}
        events = [(f"response.{CONTENT_NAME[section.kind]}.done", {**place, **whole})]
        if section.kind != "call":
            events.append(("response.content_part.done", {**place, "part": item["content"][0]}))
        return [*events, ("response.output_item.done", {"output_index": index, "item": item})]

    def _opened(self, section: Section) -> list[tuple[str, dict[str, Any]]]:
        index = section.number
        if section.kind == "text":
            self._logprobs[index] = []
        name = new_id(ID_PREFIX[ITEM_TYPE[section.kind]])
        item = self._item(section, name, "in_progress")
        self._output.append(item)
        events: list[tuple[str, dict[str, Any]]]
        events = [("response.output_item.added", {"output_index": index, "item": item})]
        if section.kind != "call":
            place = {"item_id": name, "output_index": index, "content_index": 0}
            events.append(("response.content_part.added", {**place, "part": self._part(section)}))
        return events

    def _item(self, section: Section, name: str, status: str) -> dict[str, Any]:
        """The item of a section; one that has only begun has no content."""
        item = {"id": name, "type": ITEM_TYPE[section.kind], "status": status}
        if section.kind == "call":
            return {**item, "call_id": section.call_id, "name": section.name, "arguments": section.text}
        content = [] if status == "in_progress" else [self._part(section)]
        if section.kind == "reasoning":
            return {**item, "summary": [], "content": content}
        return {**item, "role": "assistant", "content": content}

    def _part(self, section: Section) -> dict[str, Any]:
        if section.kind == "reasoning":
            return {"type": "reasoning_text", "text": section.text}
        logprobs = self._logprobs[section.number]
        return {"type": "output_text", "text": section.text, "annotations": [], "logprobs": list(logprobs)}

    def _usage_object(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    """What a response object repeats of its request, with the defaults that were used."""
    text = (request.text or TextConfig()).model_dump(by_alias=True, exclude_none=True)
    return {
        "model": request.model,
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "top_logprobs": request.top_logprobs or 0,
        "tools": [tool.model_dump() for tool in request.tools or []],
        "tool_choice": _echoed_choice(request),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {"format": {"type": "text"}, **text},
        "reasoning": {"effort": None, "summary": None},
        "truncation": "disabled",
        "background": bool(request.background),
        "store": request.kept,
        "service_tier": "default",
        "metadata": request.metadata or {},
        "user": request.user,
    }


def _echoed_choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    return choice if isinstance(choice, str) else choice.model_dump() if choice is not None else "auto"
