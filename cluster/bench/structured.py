"""`headwater bench structured`: what grammars cost those who use them, and those who do not."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from llguidance import LLMatcher

from cluster.bench.alone import SETTLE_STEPS, EngineAlone
from cluster.bench.report import Check, Figures, Report, medians, ratio
from cluster.bench.workload import Words
from cluster.config import ClusterConfig
from cluster.errors import UserError
from cluster.models import check_architecture, resolve, served_name
from router.gateway.guides import JSON_STYLE
from transfer.guide import Guides
from workers.config import StartError, WorkerConfig
from workers.engine.attention import ModelUnsupported
from workers.engine.engine import Engine
from workers.engine.model import Model

MAX_SLOWER, MAX_GAPS = 1.1, 5.0
FREE, GUIDED = "no grammar", "JSON schema"
QUIET, BESIDE = "alone", "beside a slow grammar"
COMPILED, CACHED = "compiled", "cached"
MEDIAN_GAP, LARGEST_GAP = "median gap ms", "largest gap ms"
SLOW_DIVISOR = 59_999
"""A schema of multiples of such a number takes about as long to compile as a gateway lets through."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["customer", "supplier", "employee"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "since": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "address": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/address"}]},
    },
    "required": ["name", "age", "kind", "code", "since", "tags", "address"],
    "additionalProperties": False,
}
ADDRESS = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 30} for name in ("street", "town", "country")},
    "required": ["street", "town", "country"],
    "additionalProperties": False,
}
DEFINITIONS = {"$defs": {"address": ADDRESS}}
LASTING = {"type": "array", "items": PERSON, "minItems": 200, **DEFINITIONS}
"""No answer to it ends while it is measured."""
TYPICAL: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "person": {**PERSON, **DEFINITIONS},
    "list of persons": LASTING,
    "choice of 200": {"enum": [f"value number {number}" for number in range(200)]},
    "form of 60 fields": {
        "type": "object",
        "properties": {f"field_{number}": {"type": ["string", "null"], "maxLength": 80} for number in range(60)},
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Shape:
    """`streams` answers behind prompts of `context` tokens each, for `steps` decode steps in each of `rounds`."""

    context: int
    streams: int
    steps: int
    rounds: int

    @property
    def step(self) -> str:
        """Name of the decode figure."""
        return f"decode step of {self.streams}: ms"


def run(config: ClusterConfig, shape: Shape) -> Report:
    """Measure everything. Raises UserError when model, device and sizes do not go together."""
    worker = config.worker
    threads = worker.threads or len(os.sched_getaffinity(0))
    path = resolve(config.model.name)
    check_architecture(path)
    torch.set_num_threads(threads)
    try:
        model = Model(path, worker.dtype, worker.device)
        free, guided = (_engine(model, worker, shape) for _ in range(2))
    except (StartError, ModelUnsupported, ValueError) as error:
        raise UserError(str(error)) from error
    guides = Guides(path, model.vocab_size, model.eos)
    guides.compile(grammar({"const": 1}))  # the first one loads the tokenizer
    results = {**_compiling(path, guides, shape), **_masks(free, guided, guides, shape)}
    results |= _beside(free, guides, shape)
    about = {"model": served_name(config.model.name), "device": str(model.device), "dtype": model.dtype}
    return Report({**asdict(shape), **about, "threads": threads}, results, checks_of(results, shape))


def checks_of(results: dict[str, Figures], shape: Shape) -> list[Check]:
    """What the figures have to show."""
    name = f"decode step of {shape.streams}, with a JSON schema against without"
    checks: list[Check] = ratio(name, results, shape.step, (GUIDED, FREE), MAX_SLOWER, at_least=False)
    usual, largest = results[QUIET][MEDIAN_GAP], results[BESIDE][LARGEST_GAP]
    return [*checks, Check("largest gap beside a slow grammar, usual gaps", largest / usual, "x", MAX_GAPS, False)]


def grammar(schema: dict[str, Any]) -> str:
    """As gateways write it."""
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE))


