"""Accounts: what each tenant uses of this gateway, and whose key is whose.

A tenant's limits hold in each gateway by itself.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from router.gateway.errors import ApiError
from router.tenants import Tenant, hashed, read

_log = logging.getLogger(__name__)
DEFAULT = "default"
"""The tenant of keys that are configured by themselves."""
REFRESH_S = 1.0
"""How often the file is looked at."""
BURST_S = 60.0
"""A rate of so many a minute allows as many at once."""


@dataclass(slots=True)
class Bucket:
    """What may still be used of a rate. It may be overdrawn: what an answer takes is only known when it is there."""

    per_minute: int
    level: float
    at: float

    def wait_s(self, now: float, share: float = 1.0) -> float:
        """Until something may be used again, by who leaves all but a `share` to others; 0 for now."""
        most = self.per_minute * BURST_S / 60
        self.level = min(most, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now
        needed = min(most, 1 + (1 - share) * most)
        return 0.0 if self.level >= needed else (needed - self.level) * 60 / self.per_minute

    def take(self, amount: int) -> None:
        """Use some."""
        self.level -= amount


class Account:
    """A tenant's use of this gateway. `name` is "" where nobody needs a key."""

    def __init__(self, name: str, tenant: Tenant, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.tenant = tenant
        self.running = 0
        self._clock = clock
        now = clock()
        self._requests = _bucket(tenant.requests_per_minute, now)
        self._tokens = _bucket(tenant.tokens_per_minute, now)

    def salt(self, given: bytes) -> bytes:
        """Which cached prefixes a request with this salt of its own may use."""
        if not self.name or self.tenant.cache == "shared":
            # Not as it is: a client could write what stands before a tenant's.
            return given and b"given\0" + given
        return b"tenant\0" + self.name.encode() + b"\0" + given

    def changed(self, tenant: Tenant) -> None:
        """The operator has changed the limits. What was used counts on."""
        now = self._clock()
        if tenant.requests_per_minute != self.tenant.requests_per_minute:
            self._requests = _bucket(tenant.requests_per_minute, now)
        if tenant.tokens_per_minute != self.tenant.tokens_per_minute:
            self._tokens = _bucket(tenant.tokens_per_minute, now)
        self.tenant = tenant

    def begin(self, share: float = 1.0) -> None:
        """A request begins. Raises ApiError 429 where a limit is reached, or a `share` of it, which is at least one
        request at a time."""
        most, now = self.tenant.max_concurrent, self._clock()
        if most is not None and self.running >= max(1, int(most * share)):
            raise _limited(f"{most} requests are under way, more are not allowed (max_concurrent)", 1.0)
        for bucket, name in ((self._requests, "requests_per_minute"), (self._tokens, "tokens_per_minute")):
            if bucket is not None and (wait_s := bucket.wait_s(now, share)) > 0:
                raise _limited(f"the rate is at its limit of {bucket.per_minute} ({name})", wait_s)
        if self._requests is not None:
            self._requests.take(1)
        self.running += 1

    def go_on(self) -> None:
        """Something of a request goes on when that is over."""
        self.running += 1

    def end(self) -> None:
        """It is over."""
        self.running -= 1

    def used(self, tokens: int) -> None:
        """Tokens of a prompt or of an answer."""
        if self._tokens is not None:
            self._tokens.take(tokens)


def _bucket(per_minute: int | None, now: float) -> Bucket | None:
    return Bucket(per_minute, per_minute * BURST_S / 60, now) if per_minute is not None else None


def _limited(message: str, wait_s: float) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=max(1, math.ceil(wait_s)))


NOBODY = Account("", Tenant(keys=[]))
current: ContextVar[Account] = ContextVar("account", default=NOBODY)
"""In every task that a request starts."""


class Keyring:
    """Accounts by key: the `keys` that are configured, and those of a file, which is read again when it changes. Raises
    ValueError for a file that cannot be used; a later one is only reported, and the last good one stays."""

    def __init__(
        self, keys: Iterable[str] = (), file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = file
        self._clock = clock
        self._own = [hashed(key) for key in keys]
        self._accounts: dict[str, Account] = {}
        self._by_key: dict[str, Account] = {}
        self._seen = self._changed = _state(file)
        self._looked_at = clock()
        self._use(self._read())

    @property
    def needed(self) -> bool:
        """Whether anybody needs a key."""
        return bool(self._own) or self._file is not None

    def account(self, key: str) -> Account | None:
        """Whose key it is."""
        self._refresh()
        return self._by_key.get(hashed(key))

    def named(self, name: str) -> Account | None:
        """The account of a tenant; "" is that of all where nobody needs a key."""
        self._refresh()
        return self._accounts.get(name) if self.needed else NOBODY if not name else None

    def _refresh(self) -> None:
        now = self._clock()
        if self._file is None or now < self._looked_at + REFRESH_S:
            return
        self._looked_at = now
        seen = _state(self._file)
        if seen == self._seen or seen != self._changed:
            self._changed = seen  # perhaps it is still being written
            return
        self._seen = seen
        try:
            self._use(self._read())
            _log.info("%s is read again: %d tenants", self._file, len(self._accounts))
        except ValueError as error:
            _log.error("the keys stay as they were: %s", error)

    def _read(self) -> dict[str, Tenant]:
        tenants: dict[str, Tenant] = {}
        if self._file is not None:
            tenants.update(read(self._file).tenants)
        if self._own:
            known = tenants.get(DEFAULT, Tenant(keys=[]))
            tenants[DEFAULT] = known.model_copy(update={"keys": [*known.keys, *self._own]})
        return tenants

    def _use(self, tenants: dict[str, Tenant]) -> None:
        """Raises ValueError where two tenants have the same key."""
        by_key: dict[str, str] = {}
        for name, tenant in tenants.items():
            for key in tenant.keys:
                if by_key.setdefault(key, name) != name:
                    raise ValueError(f"tenants {by_key[key]} and {name} have the same key")
        for name, tenant in tenants.items():
            if name in self._accounts:
                self._accounts[name].changed(tenant)
            else:
                self._accounts[name] = Account(name, tenant, self._clock)
        self._accounts = {name: self._accounts[name] for name in tenants}
        self._by_key = {key: self._accounts[name] for key, name in by_key.items()}


def _state(file: Path | None) -> tuple[int, int, int] | None:
    """What changes when a file does; None where there is none."""
    try:
        stat = os.stat(file) if file is not None else None
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat is not None else None
