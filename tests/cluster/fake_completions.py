"""A server that answers completions with made-up tokens at once: for the benchmarks' client, and in llama.cpp's place.

Run as a program it takes `--port` and ignores what else llama-server is told.
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FIRST_ANSWER = 1000
"""The first token of every answer; the others count on."""


SEPARATORS = "a\u2028b\x85c"
"""Every token's text: Unicode ends lines here, an event stream does not."""


class FakeCompletions(ThreadingHTTPServer):
    """Keeps the prompts that it was sent. `short` answers lack a token; `error` is the body of a 503 instead, and
    `body` that of a 200."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0, short: bool = False, error: bytes = b"", body: bytes = b"") -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.prompts: list[list[int]] = []
        self.short, self.error, self.body = short, error, body
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeCompletions

    def do_GET(self) -> None:
        self._answer(200, b"{}")

    def do_POST(self) -> None:
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.prompts.append(wanted["prompt"])
            self.server.busy += 1
            self.server.most_busy = max(self.server.most_busy, self.server.busy)
        if self.server.error:
            self._answer(503, self.server.error)
        else:
            self._answer(200, self.server.body or b"".join(_events(wanted, wanted["max_tokens"] - self.server.short)))
        with self.server.lock:
            self.server.busy -= 1

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def _events(wanted: dict[str, Any], count: int) -> Iterator[bytes]:
    yield b":\n\n: a comment\n\n"
    for token in range(FIRST_ANSWER, FIRST_ANSWER + count):
        yield _event({"choices": [{"index": 0, "text": SEPARATORS, "token_ids": [token]}]})
    prompt = len(wanted["prompt"])
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
    }
    yield _event({"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


@contextmanager
def fake_completions(short: bool = False, error: bytes = b"", body: bytes = b"") -> Iterator[FakeCompletions]:
    with FakeCompletions(0, short, error, body) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


if __name__ == "__main__":
    FakeCompletions(int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()
