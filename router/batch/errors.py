"""Why a batch cannot begin or go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class BatchError(Exception):
    """Something that whoever runs the batch can put right; the message is one line that says what."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a batch, and where it has one, at which line of its input."""

    code: str
    message: str
    line: int | None = None


class Refused(BatchError):
    """The inputs cannot be a batch. `problems` are the first ones, in the order of their lines."""

    def __init__(self, message: str, problems: Sequence[Problem]) -> None:
        super().__init__(message)
        self.problems = list(problems)
