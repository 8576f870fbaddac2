"""`headwater bench engine`: prefill and decode of the engine alone, and what reading shared context once brings."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from statistics import fmean

import torch

from cluster.bench.alone import EngineAlone
from cluster.bench.report import Check, Figures, Report, medians, ratio
from cluster.bench.workload import Words
from cluster.config import ClusterConfig
from cluster.errors import UserError
from cluster.models import check_architecture, resolve, served_name
from workers.config import StartError, WorkerConfig
from workers.engine.attention import ModelUnsupported
from workers.engine.engine import Engine
from workers.engine.model import Model

MIN_SHARED_SPEEDUP = 1.8
SPARE_TOKENS = 8
"""Beside context and measured steps: each stream's own part, its first token, and steps that are not measured."""
SHARED, APART = "engine", "shared attention off"


@dataclass(frozen=True, slots=True)
class Shape:
    """A prompt of `context` tokens; `steps` decode steps behind it, of one stream and of `streams` that share it."""

    context: int
    streams: int
    steps: int
    rounds: int

    @property
    def prefill(self) -> str:
        """Name of the prefill figure."""
        return f"prefill of {self.context}: tokens/s"

    def decode(self, streams: int, unit: str) -> str:
        """Name of a decode figure; `unit` is "ms a step" or "tokens/s"."""
        return f"decode of {streams} at {self.context}: {unit}"


def run(config: ClusterConfig, shape: Shape) -> Report:
    """Measure both sides in turns, over one copy of the weights."""
    worker = config.worker
    threads = worker.threads or len(os.sched_getaffinity(0))
    results, model = measure(config, shape, threads)
    about = {"model": served_name(config.model.name), "device": str(model.device), "dtype": model.dtype}
    name = f"decode of {shape.streams} over a shared context, shared attention on against off"
    figure = shape.decode(shape.streams, "tokens/s")
    checks: list[Check] = ratio(name, results, figure, (SHARED, APART), MIN_SHARED_SPEEDUP, at_least=True)
    return Report({**asdict(shape), **about, "threads": threads}, results, checks)


def measure(config: ClusterConfig, shape: Shape, threads: int, both: bool = True) -> tuple[dict[str, Figures], Model]:
    """Medians of each side's figures, and the model. With `both`, also the shared decode without shared attention.

    Raises UserError when model, device and sizes do not go together."""
    path = resolve(config.model.name)
    check_architecture(path)
    torch.set_num_threads(threads)
    try:
        model = Model(path, config.worker.dtype, config.worker.device)
        engine = _engine(model, config.worker, shape, shared=True)
        apart = _engine(model, config.worker, shape, shared=False) if both else None
    except (StartError, ModelUnsupported, ValueError) as error:
        raise UserError(str(error)) from error
    engine.first_token_s(Words(shape.rounds, model.vocab_size)(shape.context))  # the first pass of a size is slower
    sides: dict[str, list[Figures]] = {SHARED: [], **({APART: []} if both else {})}
    for number in range(shape.rounds):
        words = Words(number, model.vocab_size)
        prefix, own = words(shape.context), words.parts(shape.streams, 1)
        prefill = {shape.prefill: shape.context / engine.first_token_s(prefix)}
        one, many = _decode(engine, shape, prefix, own[:1]), _decode(engine, shape, prefix, own)
        sides[SHARED].append({**prefill, **one, **many})
        if apart is not None:
            apart.first_token_s(prefix)
            sides[APART].append(_decode(apart, shape, prefix, own))
    return {side: medians(rounds) for side, rounds in sides.items()}, model


def _engine(model: Model, config: WorkerConfig, shape: Shape, shared: bool) -> EngineAlone:
    # The prefix cache is how the streams come to share their context.
    changes = {"prefix_cache": True, "shared_attention": shared, "max_running": max(config.max_running, shape.streams)}
    made = Engine(model, config.model_copy(update=changes))
    if shape.context + shape.steps + SPARE_TOKENS > made.max_model_len:
        raise StartError(f"a context of {shape.context} and {shape.steps} steps are over {made.max_model_len} tokens")
    made.warm_up()
    return EngineAlone(made)


def _decode(engine: EngineAlone, shape: Shape, prefix: list[int], own: list[list[int]]) -> Figures:
    """The mean step of streams that each continue the prefix, which is in the cache, with a part of their own."""
    step = fmean(engine.decode_steps_s([prefix + part for part in own], shape.steps))
    return {
        shape.decode(len(own), "ms a step"): step * 1000,
        shape.decode(len(own), "tokens/s"): len(own) / step,
    }
