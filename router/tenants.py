"""The file of tenants: who may use the gateways, with which keys, and how much.

Keys are kept as SHA-256 hashes: a key that `headwater key` makes has 256 random bits, which no hash has to be slow for.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from router import strict_yaml

HASH = "sha256:"
MIN_KEY = 16
"""Characters of a key that somebody has thought of."""
MAX_FILE_BYTES = 4 << 20


class Tenant(BaseModel):
    """What a tenant may do. Its `weight` is its share of the workers' time beside others'; `cache` says whether it has
    cached prefixes of its own, or those of all that share theirs. An `operator` sees on the dashboard what all tenants
    do, and their prompts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: list[Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]]
    weight: float = Field(1.0, ge=0.01, le=100)
    max_priority: int = Field(0, ge=0, le=100)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    max_concurrent: int | None = Field(None, ge=1)
    cache: Literal["private", "shared"] = "private"
    operator: bool = False


class TenantsFile(BaseModel):
    """The file of keys and tenants."""

    model_config = ConfigDict(extra="forbid")

    tenants: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], Tenant]

    @model_validator(mode="after")
    def _keys_are_of_one_each(self) -> Self:
        by_key: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for key in tenant.keys:
                if by_key.setdefault(key, name) != name:
                    raise ValueError(f"tenants {by_key[key]} and {name} have the same key")
        return self


def hashed(key: str) -> str:
    """A key as it stands in the file."""
    return HASH + hashlib.sha256(key.encode()).hexdigest()


def read(file: Path) -> TenantsFile:
    """The tenants of a file. Raises ValueError that names what is wrong, but no key."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{file} is larger than {MAX_FILE_BYTES} bytes")
        content = strict_yaml.load(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from None
    except strict_yaml.DuplicateKey as error:
        raise ValueError(f"{file}{_line(error)}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is no YAML{_line(error)}") from None
    try:
        return TenantsFile.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in problem["loc"])
        parts = str(file), path, problem["msg"].removeprefix("Value error, ")
        raise ValueError(": ".join(part for part in parts if part)) from None


def _line(error: yaml.YAMLError) -> str:
    """Where it is, without what is there."""
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}" if mark is not None else ""
