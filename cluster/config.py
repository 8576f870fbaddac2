"""ClusterConfig: one tree from a YAML file, the environment and flags, in that order.

`HEADWATER__WORKER__BLOCK_SIZE=32` in the environment sets `worker.block_size`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from cluster.errors import UserError
from cluster.models import DEFAULT_MODEL
from cluster.planner import PlannerConfig
from router import strict_yaml
from router.config import GatewayConfig, RouterConfig
from transfer.config import TransferConfig
from transfer.gossip.config import GossipConfig
from workers.config import TiersConfig, WorkerConfig
from workers.paths import cache_dir

ENV_PREFIX = "HEADWATER__"
SECRETS = ("gossip.key", "gateway.api_keys", "gateway.keys_file")
"""Settings whose values are never shown."""


class ConfigError(UserError):
    """A setting that is unknown or cannot be; one line that names it."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Resources = Annotated[
    dict[str, Annotated[float, Field(gt=0)]], Field(description="Ray resources that each takes, such as {GPU: 1}")
]


class ModelConfig(_Section):
    """Which model is served."""

    name: str = Field(DEFAULT_MODEL, description="a known name, a local directory, a .gguf file or a hub id")


class PrefillConfig(_Section):
    """Workers that only compute prompts."""

    replicas: int = Field(1, ge=0, description="number of prefill workers")
    resources: Resources = {}


class DecodeConfig(_Section):
    """Workers that only generate."""

    replicas: int = Field(1, ge=0, description="number of decode workers")
    resources: Resources = {}


class BothConfig(_Section):
    """Workers that do both."""

    replicas: int = Field(0, ge=0, description="number of workers with both roles")
    resources: Resources = {}


class TelemetryConfig(_Section):
    """Where workers serve their metrics; gateways do at their own port."""

    metrics_host: str | None = Field(
        None, description="address to listen on; default: that of each worker's machine in the Ray cluster"
    )
    metrics_port: int = Field(
        0, ge=0, le=65535, description="port of a worker's metrics, where no machine has two workers; 0: any free one"
    )

    @field_validator("metrics_host")
    @classmethod
    def _can_be_reached(cls, value: str | None) -> str | None:
        """Others are told this address."""
        if value in ("0.0.0.0", "::"):
            raise ValueError("names no address that could be scraped; leave it out for that of each worker's machine")
        return value


class ClusterConfig(_Section):
    """Everything a cluster can be told."""

    model: ModelConfig = ModelConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    both: BothConfig = BothConfig()
    worker: WorkerConfig = WorkerConfig()
    tiers: TiersConfig = TiersConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    gateway: GatewayConfig = GatewayConfig()
    gossip: GossipConfig = GossipConfig()
    planner: PlannerConfig = PlannerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _someone_answers(self) -> Self:
        prefill, decode, both = self.prefill.replicas, self.decode.replicas, self.both.replicas
        if bool(prefill) != bool(decode):
            lacking = "decode" if prefill else "prefill"
            raise ValueError(f"{lacking}.replicas is 0: prefill and decode workers only work together")
        if not (prefill or both):
            raise ValueError("prefill.replicas, decode.replicas and both.replicas are all 0: nobody would answer")
        return self

    @property
    def gateways(self) -> list[str]:
        """Names of the wanted gateways."""
        return gateway_names(self.gateway.replicas)

    def resources(self, kind: str) -> dict[str, float]:
        """Ray resources that an actor of a role, or a `gateway`, takes."""
        return dict(getattr(self, kind).resources)

    @property
    def workers(self) -> list[tuple[str, str]]:
        """Names and roles of the wanted workers."""
        counts = {"prefill": self.prefill.replicas, "decode": self.decode.replicas, "both": self.both.replicas}
        return [(f"{role}-{index}", role) for role, count in counts.items() for index in range(count)]


def gateway_names(count: int) -> list[str]:
    """Actor names of so many gateways."""
    return [f"gateway-{index}" for index in range(count)]


def on_this_machine(config: ClusterConfig) -> ClusterConfig:
    """The same, for a cluster that is started here: nobody else reaches it."""
    gossip = config.gossip.model_copy(update={"host": config.gossip.host or "127.0.0.1"})
    telemetry = config.telemetry.model_copy(update={"metrics_host": config.telemetry.metrics_host or "127.0.0.1"})
    return config.model_copy(update={"gossip": gossip, "telemetry": telemetry})


def with_batches(config: ClusterConfig) -> ClusterConfig:
    """The same, with files and batches in the user's cache where nothing is said of them and only this machine's users
    can reach the gateway: others could fill its disk."""
    gateway = config.gateway
    if "batch_path" in gateway.model_fields_set or gateway.host not in ("127.0.0.1", "::1", "localhost"):
        return config
    return config.model_copy(update={"gateway": gateway.model_copy(update={"batch_path": cache_dir() / "batches"})})


def load(file: Path | None, flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> ClusterConfig:
    """The configuration. `flags` maps dotted keys to values, None for flags not given. Raises ConfigError."""
    tree: dict[str, Any] = {}
    if file is not None:
        try:
            content = strict_yaml.load(file.read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"--config {file}: {_where(error)}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"--config {file}: expected a mapping of sections")
        tree = content
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX):
            try:
                value = strict_yaml.load(text)
            except yaml.YAMLError:
                raise ConfigError(f"{name}: its value is not valid YAML") from None
            _set(tree, name.removeprefix(ENV_PREFIX).lower().split("__"), value)
    for key, value in flags.items():
        if value is not None:
            _set(tree, key.split("."), value)
    try:
        return ClusterConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def _set(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{'.'.join(path)}: {part} is not a section")
        tree = child
    tree[path[-1]] = value


def _explain(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(path, _keys(ClusterConfig), n=1, cutoff=0.0)
        return f"{path}: unknown setting; did you mean {nearest[0]}?"
    message = problem["msg"].removeprefix("Value error, ")
    value = problem["input"]
    if isinstance(value, dict | list) or path.startswith(SECRETS):  # a section may have secrets in it
        return f"{path}: {message}".removeprefix(": ")
    return f"{path}: {message}, got {value!r}"


def _where(error: Exception) -> str:
    """What is wrong with a file, without what is in it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys.extend(_keys(field.annotation, f"{prefix}{name}."))
    return keys
