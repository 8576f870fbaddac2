"""Seeds of the tests that repeat one thing under chance: a few in `make test`, the others in `make test-long`."""

from typing import Any

import pytest


def seeds(few: int, all_of_them: int) -> list[Any]:
    """Parameters from 0 to `all_of_them`, of which `make test` takes the first `few`."""
    return [pytest.param(seed, marks=pytest.mark.long if seed >= few else ()) for seed in range(all_of_them)]
