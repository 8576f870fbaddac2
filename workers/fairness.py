"""FairShare: how much each tenant has been served, to decide whose prompt is next.

Start-time fair queuing (Goyal, Vin and Cheng, SIGCOMM 1996) of tokens; the counters are those of Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024. A tenant's counter grows by the tokens computed for it, and the
smallest counter is served first. The virtual time is set after each step and never falls: it rises to the smallest
counter of the tenants that are left wanting, or, when nobody is, to the largest of all. A counter that is further than
a credit behind the virtual time counts as if it were not, so who wants nothing saves up no more than that. Having used
what nobody else wanted costs nothing, for the virtual time has then caught up with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from operator import itemgetter

CREDIT_TOKENS = 1024
MAX_TENANTS = 4096
"""Counters that are kept at most."""


class FairShare:
    """Counters in computed tokens, by tenant."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._largest = 0.0
        self._now = 0.0

    def served(self, tenant: str) -> float:
        """The counter of a tenant; smaller is next."""
        least = self._now - CREDIT_TOKENS
        return max(self._served.get(tenant, least), least)

    def charge(self, tenant: str, tokens: float) -> None:
        """Tokens of a prompt or of an answer are computed for a tenant, divided by its weight."""
        self._served[tenant] = self.served(tenant) + tokens
        self._largest = max(self._largest, self._served[tenant])
        if len(self._served) > MAX_TENANTS:
            # To be forgotten gives a tenant its credit anew. Those with the smallest counters gain least by that.
            self._served = dict(nlargest(MAX_TENANTS // 2, self._served.items(), key=itemgetter(1)))

    def settle(self, wanting: Iterable[str]) -> None:
        """A step is over; the tenants that are left wanting have prompts to compute that it had no room for."""
        self._now = max(self._now, min(map(self.served, wanting), default=self._largest))
