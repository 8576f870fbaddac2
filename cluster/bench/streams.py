"""Streamed chats over bare sockets: a client library would spend more on each token than the gateway does."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass

from cluster.bench.load import LoadError

_CONTENT = re.compile(rb'"content":"[^"]')
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer: seconds from sending the request to the first piece of text, and tokens."""

    first_s: float
    tokens: int


class Line:
    """A connection that is used for one chat after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Line:
        """Connect to a server of this machine."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def chat(self, model: str, text: str, tokens: int) -> Streamed:
        """Stream an answer of `tokens` tokens. Raises LoadError where something else comes."""
        messages = [{"role": "user", "content": text}]
        wanted = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**wanted, "stream": True, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: {len(body)}\r\n\r\n"
        begun, first = time.perf_counter(), None
        self._writer.write(head.encode() + body)
        # Of what has come only the end is kept once there has been text: most of the client's time is the loop's.
        kept = b""
        while not kept.endswith(_END):
            data = await self._reader.read(READ_BYTES)
            now = time.perf_counter()
            if not data:
                raise LoadError(f"the connection was closed after {kept[-300:]!r}")
            kept += data
            if first is None:
                if not kept.startswith(b"HTTP/1.1 200"[: len(kept)]):
                    raise LoadError(f"not a stream: {kept[:300]!r}")
                if _CONTENT.search(kept) is not None:
                    first = now - begun
            if first is not None and len(kept) > READ_BYTES:
                kept = kept[-1024:]
        found = _TOKENS.search(kept[-1024:])
        if first is None or found is None or int(found[1]) != tokens:
            raise LoadError(f"not an answer of {tokens} tokens: {kept[-300:]!r}")
        return Streamed(first, tokens)
