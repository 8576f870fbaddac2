"""FairShare: how much each tenant has been served, to decide whose prompt is next.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024) against a virtual time, as
in fair queuing of packets: a tenant's counter grows by the tokens computed for it, the virtual time by those tokens
divided among all tenants that are there. The smallest counter is served first. A tenant that comes is lifted to a
little below the virtual time, so that it is let in at once, but being away saves up nothing, having been served alone
costs nothing, and new tenants without end cannot keep an old one waiting.
"""

from __future__ import annotations

CREDIT_TOKENS = 1024
MAX_TENANTS = 4096
"""Tenants that are not there are forgotten beyond this many."""


class FairShare:
    """Counters in computed tokens, by tenant. A tenant is there while it has sequences, which are counted here."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._sequences: dict[str, int] = {}
        self._now = 0.0

    def arrive(self, tenant: str) -> None:
        """One more sequence of a tenant."""
        if tenant not in self._sequences:
            self._served[tenant] = max(self._served.pop(tenant, 0.0), self._now - CREDIT_TOKENS)
            self._forget()
        self._sequences[tenant] = self._sequences.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """One sequence less."""
        self._sequences[tenant] -= 1
        if not self._sequences[tenant]:
            del self._sequences[tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        """Tokens are computed for a tenant that is there."""
        self._served[tenant] += tokens
        self._now += tokens / len(self._sequences)

    def served(self, tenant: str) -> float:
        """The tenant's counter; smaller is next."""
        return self._served[tenant]

    def _forget(self) -> None:
        """Drop tenants that are not there, those that came longest ago first."""
        excess = len(self._served) - MAX_TENANTS
        for tenant in [one for one in self._served if one not in self._sequences][: max(0, excess)]:
            del self._served[tenant]
