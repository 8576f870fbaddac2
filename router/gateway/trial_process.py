"""The process in which a gateway tries grammars, run as a script: it needs llguidance and nothing of Headwater.

On standard input it gets a line with the tokenizer, then a line for each grammar; each answer is a line with what is
wrong with that grammar. All are JSON. A grammar that takes too long, or too much stack, ends the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

STACK_BYTES = 1 << 20
"""Less than a thread of a worker has: what fits here does not overflow there."""
NICE = 5
"""What computes on the same machine goes first."""
SHOWN = 300
"""Characters of a message: some repeat the whole grammar."""


def serve() -> None:
    """Answer until the input ends."""
    told = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(told["tokenizer"], n_vocab=told["vocab_size"], eos_token=told["eos"])
    limits = LLParserLimits(step_max_items=told["step_items"], verbose_errors=False)
    for line in sys.stdin:
        # Of processor time, so that a busy machine refuses nothing. The signal's default is to end the process.
        signal.setitimer(signal.ITIMER_PROF, told["seconds"])
        problem = wrong(tokenizer, limits, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(problem[:SHOWN]) + "\n")
        sys.stdout.flush()


def wrong(tokenizer: LLTokenizer, limits: LLParserLimits, grammar: str) -> str:
    """What is wrong with a grammar, "" if nothing."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    any_token = not matcher.is_error() and any(matcher.compute_bitmask())
    message = " ".join(matcher.get_error().split())
    if message.startswith("NoExtension") or not (message or any_token):
        return "no answer fits it"
    return message


if __name__ == "__main__":
    os.nice(NICE)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
