"""`headwater bench tier-quality`: what lossy formats of blocks below the device cost in answers, and bring in bytes.

Prompts are computed once, and answered from what the device has of them: that is the reference. Then, for each format,
their blocks are put back as they come from it, and the prompts are answered again. No part of a tier but the format is
at work: no thread, no file, and nothing that decides what to load.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import get_args

import numpy as np
import torch

from cluster.bench.report import Check, Figures, Report
from cluster.config import ClusterConfig
from cluster.errors import UserError
from cluster.models import check_architecture, resolve, served_name
from router.gateway.text import Text
from transfer.layout import KVLayout
from transfer.messages import EXACT, Request, SamplingParams, TokenLogprobs, pack_tokens
from workers.config import StartError, TierFormat, WorkerConfig
from workers.engine.attention import ModelUnsupported
from workers.engine.engine import Engine
from workers.engine.model import Model
from workers.kv.records import RecordLayout, Records
from workers.kv.tier_io import EXTENT

LIKELIEST = 20
"""Log-probabilities that are told of each token: the reference's token is found among them, also where another one was
chosen."""
EQUAL, LARGEST = "tokens until one differs, share", "log-probability, difference: largest"


@dataclass(frozen=True, slots=True)
class Shape:
    """So many prompts of `prompt` tokens, rounded to whole blocks and one token more, whose answers have `output`
    tokens. Blocks are copied `rounds` times."""

    prompts: int
    prompt: int
    output: int
    rounds: int


Answer = list[TokenLogprobs]


def run(config: ClusterConfig, shape: Shape, text: Path | None = None) -> Report:
    """Measure every format, with prompts from the files in `text`. Raises UserError when model, text and sizes do not
    go together."""
    worker = config.worker
    if shape.prompt < worker.block_size:
        raise UserError(f"--prompt: {shape.prompt} tokens are less than a block, {worker.block_size} tokens")
    threads = worker.threads or len(os.sched_getaffinity(0))
    path = resolve(config.model.name)
    check_architecture(path)
    torch.set_num_threads(threads)
    length = shape.prompt // worker.block_size * worker.block_size + 1
    prompts = _prompts(path, text or Path(__file__).parents[2], shape.prompts, length)
    try:
        model = Model(path, worker.dtype, worker.device)
        engine = Engine(model, _settings(model, worker, shape, length))
    except (StartError, ModelUnsupported, ValueError) as error:
        raise UserError(str(error)) from error
    engine.warm_up()
    results = Measured(engine, prompts, shape).results()
    about = {"model": served_name(config.model.name), "device": str(model.device), "dtype": model.dtype}
    return Report({**asdict(shape), **about, "threads": threads}, results, checks_of(results))


def checks_of(results: dict[str, Figures]) -> list[Check]:
    """That what is measured is the format: the exact one changes nothing."""
    exact = results[EXACT]
    return [
        Check(f"{EXACT}: {EQUAL}", exact[EQUAL], "", 1.0, at_least=True),
        Check(f"{EXACT}: {LARGEST}", exact[LARGEST], "", 0.0, at_least=False),
    ]


def compared(reference: list[Answer], answers: list[Answer]) -> Figures:
    """How far answers are from the reference. Both of a pair have the same context up to the first token that differs:
    so far, that token included, the log-probabilities of the reference's tokens are compared."""
    equal, whole, differences = 0, 0, []
    for one, other in zip(reference, answers, strict=True):
        same = 0
        for ours, theirs in zip(one, other, strict=True):
            there = dict(((theirs.token, theirs.logprob), *theirs.top))
            # What is not among the likeliest is less likely than the last of them: the difference is at least this.
            differences.append(abs(ours.logprob - there.get(ours.token, min(there.values()))))
            if ours.token != theirs.token:
                break
            same += 1
        equal += same
        whole += same == len(one)
    return {
        EQUAL: equal / sum(len(one) for one in reference),
        "answers that are equal, share": whole / len(reference),
        "log-probability, difference: mean": float(np.mean(differences)),
        "log-probability, difference: 99 %": float(np.percentile(differences, 99)),
        LARGEST: max(differences),
    }


