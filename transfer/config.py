"""What the KV transfer can be told."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

_UCX_KEY = re.compile(r"[A-Z0-9_]+")
_PORTS = re.compile(r"(\d{1,5})-(\d{1,5})")


def parse_ports(text: str) -> range:
    """The ports of a text such as "20000-20100", both ends included. Raises ValueError."""
    found = _PORTS.fullmatch(text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]) <= 65535:
        raise ValueError("is not a range of ports; write for example 20000-20100")
    return range(int(found[1]), int(found[2]) + 1)


class TransferConfig(BaseModel):
    """Settings of the KV channel."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    backend: Literal["UCX"] = Field("UCX", description="NIXL plugin that moves the blocks")
    interface: str | None = Field(
        None, description="network device, or an IP address of each worker's machine, for blocks; default: UCX chooses"
    )
    ports: str | None = Field(None, description="range of the TCP ports that workers listen on; default: any free port")
    ucx: dict[str, str] = Field(
        default_factory=dict, validate_default=True, description="further UCX variables, without their prefix UCX_"
    )
    poll_interval_s: float = Field(0.005, gt=0, le=1, description="how often open transfers are polled, in seconds")
    stall_s: float = Field(10.0, gt=0, description="a transfer without progress for this long has failed, in seconds")
    lease_s: float = Field(
        30.0, gt=0, validate_default=True, description="how long a decode worker waits before it asks the sender"
    )
    call_timeout_s: float = Field(10.0, gt=0, description="deadline of control calls between workers, in seconds")

    @field_validator("ports")
    @classmethod
    def _ports_are_a_range(cls, value: str | None) -> str | None:
        if value is not None:
            parse_ports(value)
        return value

    @field_validator("ucx")
    @classmethod
    def _ucx_says_nothing_twice(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        settings = {key.upper(): text for key, text in value.items()}  # keys from the environment are in lower case
        for key in settings:
            if not _UCX_KEY.fullmatch(key) or key.startswith("UCX_"):
                raise ValueError(f"{key!r} is not the name of a UCX variable without its prefix, such as TLS")
        for key, setting in (("NET_DEVICES", "interface"), ("TCP_PORT_RANGE", "ports")):
            if key in settings and info.data.get(setting) is not None:
                raise ValueError(f"{key} is already what transfer.{setting} sets")
        return settings

    @field_validator("lease_s")
    @classmethod
    def _lease_outlasts_polls(cls, value: float, info: ValidationInfo) -> float:
        interval = info.data.get("poll_interval_s", 0.0)
        if value <= 2 * interval:
            raise ValueError(f"must be more than twice transfer.poll_interval_s ({interval})")
        return value
