"""What request bodies have in common: parsing with errors that name field, value and limit, and sampling parameters."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from router.gateway.errors import ApiError, invalid

INT64 = 2**63
MAX_STOPS = 4
MAX_STOP_CHARS = 1000
MAX_PRIORITY = 100
MAX_CACHE_TTL_S = 86_400
MAX_TENANT_CHARS = 256
MAX_SALT_CHARS = 256
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.1, 10
"""Logits are multiplied with it or divided by it: they must stay finite."""


def _stops(value: str | list[str] | None) -> str | list[str] | None:
    stops = [value] if isinstance(value, str) else value or []
    if len(stops) > MAX_STOPS:
        raise ValueError(f"has {len(stops)} strings, at most {MAX_STOPS} are allowed")
    if not all(stops) and value != "":
        raise ValueError("must not contain an empty string")
    if longest := max((len(stop) for stop in stops if len(stop) > MAX_STOP_CHARS), default=0):
        raise ValueError(f"has a string of {longest} characters, at most {MAX_STOP_CHARS} are allowed")
    return value


def _metadata(value: dict[str, str] | None) -> dict[str, str] | None:
    for key, text in (value or {}).items():
        if len(key) > MAX_METADATA_KEY:
            raise ValueError(f"a key has {len(key)} characters, at most {MAX_METADATA_KEY} are allowed")
        if len(text) > MAX_METADATA_VALUE:
            raise ValueError(f"{key!r} has {len(text)} characters, at most {MAX_METADATA_VALUE} are allowed")
    return value


def _off(value: bool) -> bool:
    if value:
        raise ValueError("only false is supported")
    return value


Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list of any length from a client: one wrong element is reported, not each of a million."""
Off = Annotated[bool, AfterValidator(_off), WithJsonSchema({"type": "boolean", "const": False})]
"""Only `false`. Where Python is asked, 0 is that, too."""
Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA), AfterValidator(_metadata)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Strict(BaseModel):
    """What is not known is refused, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Returned(Strict):
    """A part of an answer that a client may send back as its library has it: libraries add fields that are null."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "null"}})

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name in cls.model_fields}


Parsed = Annotated[Any, Field(exclude=True)]
"""What a library's helpers made of the text beside it: says nothing."""


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(Strict):
    """Parameters that chat and completions share. Fields that OpenAI publishes and Headwater does not support are
    accepted only at the value that means "off"."""

    model: str
    max_tokens: int | None = Field(None, ge=1, lt=INT64)
    min_tokens: int | None = Field(None, ge=0, lt=INT64)
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: int | None = Field(None, ge=-1, lt=INT64)
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = None
    logit_bias: Annotated[dict[str, Annotated[Finite, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None = (
        None
    )
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Annotated[str | Items[str] | None, AfterValidator(_stops)] = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_choice: Annotated[Items[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = Field(None, min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    user: str | None = Field(None, max_length=MAX_TENANT_CHARS)
    metadata: dict[str, Any] | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    timeout: Annotated[Finite, Field(gt=0)] | None = None
    cache_ttl: Annotated[Finite, Field(ge=0, le=MAX_CACHE_TTL_S)] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)

    @property
    def stops(self) -> list[str]:
        """Stop strings, none of them empty."""
        return [self.stop] if isinstance(self.stop, str) and self.stop else list(self.stop or [])

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def tenant(self) -> str:
        """Between whom workers divide their time: the end user, if the client names one."""
        return self.user or ""

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether each chunk of a stream says what has been used so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    @abstractmethod
    def logprobs_wanted(self) -> int | None:
        """Of how many of the likeliest tokens log-probabilities are wanted beside each token's own; None: of none."""

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """The same for the prompt."""
        return self.prompt_logprobs


R = TypeVar("R", bound=BaseModel)


def parse(kind: type[R], body: bytes) -> R:
    """A request body as `kind`. Raises ApiError 400 naming the field, the value and the limit."""
    try:
        text = body.decode("utf-8-sig")
        data = json.loads(text)
        if "\\u" in text:  # nothing else can stand for a surrogate here
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise invalid("the body contains a lone surrogate, which is not text") from None
    except UnicodeDecodeError:
        raise invalid("the body is not valid UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise invalid(f"the body must be a JSON object, not {type(data).__name__}")
    return validate(kind, data)


def validate(kind: type[R], data: dict[str, Any]) -> R:
    """Decoded JSON as `kind`. Raises ApiError 400 naming the field, the value and the limit."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _explain(error, data) from None


def _explain(error: ValidationError, data: dict[str, Any]) -> ApiError:
    """The first problem as one line. A union reports one problem per member; the member that got furthest into the
    value is the one the client meant."""
    problems = error.errors(include_url=False)
    first = problems[0]["loc"][0] if problems[0]["loc"] else None
    problem = max((one for one in problems if one["loc"][:1] == (first,)), key=lambda one: _depth(one, data))
    path = ".".join(str(part) for part in _real_path(problem, data))
    if problem["type"] == "missing":
        return invalid(f"{path}: required, but missing", path)
    if problem["type"] == "extra_forbidden":
        return invalid(f"{path}: this parameter is not supported", path, "unsupported_parameter")
    shown = json.dumps(problem["input"], ensure_ascii=False, default=str)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return invalid(f"{path}: {problem['msg'].removeprefix('Value error, ')}, got {shown}", path)


def _depth(problem: Any, data: dict[str, Any]) -> int:
    return len(_real_path(problem, data))


def _real_path(problem: Any, data: Any) -> list[int | str]:
    """The parts of a problem's location that exist in the data, and the name of a field that is missing there; the
    others name members of unions."""
    path: list[int | str] = []
    location = problem["loc"]
    for place, part in enumerate(location, 1):
        missing = problem["type"] == "missing" and place == len(location)
        if isinstance(data, dict) and isinstance(part, str) and (part in data or missing):
            path.append(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            path.append(part)
            data = data[part]
    return path