class Measured:
    """An engine that answers the same prompts again and again, in the same steps."""

    def __init__(self, engine: Engine, prompts: list[list[int]], shape: Shape) -> None:
        self._engine = engine
        self._prompts = prompts
        self._shape = shape
        self._ids = itertools.count()
        self._layout = engine.memory.layout

    def results(self) -> dict[str, Figures]:
        """The figures of each format."""
        self._answers(1)
        blocks = [self._blocks(prompt) for prompt in self._prompts]
        kept: dict[str, Records] = {}
        saving: dict[str, float] = {}
        for form in get_args(TierFormat):
            kept[form] = Records(self._engine.memory, RecordLayout(self._layout, form), sum(map(len, blocks)))
            saving[form] = self._copied(kept[form], blocks, load=False)
        reference = self._answers(self._shape.output)
        results = {}
        for form, records in kept.items():
            loading = self._put_back(records)
            size = records.rows.shape[1] / self._layout.block_bytes
            answers = self._answers(self._shape.output)
            speeds = {"saving 1 GB of KV: s": saving[form], "loading it: s": loading}
            results[form] = {**compared(reference, answers), "bytes of a block, share of exact": size, **speeds}
        return results

    def _request(self, prompt: list[int], output: int) -> Request:
        sampling = SamplingParams(output, temperature=0, ignore_eos=True, logprobs=LIKELIEST)
        return Request(str(next(self._ids)), pack_tokens(prompt), sampling, "", 0.0)

    def _answers(self, output: int) -> list[Answer]:
        """Those of all prompts, together."""
        requests = [self._request(prompt, output) for prompt in self._prompts]
        answers: dict[str, Answer] = {one.request_id: [] for one in requests}
        for one in requests:
            self._engine.add(one)
        while self._engine.has_work:
            for delta in self._engine.run(self._engine.plan().works).deltas:
                if delta.error is not None:
                    raise UserError(f"the model cannot answer: {delta.error}")
                answers[delta.request_id].extend(delta.logprobs)
        return list(answers.values())

    def _blocks(self, prompt: list[int]) -> list[int]:
        """Where the device has a prompt: all of it but its last token."""
        request = self._request(prompt, 1)
        blocks = self._engine.lend(request, 0).chunk.blocks
        self._engine.sent(request.request_id)
        return list(blocks)

    def _put_back(self, records: Records) -> float:
        """Have nothing on the device but the prompts, as records have them; seconds to load a GB."""
        self._engine.cache.clear()
        kept = []
        for prompt in self._prompts:
            reserved = self._engine.borrow(self._request(prompt[:-1], 1))
            assert reserved is not None, "the pool has room for all prompts"
            kept.append(reserved)
        seconds = self._copied(records, [list(one.blocks) for one in kept], load=True)
        for one in kept:
            self._engine.borrowed(one.request_id, len(one.blocks))
        return seconds

    def _copied(self, records: Records, blocks: list[list[int]], load: bool) -> float:
        """Copy blocks to or from records, as many at a time as a tier does; seconds a GB of KV."""
        slots = itertools.count()
        parts = [one[start : start + EXTENT] for one in blocks for start in range(0, len(one), EXTENT)]
        work = [(part, list(itertools.islice(slots, len(part)))) for part in parts]
        seconds = []
        for _ in range(self._shape.rounds):
            begun = time.perf_counter()
            for part, places in work:
                records.load(places, part) if load else records.save(part, places)
            seconds.append(time.perf_counter() - begun)
        return median(seconds) * 1e9 / (self._layout.block_bytes * sum(map(len, parts)))


def _settings(model: Model, worker: WorkerConfig, shape: Shape, length: int) -> WorkerConfig:
    """With room for all prompts and answers at a time."""
    layout = KVLayout(model.identity, model.dtype, worker.block_size, model.layers, num_blocks=1)
    longest = length + shape.output
    blocks = shape.prompts * (-(-longest // worker.block_size) + 1) + 1
    most = max(worker.max_running, shape.prompts)
    changes = {"max_model_len": longest, "kv_memory": blocks * layout.block_bytes, "max_running": most}
    return worker.model_copy(update={**changes, "step_tokens": max(worker.step_tokens, most), "prefix_cache": True})


def _prompts(model: Path, text: Path, count: int, length: int) -> list[list[int]]:
    """Pieces of text, from all over it. Raises UserError when there is too little."""
    tokenizer = Text(model)
    parts: list[list[int]] = []
    for file in _files(text):
        tokens = tokenizer.encode(file.read_text(errors="replace"), add_special_tokens=False)
        parts.extend(tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length))
    if len(parts) < count:
        raise UserError(f"--text: {text} has {len(parts)} pieces of {length} tokens, {count} prompts need as many")
    return [parts[number * len(parts) // count] for number in range(count)]


def _files(text: Path) -> Iterable[Path]:
    """A file, or what a directory and its `docs` have to read."""
    return [text] if text.is_file() else sorted((*text.glob("*.md"), *text.glob("*.txt"), *text.glob("docs/*.md")))