def _engine(model: Model, config: WorkerConfig, shape: Shape) -> EngineAlone:
    made = Engine(model, config.model_copy(update={"max_running": max(config.max_running, shape.streams)}))
    if shape.context + shape.steps + SETTLE_STEPS + 1 > made.max_model_len:
        raise StartError(f"{shape.context} tokens and {shape.steps} steps are over {made.max_model_len} tokens")
    made.warm_up()
    return EngineAlone(made)


def _compiling(path: Path, guides: Guides, shape: Shape) -> dict[str, Figures]:
    """Milliseconds until the first mask of a grammar is known, the first time and later."""
    compiled: list[Figures] = []
    cached: list[Figures] = []
    for number in range(shape.rounds):
        texts = {name: grammar(schema) + " " * number for name, schema in TYPICAL.items()}
        for taken in (compiled, cached):
            taken.append({f"{name}: ms": _compile_s(guides, text) * 1000 for name, text in texts.items()})
    return {COMPILED: medians(compiled), CACHED: medians(cached)}


def _compile_s(guides: Guides, text: str) -> float:
    start = time.perf_counter()
    guides.compile(text).allowed()
    return time.perf_counter() - start


def _masks(free: EngineAlone, guided: EngineAlone, guides: Guides, shape: Shape) -> dict[str, Figures]:
    """The mean step of both sides, which take turns step by step."""
    text = grammar(LASTING)
    sides: dict[str, list[Figures]] = {FREE: [], GUIDED: []}
    for number in range(shape.rounds):
        prompts = Words(number, guides.vocab_size).parts(shape.streams, shape.context)
        answers = {FREE: (free, free.begin(prompts))}
        answers[GUIDED] = (guided, guided.begin(prompts, lambda: guides.compile(text)))
        seconds: dict[str, list[float]] = {FREE: [], GUIDED: []}
        for _ in range(SETTLE_STEPS + shape.steps):
            for side, (engine, ids) in answers.items():
                seconds[side].append(engine.step_s(ids))
        for side, (engine, ids) in answers.items():
            engine.end(ids)
            sides[side].append({shape.step: fmean(seconds[side][SETTLE_STEPS:]) * 1000})
    return {side: medians(rounds) for side, rounds in sides.items()}


RENEWED_STEPS = 500
"""After so many steps answers are begun anew: on a slow machine they could reach the longest sequence."""


def _beside(engine: EngineAlone, guides: Guides, shape: Shape) -> dict[str, Figures]:
    """Gaps between the tokens of answers without a grammar, alone and while another thread compiles for others."""
    quiet, beside = [], []
    with ThreadPoolExecutor(1) as thread:
        for number in range(shape.rounds):
            prompts = Words(-number - 1, guides.vocab_size).parts(shape.streams, shape.context)
            ids = engine.begin(prompts)
            gaps = [engine.step_s(ids) for _ in range(SETTLE_STEPS + shape.steps)][SETTLE_STEPS:]
            quiet.append(_gaps(gaps))
            schema = {"type": "number", "multipleOf": SLOW_DIVISOR - 2 * number}
            slow = thread.submit(_as_workers_do, guides, grammar(schema))
            gaps = [engine.step_s(ids)]
            while not slow.done():
                if len(gaps) % RENEWED_STEPS == 0:
                    engine.end(ids)
                    ids = engine.begin(prompts)
                gaps.append(engine.step_s(ids))
            beside.append({**_gaps(gaps), "the slow grammar: ms": slow.result() * 1000})
            engine.end(ids)
    return {QUIET: medians(quiet), BESIDE: medians(beside)}


def _as_workers_do(guides: Guides, text: str) -> float:
    start = time.perf_counter()
    asyncio.run(guides.guide(text))
    return time.perf_counter() - start


def _gaps(seconds: list[float]) -> Figures:
    return {MEDIAN_GAP: median(seconds) * 1000, LARGEST_GAP: max(seconds) * 1000}
