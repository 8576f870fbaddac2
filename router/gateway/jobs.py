"""Jobs: from a parsed request to what the workers are asked for, with every limit checked."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.config import GatewayConfig
from router.gateway import accounts
from router.gateway.dispatch import Prompt
from router.gateway.errors import invalid
from router.gateway.parsers import ReasoningParser, ToolParser
from router.gateway.schemas.common import Sampling
from transfer.messages import EXACT, SamplingParams, WorkerStatus, pack_tokens
from transfer.prefix import PrefixChain, root_key

MAX_TOLD = 100_000
"""Log-probabilities that are told of a prompt: they come in one message, and in one answer."""
MAX_JOBS = 512
"""Choices of one request, over all its prompts."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the workers serve: model name and fingerprint, longest sequence and block in tokens, vocabulary; what the
    operator lets clients ask for; and the format of blocks below their devices."""

    model: str
    max_model_len: int
    block_size: int
    vocab_size: int
    fingerprint: str
    max_priority: int
    max_cache_ttl_s: float
    request_timeout_s: float
    tier_format: str = EXACT

    @classmethod
    def of(cls, statuses: Sequence[WorkerStatus], config: GatewayConfig) -> Limits:
        """What all these workers, one at least, can do."""
        first = statuses[0]
        return cls(
            model=first.model,
            max_model_len=min(one.max_model_len for one in statuses),
            block_size=first.block_size,
            vocab_size=first.vocab_size,
            fingerprint=first.fingerprint,
            max_priority=config.max_priority,
            max_cache_ttl_s=config.max_cache_ttl_s,
            request_timeout_s=config.request_timeout_s,
            tier_format=first.tiers.format if first.tiers is not None else EXACT,
        )


@dataclass(frozen=True, slots=True)
class Form:
    """How the answers of a chat are read: by which parsers, whether reasoning has begun with the prompt, and whether no
    more than one call may be made."""

    reasoning: type[ReasoningParser] | None = None
    tools: type[ToolParser] | None = None
    thinking: bool = False
    single_call: bool = False

    @property
    def visible(self) -> tuple[str, ...]:
        """Special tokens that the parsers have to see."""
        parsers = [one for one in (self.reasoning, self.tools) if one is not None]
        return tuple(token for one in parsers for token in one.special_tokens)


@dataclass(frozen=True, slots=True)
class Job:
    """One choice to make. `index` is its number among the request's, prompt-major; `source` the number of its prompt,
    whose text is `text` where the client sent text; `leads` is whether it is the first of its prompt's. An answer of no
    tokens is `empty`: only the prompt is looked at."""

    index: int
    source: int
    leads: bool
    prompt: Prompt
    sampling: SamplingParams
    stops: list[str]
    text: str | None = None
    empty: bool = False
    form: Form = Form()

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt.tokens) // 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request says about length: output tokens, and the names of this field and of the prompt's."""

    tokens: int | None
    name: str
    prompt_name: str


