"""Log-probabilities as OpenAI's two APIs show them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from router.gateway.text import REPLACEMENT, Text
from transfer.messages import TokenLogprobs

LEAST = -9999.0
"""Shown for a probability of zero: JSON has no infinity."""


class LogprobsView:
    """Shows the log-probabilities of one choice, which come piece by piece."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._first = True
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The `logprobs` object of chat: one entry a token, whose bytes joined are the text."""
        content = []
        for entry in entries:
            top = [self._entry(token, logprob) for token, logprob in entry.top]
            content.append({**self._entry(entry.token, entry.logprob), "top_logprobs": top})
            self._first = False
        return {"content": content, "refusal": None}

    def completion(self, entries: Sequence[TokenLogprobs | int]) -> dict[str, Any]:
        """The `logprobs` object of completions; a bare token id has none, as the first of a prompt."""
        shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            token = entry if isinstance(entry, int) else entry.token
            shown["tokens"].append(self._name(token))
            shown["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._text.bytes_of(token, self._first)))
            self._first = False
            if isinstance(entry, int):
                shown["token_logprobs"].append(None)
                shown["top_logprobs"].append(None)
            else:
                shown["token_logprobs"].append(max(entry.logprob, LEAST))
                top = {self._name(token): max(logprob, LEAST) for token, logprob in entry.top}
                shown["top_logprobs"].append({**top, self._name(entry.token): max(entry.logprob, LEAST)})
        return shown

    def prompt(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`: nothing for the first token, then an object by token id for each."""
        shown: list[dict[str, Any] | None] = [None]
        for entry in entries:
            own = [(entry.token, entry.logprob)] if all(token != entry.token for token, _ in entry.top) else []
            shown.append(
                {
                    str(token): {"logprob": max(logprob, LEAST), "decoded_token": self._text.name(token)}
                    for token, logprob in [*entry.top, *own]
                }
            )
        return shown

    def _name(self, token: int) -> str:
        """As text; parts of characters as OpenAI shows them, so that two of them are not taken for one."""
        name = self._text.name(token)
        if REPLACEMENT not in name:
            return name
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._text.bytes_of(token))

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = list(self._text.bytes_of(token, self._first))
        return {"token": self._text.name(token), "logprob": max(logprob, LEAST), "bytes": data}
