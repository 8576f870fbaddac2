"""Guides: grammars that an output has to follow, compiled and advanced by llguidance.

A guide's state is a function of its grammar and the tokens of the answer so far, so a worker that goes on with another
one's answer brings a fresh guide to the same state by letting it accept these tokens.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

KEPT = 64
"""Compiled grammars that are kept, those that were used last."""
STEP_ITEMS = 5000
"""Rules that may be under way in one step, a tenth of llguidance's limit. JSON has hundreds of them; ambiguous grammars
have ever more, until a step takes seconds in which no other answer goes on."""
NICE = 10
"""Of the thread that compiles beside an engine. On Linux each thread has its own."""
LIMITS = LLParserLimits(step_max_items=STEP_ITEMS)


class GuideError(ValueError):
    """A grammar that cannot be compiled, or that nothing fits."""


class Guide:
    """The state of one answer. `vocab_size` is the width of the logits."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def complete(self) -> bool:
        """Whether the answer can only end here."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def allowed(self) -> np.ndarray:
        """Which tokens may come next, bool `[vocab_size]`. Raises GuideError when none may, when the grammar has become
        too complex, and when the answer has left it."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if self._matcher.is_error() or not mask.any():
            raise GuideError(f"the grammar cannot go on: {_first_line(self._matcher.get_error()) or 'no token fits'}")
        return mask

    def accept(self, tokens: list[int]) -> None:
        """Go on by tokens of the answer; `allowed` tells of those that were not."""
        self._matcher.consume_tokens(tokens)


class Guides:
    """Compiles grammars for the tokenizer in the model directory `path`. Any thread may call; compiling leaves
    the interpreter to others. What it takes is not bounded here: grammars of clients are tried before."""

    def __init__(self, path: Path, vocab_size: int, eos: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self._path, self._eos = path, sorted(eos)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "compile", initializer=os.nice, initargs=(NICE,))

    async def guide(self, grammar: str) -> Guide:
        """As `compile`, in a thread that gives way to those that compute: since they wait for one another, a core less
        costs them far more than a core. Raises GuideError."""
        if (known := self._known(grammar)) is not None:
            return known
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.compile, grammar)

    def compile(self, grammar: str) -> Guide:
        """A guide at its beginning. Raises GuideError."""
        if (known := self._known(grammar)) is not None:
            return known
        tokenizer = self._tokenizer or self.load()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GuideError(_first_line(matcher.get_error()))
        Guide(matcher, self.vocab_size).allowed()
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return Guide(matcher.deep_copy(), self.vocab_size)

    def _known(self, grammar: str) -> Guide | None:
        with self._lock:
            if (matcher := self._compiled.get(grammar)) is None:
                return None
            self._compiled.move_to_end(grammar)
            return Guide(matcher.deep_copy(), self.vocab_size)

    def load(self) -> LLTokenizer:
        """Build the tokenizer, before somebody has to wait for that: it keeps all threads from running meanwhile."""
        file = self._path / "tokenizer.json"
        # transformers takes much longer to come to the same, and is only needed where it has to convert something.
        fast = Tokenizer.from_file(str(file)) if file.exists() else AutoTokenizer.from_pretrained(self._path)._tokenizer
        size = max(self.vocab_size, fast.get_vocab_size())
        self._tokenizer = LLTokenizer(described(fast), n_vocab=size, eos_token=self._eos or None)
        return self._tokenizer


def described(tokenizer: Tokenizer) -> str:
    """A tokenizer as JSON, without what it does to batches."""
    bare = Tokenizer.from_str(tokenizer.to_str())
    bare.no_padding()
    bare.no_truncation()
    return str(bare.to_str())


def _first_line(message: str) -> str:
    return message.strip().split("\n", 1)[0]
