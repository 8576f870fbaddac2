"""FairShare: how much each tenant has been served, to decide whose prompt is next.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024) against a virtual time, as
in fair queuing of packets. A tenant's counter grows by the tokens computed for it; the smallest counter is served
first. Tenants compete while they have prompts that are not computed yet. One that begins to is lifted to a little below
the virtual time, so that it is let in at once, but being away saves up nothing and having used what nobody else wanted
costs nothing. The virtual time is at least the smallest counter of those that compete, and moves on with every prompt
token, so that new tenants without end, each let in below it, come ever later. A tenant that competes alone is lifted
to it: otherwise bursts of a light tenant, each of which moves the time beyond the other's counter, would use up its
credit for good.
"""

from __future__ import annotations

CREDIT_TOKENS = 1024
MAX_TENANTS = 4096
"""Tenants that do not compete are forgotten beyond this many."""


class FairShare:
    """Counters in computed tokens, by tenant."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._prompts: dict[str, int] = {}
        self._now = 0.0

    def enter(self, tenant: str) -> None:
        """A prompt of a tenant waits to be computed."""
        if tenant not in self._prompts:
            self._now = max(self._now, min((self._served[one] for one in self._prompts), default=0.0))
            self._served[tenant] = max(self._served.pop(tenant, 0.0), self._now - CREDIT_TOKENS)
            self._forget()
        self._prompts[tenant] = self._prompts.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """A prompt is computed, or not wanted any more."""
        self._prompts[tenant] -= 1
        if not self._prompts[tenant]:
            del self._prompts[tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        """Tokens of a prompt or of an answer are computed for a tenant."""
        known = tenant in self._served
        self._served[tenant] = self._served.get(tenant, self._now) + tokens
        if not known:
            self._forget()
        if tenant in self._prompts:
            self._now += tokens / len(self._prompts)
            if len(self._prompts) == 1:
                # It gets everything, and is owed nothing any more.
                self._served[tenant] = max(self._served[tenant], self._now)

    def served(self, tenant: str) -> float:
        """The counter of a tenant that competes; smaller is next."""
        return self._served[tenant]

    def _forget(self) -> None:
        """Drop tenants that do not compete, those that came longest ago first."""
        excess = len(self._served) - MAX_TENANTS
        if excess > 0:
            for tenant in [one for one in self._served if one not in self._prompts][:excess]:
                del self._served[tenant]
