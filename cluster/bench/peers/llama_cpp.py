"""llama.cpp as a peer: its server, `llama-bench` and `llama-batched-bench`, run as programs of their own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.bench.load import Target
from cluster.bench.peers.program import PeerError, last_line, run

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
REPETITIONS = 3
"""Of a `llama-bench` measurement; it reports their mean."""


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """Where the programs and the weights are, None for what was not given; `threads` is for all of them."""

    gguf: Path | None
    server: str | None
    bench: str | None
    batched_bench: str | None
    threads: int

    def missing(self, option: str, program: str | None) -> str | None:
        """Why `program`, given by `option`, cannot be run; None if it can."""
        if program is None:
            return f"{option} was not given"
        if shutil.which(program) is None:
            return f"{option} {program}: no such program"
        if self.gguf is None:
            return "--gguf was not given"
        return None if self.gguf.is_file() else f"--gguf {self.gguf}: no such file"

    def server_command(self, port: int, slots: int, context: int) -> list[str]:
        """A server with `slots` slots of `context` tokens each."""
        command = [*self._start(self.server), "-tb", str(self.threads), "--host", "127.0.0.1", "--port", str(port)]
        return [*command, "-np", str(slots), "-c", str(slots * context), "--no-webui"]

    def prefill_command(self, tokens: int) -> list[str]:
        """Prefill of `tokens`."""
        return [*self._start(self.bench), "-p", str(tokens), "-n", "0", "-r", str(REPETITIONS), "-o", "json"]

    def decode_command(self, context: int, steps: int) -> list[str]:
        """Decode of one stream behind `context` tokens."""
        sizes = ["-p", "0", "-n", str(steps), "-d", str(context)]
        return [*self._start(self.bench), *sizes, "-r", str(REPETITIONS), "-o", "json"]

    def batched_command(self, context: int, streams: int, steps: int, unified: bool) -> list[str]:
        """Decode of `streams` behind one shared prompt of `context` tokens. `unified`: one KV buffer for all of them,
        otherwise a copy of the prompt's KV for each."""
        cells = context + streams * steps if unified else streams * (context + steps)
        sizes = ["-npp", str(context), "-ntg", str(steps), "-npl", str(streams), "-pps", "-c", str(cells + streams)]
        layout = "--kv-unified" if unified else "--no-kv-unified"
        threads = ["-tb", str(self.threads)]
        return [*self._start(self.batched_bench), *threads, *sizes, layout, "--output-format", "jsonl"]

    def prefill(self, tokens: int) -> float:
        """Prompt tokens a second. Raises PeerError."""
        return bench_speed(run(self.prefill_command(tokens)))

    def decode(self, context: int, steps: int) -> float:
        """Tokens a second of one stream. Raises PeerError."""
        return bench_speed(run(self.decode_command(context, steps)))

    def batched_decode(self, context: int, streams: int, steps: int) -> float:
        """Tokens a second of all streams, with the better of the two layouts of its KV. Raises PeerError."""
        commands = [self.batched_command(context, streams, steps, unified) for unified in (True, False)]
        return max(batched_speed(run(command)) for command in commands)

    @contextmanager
    def serving(self, slots: int, context: int) -> Iterator[Target]:
        """A running server. Raises PeerError when it does not start."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            try:
                process = subprocess.Popen(self.server_command(port, slots, context), stdout=log, stderr=log)
            except OSError as error:
                raise PeerError(f"llama.cpp's server cannot be run: {error.strerror}") from None
            try:
                target = Target(f"http://127.0.0.1:{port}", "llama.cpp")
                if not _healthy(process, target):
                    log.seek(0)
                    raise PeerError(f"llama.cpp's server did not start: {last_line(log.read())}")
                yield target
            finally:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _start(self, program: str | None) -> list[str]:
        return [str(program), "-m", str(self.gguf), "-t", str(self.threads)]


def bench_speed(output: str) -> float:
    """Tokens a second from `llama-bench -o json`. Raises PeerError."""
    try:
        return float(json.loads(output)[0]["avg_ts"])
    except (ValueError, LookupError, TypeError):
        raise PeerError(f"llama-bench printed no result: {last_line(output)}") from None


def batched_speed(output: str) -> float:
    """Tokens a second of the decode phase from `llama-batched-bench --output-format jsonl`. Raises PeerError."""
    objects = [line for line in output.splitlines() if line.lstrip().startswith("{")]
    try:
        return float(json.loads(objects[0])["speed_tg"])
    except (ValueError, LookupError, TypeError):
        raise PeerError(f"llama-batched-bench printed no result: {last_line(output)}") from None


def _healthy(process: subprocess.Popen[Any], target: Target) -> bool:
    """Wait until the server answers; False when it ends or takes too long."""
    until = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < until:
        try:
            if httpx.get(f"{target.url}/health", timeout=5).status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    return False
