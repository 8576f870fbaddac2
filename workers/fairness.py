"""FairShare: how much each tenant has been served, to decide whose prompt is next.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a tenant's counter grows
by the tokens computed for it, and the smallest counter is served first. A tenant that comes back is lifted to just
below the others, so that being idle saves up nothing but a small credit, which lets it in at once.
"""

from __future__ import annotations

from collections.abc import Iterable

CREDIT_TOKENS = 1024
MAX_TENANTS = 4096
"""Idle tenants beyond this many are forgotten."""


class FairShare:
    """Counters in computed tokens, by tenant."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}

    def arrive(self, tenant: str, active: Iterable[str]) -> None:
        """A request of a tenant that has no other one; `active` are the tenants that have."""
        others = [self._served[one] for one in active if one != tenant]
        floor = min(others) - CREDIT_TOKENS if others else 0
        self._served[tenant] = max(self._served.pop(tenant, 0), floor)
        if len(self._served) > MAX_TENANTS:
            self._forget({tenant, *active})

    def charge(self, tenant: str, tokens: int) -> None:
        """Tokens were computed for a tenant."""
        self._served[tenant] += tokens

    def served(self, tenant: str) -> int:
        """The tenant's counter; smaller is next."""
        return self._served[tenant]

    def _forget(self, active: set[str]) -> None:
        """Drop idle tenants, those that came longest ago first."""
        for tenant in [one for one in self._served if one not in active][: len(self._served) - MAX_TENANTS]:
            del self._served[tenant]