def jobs(
    request: Sampling,
    prompts: Sequence[tuple[list[int], str | None]],
    wanted: Wanted,
    limits: Limits,
    grammar: str = "",
    form: Form = Form(),
) -> list[Job]:
    """The jobs of a request with these prompts, as token ids and text. Raises ApiError for what cannot be served."""
    choices = request.choices
    if len(prompts) * choices > MAX_JOBS:
        raise invalid(f"n: {len(prompts)} prompts x {choices} choices are more than {MAX_JOBS}", "n")
    account = accounts.current.get()
    check_priority(request.priority, limits)
    check_allowed("cache_ttl", request.cache_ttl or 0, limits.max_cache_ttl_s, "gateway.max_cache_ttl_s")
    check_allowed("timeout", request.timeout or 0, limits.request_timeout_s, "gateway.request_timeout_s")
    salt = account.salt((request.cache_salt or "").encode())
    root = root_key(limits.fingerprint, tenant=salt)
    made: list[Job] = []
    for source, (tokens, text) in enumerate(prompts):
        length = _length(len(tokens), wanted, limits.max_model_len)
        packed = pack_tokens(tokens)
        prompt = Prompt(
            tokens=packed,
            chain=PrefixChain.of(root, packed, limits.block_size),
            priority=request.priority or 0,
            keep_s=request.cache_ttl or 0.0,
            tenant=account.name or request.tenant,
            weight=account.tenant.weight,
            salt=salt,
            timeout_s=request.timeout,
        )
        sampling = _sampling(request, length, limits.vocab_size, grammar)
        if sampling.prompt_logprobs is not None:
            _check_told(request, len(tokens) * (1 + sampling.prompt_logprobs))
        for choice in range(choices):
            own = replace(sampling, seed=_seed(request.seed, choice))
            made.append(Job(len(made), source, choice == 0, prompt, own, request.stops, text, length == 0, form))
            if choice == 0 and sampling.prompt_logprobs is not None:
                # They need all of the prompt computed: nobody looks for a cache. All choices would tell the same.
                made[-1] = replace(made[-1], prompt=replace(prompt, chain=PrefixChain(root, (), limits.block_size)))
                sampling = replace(sampling, prompt_logprobs=None)
    return made


def _check_told(request: Sampling, entries: int) -> None:
    if entries > MAX_TOLD:
        name = "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs"
        raise invalid(f"{name}: {entries} log-probabilities of a prompt, at most {MAX_TOLD} are allowed", name)


def check_length(tokens: int, field: str, limit: int) -> None:
    """A prompt is not empty and leaves room for a token. Raises ApiError."""
    if tokens == 0:
        raise invalid(f"{field}: must not be empty", field)
    if tokens >= limit:
        raise invalid(
            f"{field}: {tokens} tokens leave no room for output in the context of {limit} tokens",
            field,
            "context_length_exceeded",
        )


def check_allowed(field: str, value: float, limit: float, setting: str) -> None:
    """Whoever is served first or kept longest is so at the others' cost: the operator decides. Raises ApiError."""
    if value > limit:
        raise invalid(f"{field}: at most {limit:g} is allowed here ({setting}), got {value:g}", field)


def check_priority(value: int | None, limits: Limits) -> None:
    """The same of a request's priority: what its tenant may have, where there are tenants. Raises ApiError."""
    account = accounts.current.get()
    if account.name:
        check_allowed("priority", value or 0, account.tenant.max_priority, "max_priority of the tenant")
    else:
        check_allowed("priority", value or 0, limits.max_priority, "gateway.max_priority")


def _length(prompt: int, wanted: Wanted, limit: int) -> int:
    """How many tokens an answer may have."""
    check_length(prompt, wanted.prompt_name, limit)
    if wanted.tokens is not None and prompt + wanted.tokens > limit:
        raise invalid(
            f"{wanted.name}: {prompt} prompt tokens + {wanted.tokens} output tokens are more than the context of "
            f"{limit} tokens",
            wanted.name,
            "context_length_exceeded",
        )
    return limit - prompt if wanted.tokens is None else wanted.tokens


def _sampling(request: Sampling, length: int, vocab_size: int, grammar: str) -> SamplingParams:
    least = request.min_tokens or 0
    if least > length:
        raise invalid(f"min_tokens: {least} is more than the {length} tokens that are allowed", "min_tokens")
    return SamplingParams(
        max_tokens=max(1, length),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        ignore_eos=bool(request.ignore_eos),
        min_tokens=least,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        logit_bias=_biases(request.logit_bias or {}, vocab_size),
        guide=grammar,
        logprobs=request.logprobs_wanted,
        prompt_logprobs=request.prompt_logprobs_wanted,
    )


def _seed(seed: int | None, choice: int) -> int:
    """Choices of one prompt differ, and each is reproducible where the client gives a seed."""
    return secrets.randbits(63) if seed is None else seed + choice


def _biases(given: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size):
            message = f"logit_bias: {token[:40]!r} is not a token id below {vocab_size}"
            raise invalid(message, "logit_bias")
    return tuple((int(token), float(bias)) for token, bias in given.items())
