"""Request traces: one JSON object a line, in the format of the public Mooncake traces.

`timestamp` is in milliseconds, `hash_ids` has one id for each block of 512 prompt tokens, and equal ids mean equal
beginnings of the prompt up to there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, TypeGuard

from cluster.errors import UserError

BLOCK_TOKENS = 512
MAX_TOKENS = 10_000_000
"""Longest prompt or answer that is believed to be meant."""
MAX_STAMP_MS = 10**15
"""Latest moment."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `blocks` numbers its prompt's blocks: equal numbers are equal prefixes, whatever the trace's ids."""

    number: int
    arrival: float  # seconds after the trace's beginning
    tokens: int
    output: int
    blocks: tuple[int, ...]

    @property
    def prompt(self) -> bytes:
        """Packed tokens, whole blocks; made anew each time, because all of a trace's prompts would fill the memory."""
        return b"".join([block.to_bytes(4, "little") * BLOCK_TOKENS for block in self.blocks])


@dataclass(frozen=True, slots=True)
class _Line:
    timestamp: float
    tokens: int
    output: int
    ids: tuple[int, ...]


def read(file: Path, speed: float = 1.0, raw_timestamps: bool = False) -> list[Request]:
    """The requests of a trace in order of arrival, played `speed` times as fast. Traces stamp many requests alike; they
    are spread evenly up to the next stamp, unless `raw_timestamps`. Raises UserError, which names the line, the field
    and the value."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"--trace {file}: {error.strerror}") from None
    lines = [_parse(file, number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not lines:
        raise UserError(f"--trace {file}: no request in it")
    lines.sort(key=lambda line: line.timestamp)
    stamps = [line.timestamp for line in lines]
    first = stamps[0]
    times = stamps if raw_timestamps else spread(stamps)
    numbers: dict[tuple[int, int], int] = {}
    return [
        Request(number, (time - first) / 1000 / speed, line.tokens, line.output, _numbered(numbers, line.ids))
        for number, (time, line) in enumerate(zip(times, lines, strict=True))
    ]


def spread(stamps: Sequence[float]) -> list[float]:
    """The k-th of n equal stamps becomes stamp + k/n of the way to the next one; the last stamp's way is as long as
    that before it."""
    counts = [(stamp, len(list(group))) for stamp, group in groupby(stamps)]
    gaps = [after - stamp for (stamp, _), (after, _) in pairwise(counts)]
    gaps.append(gaps[-1] if gaps else 0.0)
    return [
        stamp + place / count * gap for (stamp, count), gap in zip(counts, gaps, strict=True) for place in range(count)
    ]


def _numbered(numbers: dict[tuple[int, int], int], ids: tuple[int, ...]) -> tuple[int, ...]:
    """One number for each prefix, so that it alone says what comes before it."""
    blocks: list[int] = []
    before = -1
    for one in ids:
        before = numbers.setdefault((before, one), len(numbers))
        blocks.append(before)
    return tuple(blocks)


def _parse(file: Path, number: int, line: bytes) -> _Line:
    where = f"--trace {file}, line {number}"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise UserError(f"{where}: not a JSON object: {_short(line.decode(errors='replace'))}")

    def wrong(field: str, wanted: str) -> UserError:
        value = _short(json.dumps(entry[field])) if field in entry else "missing"
        return UserError(f"{where}: {field}: {value}: must be {wanted}")

    timestamp, ids = entry.get("timestamp"), entry.get("hash_ids")
    if not _number(timestamp) or not 0 <= timestamp <= MAX_STAMP_MS:
        raise wrong("timestamp", f"milliseconds, from 0 to {MAX_STAMP_MS}")
    for field, least in (("input_length", 1), ("output_length", 0)):
        if not _whole(entry.get(field)) or not least <= entry[field] <= MAX_TOKENS:
            raise wrong(field, f"a whole number from {least} to {MAX_TOKENS}")
    if not isinstance(ids, list) or not all(_whole(one) and one >= 0 for one in ids):
        raise wrong("hash_ids", "a list of whole numbers, 0 or more")
    tokens = entry["input_length"]
    # Some writers leave out a last block that is not full.
    if not tokens // BLOCK_TOKENS <= len(ids) <= -(-tokens // BLOCK_TOKENS):
        blocks = -(-tokens // BLOCK_TOKENS)
        wanted = f"{blocks}, one for each {BLOCK_TOKENS} tokens of input_length {tokens}"
        raise UserError(f"{where}: hash_ids: {len(ids)} of them: must be {wanted}")
    return _Line(float(timestamp), tokens, entry["output_length"], tuple(ids))


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
