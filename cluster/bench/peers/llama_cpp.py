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

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
RUN_TIMEOUT_S = 1800.0
REPETITIONS = 3
"""Of a `llama-bench` measurement; it reports their mean."""


class PeerError(Exception):
    """A peer's program failed; the message is one line."""


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
        return bench_speed(_run(self.prefill_command(tokens)))

    def decode(self, context: int, steps: int) -> float:
        """Tokens a second of one stream. Raises PeerError."""
        return bench_speed(_run(self.decode_command(context, steps)))

    def batched_decode(self, context: int, streams: int, steps: int) -> float:
        """Tokens a second of all streams, with the better of the two layouts of its KV. Raises PeerError."""
        commands = [self.batched_command(context, streams, steps, unified) for unified in (True, False)]
        return max(batched_speed(_run(command)) for command in commands)

    @contextmanager
    def serving(self, slots: int, context: int) -> Iterator[Target]:
        """A running server. Raises PeerError when it does not start."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            process = subprocess.Popen(self.server_command(port, slots, context), stdout=log, stderr=log)
            try:
                target = Target(f"http://127.0.0.1:{port}", "llama.cpp")
                if not _healthy(process, target):
                    log.seek(0)
                    raise PeerError(f"llama.cpp's server did not start: {_last_line(log.read())}")
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
        raise PeerError(f"llama-bench printed no result: {_last_line(output)}") from None


def batched_speed(output: str) -> float:
    """Tokens a second of the decode phase from `llama-batched-bench --output-format jsonl`. Raises PeerError."""
    for line in output.splitlines():
        if line.lstrip().startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return float(found["speed_tg"])
    raise PeerError(f"llama-batched-bench printed no result: {_last_line(output)}")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise PeerError(f"{Path(command[0]).name} took over {RUN_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise PeerError(f"{Path(command[0]).name} failed: {_last_line(done.stderr or done.stdout)}")
    return done.stdout


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


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[:300] if lines else "it said nothing"
