"""Measures Headwater and its peers one after another, so that nobody's idle processes share the cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from rich.console import Console
from transformers import AutoConfig

from cluster.bench import engine
from cluster.bench.load import LoadError, Run, Target
from cluster.bench.peers.generate_batch import Transformers
from cluster.bench.peers.llama_cpp import LlamaCpp
from cluster.bench.peers.program import PeerError
from cluster.bench.peers.shape import FIRST, HEADWATER, LLAMA, TOKENS, TRANSFORMERS, Shape, with_ratios
from cluster.bench.report import Check, Figures, Report, medians
from cluster.bench.sides import do, started
from cluster.bench.workload import Words, Work
from cluster.config import BothConfig, ClusterConfig, DecodeConfig, PrefillConfig
from cluster.models import resolve, served_name


@dataclass(slots=True)
class Step:
    """One measurement of one side. `missing` says why it is left out; `measure` gets the number of the round."""

    side: str
    name: str
    missing: str | None
    measure: Callable[[int], Figures]
    rounds: list[Figures] = field(default_factory=list)
    failed: bool = False


def run(config: ClusterConfig, shape: Shape, llama: LlamaCpp, transformers: Transformers | None) -> Report:
    """Measure what is there; the report's notes say what is not, and what failed."""
    steps = Bench(config, shape, llama, transformers).steps()
    console = Console(stderr=True, highlight=False)  # plain lines: a spinner would take time from what is measured
    for number in range(shape.rounds):
        for step in steps:
            if step.missing is None:
                console.print(f"round {number + 1} of {shape.rounds}: {step.side}, {step.name}")
                _measure(step, number)
    results: dict[str, Figures] = {}
    for step in steps:
        if step.missing is None:
            results.setdefault(step.side, {}).update(medians(step.rounds))
    notes = [f"{step.side}, {step.name}, left out: {step.missing}" for step in steps if step.missing]
    about = {"model": served_name(config.model.name), "workers": topology(config), "threads": llama.threads}
    if transformers is not None:
        about["transformers_batch"] = transformers.batch_tokens
    # What was asked for and failed has shown nothing, so that not everything that was asked for is shown.
    failures = [
        Check(f"{step.side}, {step.name}, ended well", 0, "", 1, at_least=True) for step in steps if step.failed
    ]
    return Report({**asdict(shape), **about}, with_ratios(results), shape.checks(results) + failures, notes)


def with_roles(config: ClusterConfig) -> ClusterConfig:
    """One worker with both roles, which is best on one machine, where no section sets the number of any role."""
    if config.model_fields_set & {"prefill", "decode", "both"}:
        return config
    one = {"prefill": PrefillConfig(replicas=0), "decode": DecodeConfig(replicas=0), "both": BothConfig(replicas=1)}
    return config.model_copy(update=one)


def topology(config: ClusterConfig) -> str:
    """The workers of each role, such as "1 prefill + 2 decode"."""
    return " + ".join(f"{count} {role}" for role, count in Counter(role for _, role in config.workers).items())


def _measure(step: Step, number: int) -> None:
    try:
        step.rounds.append(step.measure(number))
    except (PeerError, LoadError) as error:
        if step.side == HEADWATER:
            raise
        # The hour that the others took should not be lost.
        step.missing, step.failed = str(error), True


class Bench:
    """The measurements, in the order in which they are made."""

    def __init__(self, config: ClusterConfig, shape: Shape, llama: LlamaCpp, transformers: Transformers | None) -> None:
        self._config = config
        self._shape = shape
        self._llama = llama
        self._transformers = transformers
        self._path = resolve(config.model.name)
        self._vocabulary = int(AutoConfig.from_pretrained(self._path).get_text_config().vocab_size)

    def steps(self) -> list[Step]:
        """All of them, also those that cannot be made."""
        llama, missing = self._llama, self._llama.missing
        no_server = missing("--llama-server", llama.server)
        no_transformers = None if self._transformers else "--transformers was not given"
        return [
            Step(HEADWATER, "serving", None, self._serve),
            Step(LLAMA, "server with one slot", no_server, self._llama_shared),
            Step(LLAMA, f"server with {self._shape.concurrency} slots", no_server, self._llama_unshared),
            Step(HEADWATER, "engine", None, self._engine),
            Step(LLAMA, "llama-bench", missing("--llama-bench", llama.bench), self._llama_bench),
            Step(
                LLAMA,
                "llama-batched-bench",
                missing("--llama-batched-bench", llama.batched_bench),
                self._llama_batched,
            ),
            Step(TRANSFORMERS, "generate_batch", no_transformers, self._generate_batch),
        ]

    def _shared(self, number: int) -> Work:
        return self._shape.shared.work(Words(number, self._vocabulary))

    def _unshared(self, number: int) -> Work:
        return self._shape.unshared.work(Words(number, self._vocabulary))

    def _serve(self, number: int) -> Figures:
        with started({HEADWATER: self._config}) as sides:
            target = sides[HEADWATER].target
            return {**self._do_shared(target, number), **self._do_unshared(target, number)}

    def _do_shared(self, target: Target, number: int) -> Figures:
        return _named(do(target, self._shared(number)), self._shape.of_shared)

    def _do_unshared(self, target: Target, number: int) -> Figures:
        return _named(do(target, self._unshared(number)), self._shape.of_unshared)

    def _llama_shared(self, number: int) -> Figures:
        shape = self._shape
        with self._llama.serving(1, shape.prefix + shape.query + shape.output + 1) as target:
            return self._do_shared(target, number)

    def _llama_unshared(self, number: int) -> Figures:
        shape = self._shape
        with self._llama.serving(shape.concurrency, shape.prompt + shape.output + 1) as target:
            return self._do_unshared(target, number)

    def _engine(self, number: int) -> Figures:
        results, _ = engine.measure(self._config, self._shape.engine, self._llama.threads, both=False)
        return results[engine.SHARED]

    def _llama_bench(self, number: int) -> Figures:
        shape = self._shape.engine
        return {
            shape.prefill: self._llama.prefill(shape.context),
            shape.decode(1, "tokens/s"): self._llama.decode(shape.context, shape.steps),
        }

    def _llama_batched(self, number: int) -> Figures:
        shape = self._shape.engine
        speed = self._llama.batched_decode(shape.context, shape.streams, shape.steps)
        return {shape.decode(shape.streams, "tokens/s"): speed}

    def _generate_batch(self, number: int) -> Figures:
        assert self._transformers is not None
        prompts = [prompt for chat in self._shared(number).chats for prompt in chat]
        worker = self._config.worker
        speed = self._transformers.output_tokens_per_s(
            self._path, worker.dtype, worker.device, self._llama.threads, prompts, self._shape.output
        )
        return {self._shape.of_shared(TOKENS): speed}


def _named(run: Run, name: Callable[[str], str]) -> Figures:
    figures = run.figures()
    return {name(figure): figures[figure] for figure in (TOKENS, FIRST)}
