"""Text in and out: chat templates, tokenization, incremental detokenization and stop strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from router.gateway.errors import invalid

REPLACEMENT = "\ufffd"


class Text:
    """A model's tokenizer and chat template."""

    def __init__(self, path: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._longest_token = max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens that the model puts around a text."""
        return list(self._tokenizer(text)["input_ids"])

    def certainly_over(self, characters: int, tokens: int) -> bool:
        """Whether a text of so many characters cannot fit into so many tokens, told without tokenizing it."""
        return characters > tokens * self._longest_token

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat up to where the assistant answers. Raises ApiError 400 with the template's refusal."""
        if not self._tokenizer.chat_template:
            raise invalid("this model has no chat template; use /v1/completions", "messages")
        try:
            ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except TemplateError as error:
            raise invalid(f"messages: the chat template refuses them: {error}", "messages") from None
        return list(ids)

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def stream(self, stops: list[str]) -> TextStream:
        """An incremental decoder for one answer."""
        return TextStream(self, self._tokenizer._tokenizer, stops)


class TextStream:
    """Turns tokens into text piece by piece. Characters come whole; text that may begin a stop string is held back;
    from a stop string on nothing comes out any more."""

    def __init__(self, text: Text, tokenizer: Any, stops: list[str]) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stops = stops
        self._tokens: list[int] = []
        self._decoded = ""
        self._given = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; returns the text that is certain by now."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        self._decoded += self._decoder.step(self._tokenizer, token) or ""
        return self._give(self._held_back())

    def finish(self) -> str:
        """The rest: text that was held back, and what an incomplete last character decodes to."""
        if self.stopped:
            return ""
        whole = self._text.decode(self._tokens)
        if whole.startswith(self._decoded):
            self._decoded = whole
        return self._give(0)

    def _give(self, keep: int) -> str:
        """Text from where the last piece ended, up to a stop string or all but the last `keep` characters."""
        starts = [(self._decoded.find(stop, max(0, self._given - len(stop))), len(stop)) for stop in self._stops]
        # The one that is complete first counts, so that the borders of tokens make no difference.
        found = [(start + length, start) for start, length in starts if start >= 0]
        self.stopped = bool(found)
        end = min(found)[1] if found else len(self._decoded) - keep
        piece = self._decoded[self._given : end] if end > self._given else ""
        self._given = max(self._given, end)
        return piece

    def _held_back(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._decoded)), 0, -1):
            if any(stop.startswith(self._decoded[-length:]) for stop in self._stops):
                return length
        return 0
