"""What the KV transfer can be told."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self


class TransferConfig(BaseModel):
    """Settings of the KV channel."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["UCX"] = Field("UCX", description="NIXL plugin that moves the blocks")
    poll_interval_s: float = Field(0.002, gt=0, le=1, description="how often open transfers are polled, in seconds")
    stall_s: float = Field(10.0, gt=0, description="a transfer without progress for this long has failed, in seconds")
    lease_s: float = Field(30.0, gt=0, description="how long a decode worker waits before it asks the sender")
    call_timeout_s: float = Field(10.0, gt=0, description="deadline of control calls between workers, in seconds")

    @model_validator(mode="after")
    def _lease_outlasts_polls(self) -> Self:
        if self.lease_s <= 2 * self.poll_interval_s:
            raise ValueError(f"lease_s ({self.lease_s}) must be more than twice poll_interval_s")
        return self
