"""Lines of a batch file in OpenAI's format, and the key that sorts them by what their prompts begin with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES = URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
)
FIELDS = ("custom_id", "method", "url", "body")
MAX_LINE_BYTES = 16 * 2**20
PRIORITY = -100
"""The lowest there is: whoever waits for an answer goes first."""
BEFORE_PROMPT = ("model", "cache_salt", "tools", "chat_template_kwargs", "instructions", "previous_response_id")
PROMPT = {CHAT: "messages", COMPLETIONS: "prompt", EMBEDDINGS: "input", RESPONSES: "input"}
_BOM = b"\xef\xbb\xbf"
_RUNG_BYTES = 4


def _rungs(first: int, growth: float, last: int) -> tuple[int, ...]:
    rungs = [first]
    while rungs[-1] < last:
        rungs.append(int(rungs[-1] * growth))
    return tuple(rungs)


RUNGS = _rungs(64, 1.25, 2**19)
"""Lengths of the beginnings that a sort key tells apart, in bytes of text."""


class BadLine(Exception):
    """No request; the message says why. `custom_id` is there where the line has one."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class WrongUrl(BadLine):
    """The line asks for another route than those that it may ask for."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def sent(self) -> bytes:
        """The body as it is sent: at the lowest priority, and without leaving a response behind, where the line does
        not say otherwise."""
        defaults = {"priority": PRIORITY} | ({"store": False} if self.url == RESPONSES else {})
        return json.dumps(defaults | self.body).encode()


def parse(line: bytes, urls: Sequence[str] = URLS) -> Item:
    """A line as a request for one of these routes. Raises BadLine."""
    data = _object(line)
    custom_id = data.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine(f"custom_id: must be a string that is not empty, got {_shown(custom_id)}")
    if not _is_text(custom_id):
        raise BadLine("custom_id: contains a lone surrogate, which is not text")
    if unknown := data.keys() - set(FIELDS):
        raise BadLine(f"{_shown(min(unknown))}: only {', '.join(FIELDS)} are known in a line", custom_id)
    if data.get("method") != "POST":
        raise BadLine(f"method: must be 'POST', got {_shown(data.get('method'))}", custom_id)
    if data.get("url") not in urls:
        allowed = repr(urls[0]) if len(urls) == 1 else f"one of {', '.join(urls)}"
        raise WrongUrl(f"url: must be {allowed}, got {_shown(data.get('url'))}", custom_id)
    body = data.get("body")
    if not isinstance(body, dict):
        raise BadLine(f"body: must be an object, got {_shown(body)}", custom_id)
    for field in ("stream", "background"):
        if body.get(field):
            raise BadLine(f"body.{field}: not in a batch, got {_shown(body[field])}", custom_id)
    return Item(custom_id, data["url"], body)


def prefix_key(item: Item) -> bytes:
    """Items sorted by it stand next to those whose prompts have the longest beginning in common. It is a hash for each
    of the `RUNGS` that the prompt reaches, of all text up to there; so it is short, and says nothing of the text.
    Beginnings that differ only between two rungs are not told apart."""
    parts = [item.url, *(item.body.get(name) for name in BEFORE_PROMPT), item.body.get(PROMPT[item.url])]
    text = json.dumps(parts, sort_keys=True).encode()
    hasher, key, start = xxhash.xxh3_64(), bytearray(), 0
    for end in RUNGS:
        if end > len(text):
            break
        hasher.update(text[start:end])
        key += hasher.digest()[:_RUNG_BYTES]
        start = end
    return bytes(key)


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise BadLine(f"the line has more than {MAX_LINE_BYTES} bytes")
    if line.startswith(_BOM):
        raise BadLine("the line begins with a byte order mark")
    if not line.strip():
        raise BadLine("the line is blank")
    try:
        data = json.loads(line.decode())
    except UnicodeDecodeError:
        raise BadLine("the line is not valid UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"the line is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadLine(f"the line must be a JSON object, got {_shown(data)}")
    return data


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
