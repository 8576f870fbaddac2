"""What gossip can be told."""

from __future__ import annotations

import ipaddress

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator

MIN_KEY = 16
"""Bytes that a cluster key needs."""


class GossipConfig(BaseModel):
    """Settings of gossip; every node of a cluster has the same."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: SecretStr | None = Field(
        None, description="secret that all nodes of a cluster share, 16 bytes or more; default: a new one at each start"
    )
    host: str | None = Field(
        None, description="numeric address of each node; default: that of its machine in the Ray cluster"
    )
    keys_per_worker: int = Field(6250, ge=1, le=50_000, description="most prefix keys that a worker publishes")
    update_interval_s: float = Field(0.25, gt=0, description="how often a worker reports its load and changes, seconds")
    update_changes: int = Field(100, ge=1, description="changes of a worker's cache that are reported at once")
    relay_interval_s: float = Field(0.1, gt=0, description="how often a router passes on what workers say, seconds")
    compare_interval_s: float = Field(1.0, gt=0, description="how often a router compares with another one, seconds")
    silent_s: float = Field(
        0.8, gt=0, validate_default=True, description="a worker not heard from for this long gets no work, seconds"
    )
    probe_interval_s: float = Field(1.0, gt=0, description="how often a node probes another one, seconds")
    probe_timeout_s: float = Field(
        0.5, gt=0, validate_default=True, description="when a node that is probed is asked through others, seconds"
    )
    suspicion: float = Field(4.0, gt=0, description="how long a suspect may answer, in log10(nodes) probe intervals")
    spread_interval_s: float = Field(0.2, gt=0, description="how often news of members are passed on, seconds")
    sync_interval_s: float = Field(5.0, gt=0, description="how often a node compares its members with another one's")
    forget_s: float = Field(120.0, gt=0, description="how long a dead node is remembered and tried again, seconds")

    @field_validator("key")
    @classmethod
    def _is_long_enough(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and (size := len(value.get_secret_value().encode())) < MIN_KEY:
            raise ValueError(f"has {size} bytes; it needs {MIN_KEY} or more")
        return value

    @field_validator("host")
    @classmethod
    def _can_be_reached(cls, value: str | None) -> str | None:
        """The others are told this address, and look up no names."""
        try:
            reachable = value is None or not ipaddress.ip_address(value).is_unspecified
        except ValueError:
            reachable = False
        if not reachable:
            raise ValueError(f"{value!r} is not the numeric address of a node")
        return value

    @field_validator("silent_s")
    @classmethod
    def _outlasts_updates(cls, value: float, info: ValidationInfo) -> float:
        interval = info.data.get("update_interval_s", 0.0) + info.data.get("relay_interval_s", 0.0)
        if value <= 2 * interval:
            raise ValueError(f"must be more than twice update_interval_s + relay_interval_s ({interval:g})")
        return value

    @field_validator("probe_timeout_s")
    @classmethod
    def _leaves_time_to_ask_others(cls, value: float, info: ValidationInfo) -> float:
        if value >= info.data.get("probe_interval_s", float("inf")):
            raise ValueError("must be less than probe_interval_s")
        return value
