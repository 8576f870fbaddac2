"""What router and gateway can be told."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Annotated

import jinja2
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from typing_extensions import Self

from router.gateway.parsers import reasoning_parser, tool_parser
from router.tenants import MIN_KEY, read

MAX_GATEWAYS = 64
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


class RouterConfig(BaseModel):
    """Settings of the prefix router."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cache_weight: float = Field(
        1.5, ge=1, description="what a second of computing costs beside a second of waiting: computing also evicts"
    )
    load_bound: float = Field(1.25, gt=1, description="a worker takes no more than this times the mean load")
    load_slack_s: float = Field(8.0, ge=0, description="a wait this much longer than the mean never moves a request")
    admission_slack_s: float = Field(
        0.3, gt=0, description="a worker whose queue is so much longer than the router believed answers busy"
    )
    local_tokens: int = Field(
        512, ge=0, description="missing prompt tokens up to which a decode worker may compute a prompt itself; 0: never"
    )
    candidates: int = Field(3, ge=1, description="workers tried in turn while they answer busy")
    attempts: int = Field(3, ge=1, description="plans made for a request before its failure is reported")


class GatewayConfig(BaseModel):
    """Settings of the HTTP gateway."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int = Field(1, ge=1, le=MAX_GATEWAYS, description="number of gateways, with a router each")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(
        8000, ge=0, le=65535, description="port to listen on; further gateways take the next ones; 0 takes free ones"
    )
    same_port: bool = Field(
        False, description="all gateways listen on `port`; their `resources` put each on a node of its own"
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="Ray resources that each gateway takes, such as {gateway: 1}"
    )
    request_timeout_s: float = Field(600.0, gt=0, description="deadline of a request, in seconds")
    first_token_target_s: float | None = Field(
        30.0, gt=0, description="a request whose answer is not expected to begin within so many seconds is refused"
    )
    max_body_bytes: int = Field(16 * 2**20, ge=1024, description="largest accepted request body")
    body_timeout_s: float = Field(
        30.0, gt=0, description="how long a request's head may take to arrive, and its body, in seconds"
    )
    write_timeout_s: float = Field(
        30.0, gt=0, description="a client that takes nothing of its answer for this long is treated as gone, in seconds"
    )
    keepalive_s: float = Field(
        10.0, gt=0, description="a stream that has nothing to send sends a comment this often, in seconds"
    )
    cors_origins: list[str] = Field(
        [], description="origins whose pages may use the API from a browser, as scheme://host[:port]; `*` is any"
    )
    tls_certificate: Path | None = Field(None, description="PEM file with the certificate chain, for HTTPS")
    tls_key: Path | None = Field(None, description="PEM file with its private key")
    keys_file: Path | None = Field(
        None, validate_default=True, description="file of tenants and their API keys; read again when it changes"
    )
    api_keys: list[SecretStr] = Field([], description="API keys of the tenant `default`")
    max_priority: int = Field(
        0, ge=0, le=100, description="highest `priority` that clients may ask for; raise it where they can be trusted"
    )
    max_cache_ttl_s: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="longest `cache_ttl` that clients may ask for; raise it where they can be trusted",
    )
    chat_template: Path | None = Field(
        None, validate_default=True, description="file with a chat template to use instead of the model's own"
    )
    tool_parser: str = Field(
        "auto", description="how calls in answers are read; auto takes what the chat template shows"
    )
    reasoning_parser: str = Field("auto", description="how reasoning in answers is read; none leaves it in the text")
    max_stored_responses: int = Field(
        1000, ge=0, description="responses of /v1/responses that a gateway remembers; the oldest are forgotten first"
    )
    max_stored_bytes: int = Field(64 * 2**20, ge=0, description="memory that these take at most, with their inputs")
    batch_path: Path | None = Field(
        None, description="directory for files and batches of /v1/files and /v1/batches, shared by all gateways"
    )
    max_batch_file_bytes: int = Field(200 * 2**20, ge=1, description="largest file that may be uploaded")
    max_batch_files: int = Field(1000, ge=1, description="files that a tenant may have there")
    max_batches: int = Field(
        1000, ge=1, description="batches of a tenant that are remembered; the oldest that are over are forgotten first"
    )
    drain_s: float = Field(4.0, ge=0, description="how long running requests may still finish when stopping")

    @field_validator("chat_template")
    @classmethod
    def _is_a_template(cls, value: Path | None) -> Path | None:
        if value is None:
            return None
        try:
            jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(value.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {value}: {error}") from None
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{value} is no chat template: line {error.lineno}: {error.message}") from None
        return value

    @field_validator("keys_file")
    @classmethod
    def _has_tenants(cls, value: Path | None) -> Path | None:
        if value is not None:
            read(value)
            return value.absolute()
        return None

    @field_validator("batch_path")
    @classmethod
    def _is_a_place(cls, value: Path | None) -> Path | None:
        return value.absolute() if value is not None else None

    @field_validator("api_keys")
    @classmethod
    def _are_long_enough(cls, value: list[SecretStr]) -> list[SecretStr]:
        """Whoever can guess one can use it."""
        if any(len(one.get_secret_value()) < MIN_KEY for one in value):
            raise ValueError(f"has a key of less than {MIN_KEY} characters")
        return value

    @field_validator("tool_parser")
    @classmethod
    def _is_a_tool_parser(cls, value: str) -> str:
        tool_parser(value, None)
        return value

    @field_validator("reasoning_parser")
    @classmethod
    def _is_a_reasoning_parser(cls, value: str) -> str:
        reasoning_parser(value, None)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: list[str]) -> list[str]:
        """A browser compares them as text: one with a path or a slash at its end would never match."""
        if wrong := [one for one in value if one != "*" and not _ORIGIN.fullmatch(one)]:
            raise ValueError(f"{wrong[0]!r} is not an origin such as https://example.com or http://localhost:3000")
        return value

    @model_validator(mode="after")
    def _certificate_fits_its_key(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together")
        if self.tls_certificate is not None:
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.tls_certificate, self.tls_key)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(f"cannot use {self.tls_certificate} with {self.tls_key}: {error}") from None
        return self

    @model_validator(mode="after")
    def _there_are_ports_for_all(self) -> Self:
        if not self.same_port and self.port + self.replicas - 1 > 65535:
            raise ValueError(f"gateway.port {self.port} leaves no ports for {self.replicas} gateways")
        return self

    @property
    def ports(self) -> list[int]:
        """The port of each gateway; 0 for a free one."""
        return [self.port_of(number) for number in range(self.replicas)]

    def port_of(self, number: int) -> int:
        """The port of one gateway."""
        return self.port if self.same_port or not self.port else self.port + number
