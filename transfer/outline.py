"""Outline: what a worker's caches hold, as a tree that a person can look at. It travels from workers to gateways."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens that follow each other in all prompts that have them, behind those of the run number `parent` (-1: of
    none). `key` is what it can be asked for by: the chain key of its first block, of a tree that of its root; empty
    where there is none. A whole tree begins with a run of no tokens that has its `salt`.

    Of its `tokens` so many are on the `device`, in `host` memory and on `disk`, which may all have the same ones; its
    text begins with `packed`. Requests have used it `uses` times, the last time `ago` uses of anything before the
    latest of all; where only lower tiers have it that is not known, and both are 0. `pins` count who uses it now.
    `below` are the tokens of everything behind it and its own; `hidden` of its `children` are not among the runs.
    """

    parent: int
    key: bytes
    tokens: int
    device: int
    host: int
    disk: int
    packed: bytes = b""
    salt: bytes = b""
    uses: int = 0
    ago: int = 0
    pins: int = 0
    below: int = 0
    children: int = 0
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class Outline:
    """The largest runs from one on, each behind its parent. `path` has the keys that lead to the first, as far as they
    were found, and `start` is how many tokens are before it. `whole` is False where time did not allow to see all, so
    that `below` is at least so much. It kept the engine waiting for `seconds`."""

    path: tuple[bytes, ...]
    start: int
    runs: tuple[Run, ...]
    seen: int
    whole: bool
    seconds: float
