"""Trials: whether workers may be given a grammar, found out in a process of its own.

llguidance bounds most of what compiling takes, but not all: a `multipleOf` of six digits takes seconds, and a chain of
thousands of definitions overflows the stack, which ends a process. So a grammar is compiled first where neither hurts,
and workers compile only what went well there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from router.gateway import trial_process
from router.gateway.errors import ApiError, invalid, unavailable
from router.gateway.text import Text
from transfer.guide import STEP_ITEMS

COMPILE_S = 1.0
"""Of a core, for one grammar. What people write takes milliseconds."""
MAX_WAIT_S = 15.0
"""For the grammars of others."""
KEPT = 4096
"""Verdicts that are kept."""


class Trials:
    """One grammar at a time, for the tokenizer of `text`. The process starts with the first one, and again after one
    that ended it; it ends with this one's."""

    def __init__(self, text: Text, vocab_size: int) -> None:
        self._about = {
            "tokenizer": text.description,
            "vocab_size": max(vocab_size, text.size),
            "eos": text.eos,
            "step_items": STEP_ITEMS,
            "seconds": COMPILE_S,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "trials")
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    async def check(self, grammar: str, field: str) -> None:
        """Raises ApiError: 400 for a grammar that workers must not get, 503 when too many others wait."""
        key = hashlib.sha256(grammar.encode()).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            trial = asyncio.get_running_loop().run_in_executor(self._thread, self._verdict, key, grammar)
            try:
                verdict = await asyncio.wait_for(trial, MAX_WAIT_S)
            except asyncio.TimeoutError:
                raise ApiError(503, f"{field}: too many grammars wait to be compiled", field, retry_after_s=2) from None
        if verdict:
            raise invalid(f"{field}: {verdict}", field)

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _verdict(self, key: bytes, grammar: str) -> str:
        if (verdict := self._verdicts.get(key)) is None:  # others may have asked for the same meanwhile
            verdict = self._verdicts[key] = self._try(grammar)
            if len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)
        return verdict

    def _try(self, grammar: str) -> str:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        # It ends itself when it takes too long, unless it is not given a core, or stopped.
        late = threading.Timer(MAX_WAIT_S, process.kill)
        late.start()
        try:
            _send(process, grammar)
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            late.cancel()
        if answer:
            return str(json.loads(answer))
        self._process = None
        process.stdin.close()
        process.stdout.close()
        if (code := process.wait()) >= 0:
            raise RuntimeError(f"the process that compiles grammars has ended with {code}")
        if code == -signal.SIGKILL:
            raise unavailable("the process that compiles grammars did not answer, or was killed")
        if code == -signal.SIGPROF:
            return f"takes more than {COMPILE_S:g} s to compile"
        return "breaks the compiler: nested too deeply, a chain of definitions too long, or a number out of range"

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", trial_process.__file__]
        pipe = subprocess.PIPE
        self._process = process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        _send(process, self._about)
        return process


def _send(process: subprocess.Popen[bytes], what: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what).encode() + b"\n")
    process.stdin.flush()
