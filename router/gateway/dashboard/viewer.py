"""Viewer: who looks, and so what is shown.

Figures of workers and gateways are for whoever may look at all, as metrics are. Requests and cached prefixes are their
tenant's, and what prompts say is for operators alone: keys are shared by more people than should read each other's.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.gateway.accounts import Account, Keyring

_TENANT, _GIVEN = b"tenant\0", b"given\0"
"""What salts begin with; see `Account.salt`."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """Sees what is its `tenant`'s; with None everything, and what prompts say."""

    tenant: str | None

    @classmethod
    def of(cls, account: Account, keyring: Keyring) -> Viewer:
        """Whoever came with an account's key; where nobody needs one, everybody sees everything."""
        return cls(None if account.tenant.operator or not keyring.needed else account.name)

    @property
    def salts(self) -> bytes | None:
        """What the salts of the trees begin with that are shown; None for all of them. Prefixes that tenants share are
        nobody's."""
        return None if self.tenant is None else _TENANT + self.tenant.encode() + b"\0"


def owner(salt: bytes) -> dict[str, object]:
    """Whose a tree is: a `tenant`, or nobody's by "", and whether it is `salted` by a client."""
    if not salt.startswith(_TENANT):
        return {"tenant": "", "salted": salt.startswith(_GIVEN)}
    name, _, given = salt[len(_TENANT) :].partition(b"\0")
    return {"tenant": name.decode(errors="replace"), "salted": bool(given)}
