"""One choice of an answer: tokens become text, reasoning and tool calls, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

from router.gateway.dispatch import Output
from router.gateway.parsers import CallDelta, Parsed, ReasoningParser, ToolParser
from router.gateway.text import TextStream
from transfer.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of a choice's answer. `index` is the choice's number among all of the request's. The last piece of
    a choice has its `finish_reason`: "stop" (`stop` is the stop string, if it was one), "length" or "tool_calls". Of
    `tokens`, the first `reasoning_tokens` are not the answer itself. `logprobs` has one entry for each of the others
    where they are asked for; `prompt_logprobs` and `embedding` come with the first piece. Of `cached_tokens`, `loaded`
    came from host memory and from disk."""

    index: int
    text: str
    tokens: tuple[int, ...]
    cached_tokens: int
    finish_reason: str | None
    stop: str | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0
    calls: tuple[CallDelta, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: bytes = b""
    loaded: tuple[int, int] = (0, 0)


class Choice:
    """Makes pieces of a choice's outputs. `reasoning` and `tools` are parsers of its own, where there is something to
    parse; with `single` only the first call comes out."""

    def __init__(
        self,
        index: int,
        stream: TextStream,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        single: bool = False,
    ) -> None:
        self._index = index
        self._stream = stream
        self._reasoning = reasoning
        self._tools = tools
        self._single = single
        self._thinking = False
        self._called = False

    def piece(self, output: Output) -> Piece:
        """An output as text. A stop string ends the answer at the token that completed it."""
        parsed, thought, used = Parsed(), 0, len(output.tokens)
        told: list[TokenLogprobs] = []
        for number, token in enumerate(output.tokens, 1):
            parsed = _joined(parsed, self._parse(self._stream.push(token)))
            thought += self._thinking
            if not self._thinking:
                told += output.logprobs[number - 1 : number]
            if self._stream.stopped is not None:
                used = number
                break
        finish = "stop" if self._stream.stopped is not None else output.finish_reason
        if finish is not None:
            parsed = _joined(_joined(parsed, self._parse(self._stream.finish())), self._rest())
        calls = tuple(call for call in parsed.calls if call.index == 0 or not self._single)
        self._called = self._called or bool(calls)
        return Piece(
            index=self._index,
            text=parsed.text,
            tokens=output.tokens[:used],
            cached_tokens=output.cached_tokens,
            finish_reason="tool_calls" if finish == "stop" and self._called else finish,
            stop=self._stream.stopped,
            reasoning=parsed.reasoning,
            reasoning_tokens=thought,
            calls=calls,
            logprobs=tuple(told),
            prompt_logprobs=output.prompt_logprobs,
            embedding=output.embedding,
            loaded=output.loaded,
        )

    def _parse(self, text: str) -> Parsed:
        if self._reasoning is None:
            return self._find_calls(Parsed(text))
        self._thinking = self._thinking or self._reasoning.thinking
        split = self._reasoning.push(text)
        # What stands between the end of reasoning and the answer's first word belongs to neither, and is counted here.
        self._thinking = (self._thinking or self._reasoning.thinking) and not split.text
        return self._find_calls(split)

    def _rest(self) -> Parsed:
        """What the parsers still held back."""
        rest = self._find_calls(self._reasoning.finish()) if self._reasoning is not None else Parsed()
        return _joined(rest, self._tools.finish()) if self._tools is not None else rest

    def _find_calls(self, split: Parsed) -> Parsed:
        if self._tools is None or not split.text:
            return split
        found = self._tools.push(split.text)
        return Parsed(found.text, split.reasoning, found.calls)


def _joined(one: Parsed, other: Parsed) -> Parsed:
    return Parsed(one.text + other.text, one.reasoning + other.reasoning, (*one.calls, *other.calls))
