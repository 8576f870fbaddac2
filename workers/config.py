"""What a worker can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from typing_extensions import Self

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: int | str) -> int:
    """A size in bytes from a number or a text such as "1GiB" or "512 MB". Raises ValueError naming the text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a size; write for example 1GiB or 512MiB")
    text = value.strip()
    digits = text.rstrip("KMGTIBkmgtib ")
    unit = text[len(digits) :].strip().upper() or "B"
    try:
        return int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{value!r} is not a size; write for example 1GiB or 512MiB") from None


class StartError(Exception):
    """The configuration cannot work on this model or machine; the message names the setting to change."""


TierFormat = Literal["exact", "int8", "fp8"]
WritePolicy = Literal["write-through", "write-back", "selective"]


class TiersConfig(BaseModel):
    """Where a worker keeps what its KV pool has no room for; the same for every worker of a cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: int = Field(0, ge=0, description="host memory for cached blocks, per worker; 0: none")
    disk: int = Field(0, ge=0, description="disk space for cached blocks, per worker; 0: none; needs tiers.host")
    disk_path: Path | None = Field(
        None, description="directory for them; workers that have the same one use one another's"
    )
    policy: WritePolicy = Field(
        "write-through",
        description="what goes down: whatever is computed, what is about to be evicted, or what was used often enough",
    )
    hits: int = Field(2, ge=1, description="uses after which `selective` keeps a prefix")
    in_flight: int = Field(64 * 2**20, ge=1, description="bytes on their way down at a time, per worker")
    format: TierFormat = Field(
        "exact",
        description="what a block is there: its bytes, or a byte for each value (int8, fp8), which is not exact",
    )
    guard: bool = Field(True, description="compute what is not faster to load")
    tenant_share: float = Field(1.0, gt=0, le=1, description="most of a tier that one tenant may fill")

    @property
    def lossy(self) -> bool:
        """Whether cached prefixes may not be what the model computed."""
        return bool(self.host) and self.format != "exact"

    @field_validator("host", "disk", "in_flight", mode="before")
    @classmethod
    def _parse_sizes(cls, value: int | str) -> int:
        return parse_bytes(value)

    @field_validator("disk_path")
    @classmethod
    def _whole_path(cls, value: Path | None) -> Path | None:
        """Workers have working directories of their own."""
        return value.absolute() if value is not None else None

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if self.format != "exact" and not self.host:
            raise ValueError(f"format is {self.format} and host is 0: there are no tiers that could have it")
        if self.disk and not self.host:
            raise ValueError(f"host is 0 and disk {self.disk}: blocks go to disk through host memory")
        if self.disk and self.disk_path is None:
            raise ValueError(f"disk is {self.disk} and disk_path is not set: there is no directory to write to")
        return self


class WorkerConfig(BaseModel):
    """Settings of one worker; the same for every worker of a cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="KV and compute type; auto is bfloat16 where the device is fast at it, otherwise float32"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes CUDA where there is a device")
    kv_memory: int = Field(2**30, ge=1, description="memory of the KV pool, per worker")
    block_size: int = Field(16, ge=1, le=1024, description="tokens in a block")
    max_model_len: int | None = Field(None, ge=2, description="longest prompt plus output, in tokens; default: model's")
    step_tokens: int = Field(
        512, validate_default=True, description="token budget of a step; long prompts are computed in such chunks"
    )
    max_running: int = Field(64, ge=1, description="sequences in a step at most")
    max_waiting: int = Field(512, ge=1, description="queue bound; beyond it the worker answers busy")
    max_overtaken: int = Field(
        16,
        ge=0,
        description="later prompts of its tenant that may begin before a queued one, whatever the reason; as many of "
        "anybody's while it lacks blocks",
    )
    prefix_cache: bool = Field(True, description="keep and reuse KV of earlier prompts and answers")
    eviction: Literal["lru", "lru-k", "lfu", "slru", "fifo"] = Field(
        "lru", description="which cached prefix goes first"
    )
    attention: Literal["auto", "torch", "flashinfer"] = Field(
        "auto", description="auto is FlashInfer on CUDA and PyTorch elsewhere"
    )
    shared_attention: bool = Field(True, description="read context that sequences of a step share once for all of them")
    compiled_attention: bool = Field(True, description="compiled attention where few rows see a context, on CPUs")
    drain_s: float = Field(
        10.0, ge=0, description="how long a worker that leaves lets requests end before others go on with them"
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of a worker; default: all cores, shared with the workers that compute at the time",
    )

    @field_validator("step_tokens")
    @classmethod
    def _at_least_a_block(cls, value: int, info: ValidationInfo) -> int:
        block_size = info.data.get("block_size", 1)
        if value < block_size:
            raise ValueError(f"is smaller than a block of {block_size} tokens (worker.block_size)")
        return value

    @field_validator("kv_memory", mode="before")
    @classmethod
    def _parse_kv_memory(cls, value: int | str) -> int:
        return parse_bytes(value)
