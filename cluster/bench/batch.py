"""`headwater bench batch`: what grouping by prefix saves, and what a batch costs those who wait for their answers."""

from __future__ import annotations

import asyncio
import json
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from cluster.bench.load import LEAD_S, LoadError, Target, Timing, paused
from cluster.bench.report import Check, Figures, Report, medians, ratio
from cluster.bench.sides import Side, started
from cluster.bench.workload import Words
from cluster.config import ClusterConfig
from cluster.models import served_name
from router.batch.index import Index
from router.batch.journal import Journal
from router.batch.lines import COMPLETIONS
from router.batch.run import run as carry_out
from router.batch.send import Gateways
from router.batch.tally import Tally

GROUPED, PLAIN, ALONE, BESIDE = "grouped", "file order", "alone", "beside a batch"
SECONDS, P90 = "total s", "p90 first token s"
MAX_TIME_SHARE = 0.7
MAX_SLOWDOWN = 1.2
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of `items` requests, each a random one of the `templates` of `template` tokens with `item` tokens of its
    own behind it, for `output` tokens, `concurrency` at a time; and somebody who sends `interactive` prompts of
    `prompt` tokens for one token one by one, `pause` seconds after the answer before."""

    items: int
    templates: int
    template: int
    item: int
    output: int
    concurrency: int
    interactive: int
    prompt: int
    pause: float
    rounds: int


def run(config: ClusterConfig, shape: Shape) -> Report:
    """Measure both orders in turns, and first tokens alone and beside a grouped batch in turns, on one cluster."""
    rounds: dict[str, list[Figures]] = {GROUPED: [], PLAIN: []}
    if shape.interactive:
        rounds |= {ALONE: [], BESIDE: []}
    with (
        Console(stderr=True).status("starting") as status,
        tempfile.TemporaryDirectory() as directory,
        started({"batch": config}) as sides,
    ):
        bench = _Bench(sides["batch"], shape, Path(directory))
        for number in range(shape.rounds):
            for order in (GROUPED, PLAIN) if number % 2 == 0 else (PLAIN, GROUPED):
                status.update(f"round {number + 1} of {shape.rounds}: {order}")
                rounds[order].append(bench.batch(f"{number} {order}", order == GROUPED))
            if shape.interactive:
                status.update(f"round {number + 1} of {shape.rounds}: {BESIDE}")
                rounds[ALONE].append(bench.alone(number))
                rounds[BESIDE].append(bench.beside(number))
    results = {name: medians(some) for name, some in rounds.items()}
    sizes = {**asdict(shape), "kv_memory": config.worker.kv_memory, "model": served_name(config.model.name)}
    return Report(sizes, results, _checks(results))


def _checks(results: dict[str, Figures]) -> list[Check]:
    grouped = "total time, grouped against the file's order"
    checks = ratio(grouped, results, SECONDS, (GROUPED, PLAIN), MAX_TIME_SHARE, at_least=False)
    if BESIDE in results:
        slower = "p90 of somebody's first tokens, beside a batch against alone"
        checks += ratio(slower, results, P90, (BESIDE, ALONE), MAX_SLOWDOWN, at_least=False)
    return checks


class _Bench:
    """The parts of a round, on a cluster that runs."""

    def __init__(self, side: Side, shape: Shape, directory: Path) -> None:
        self._side = side
        self._shape = shape
        self._directory = directory

    def batch(self, seed: str, grouped: bool) -> Figures:
        """A whole batch, whose templates nobody has seen before."""
        tally = asyncio.run(self._batch(seed, grouped))
        if tally.failed:
            raise LoadError(f"{tally.failed} of {tally.total} rows failed")
        return {
            SECONDS: tally.seconds,
            "tokens/s": tally.tokens_per_s,
            "cached share": tally.cached_share,
            "output tokens": tally.output_tokens,
        }

    def alone(self, number: int) -> Figures:
        """First tokens of somebody who is alone."""
        return _figures(asyncio.run(self._interactive(f"{number} {ALONE}")))

    def beside(self, number: int) -> Figures:
        """The same beside a batch, which is stopped at the end. Raises LoadError for one that had ended before."""

        async def both() -> list[Timing]:
            batch = asyncio.create_task(self._batch(f"{number} {BESIDE}", grouped=True))
            try:
                await asyncio.sleep(LEAD_S)
                timings = await self._interactive(f"{number} somebody {BESIDE}")
                if batch.done():
                    batch.result()
                    raise LoadError("--items: the batch was over before the interactive requests were")
                return timings
            finally:
                batch.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({batch})

        return _figures(asyncio.run(both()))

    async def _interactive(self, seed: str) -> list[Timing]:
        shape = self._shape
        prompts = self._words(seed).parts(shape.interactive, shape.prompt)
        return await paused(self._side.target, prompts, 1, shape.pause)

    async def _batch(self, seed: str, grouped: bool) -> Tally:
        path = self._directory / seed
        self._write(path, seed)
        target: Target = self._side.target
        with Index([path]) as index, Journal(path.with_name(f"{seed} answers")) as journal:
            async with Gateways(lambda: [target.url], TIMEOUT_S) as gateways:
                tally = Tally(index.total)
                order = index.order(grouped, 1)
                await carry_out(index, journal, order, gateways.send, self._shape.concurrency, tally)
                return tally

    def _write(self, path: Path, seed: str) -> None:
        shape, words = self._shape, self._words(seed)
        templates = words.parts(shape.templates, shape.template)
        fixed = {"model": self._side.target.model, "max_tokens": shape.output, "temperature": 0, "ignore_eos": True}
        with path.open("w") as file:
            for number in range(shape.items):
                prompt = words.random.choice(templates) + words(shape.item)
                line = {"custom_id": f"item-{number}", "method": "POST", "url": COMPLETIONS}
                file.write(json.dumps({**line, "body": {**fixed, "prompt": prompt}}) + "\n")

    def _words(self, seed: str) -> Words:
        return Words(seed, self._side.vocabulary)


def _figures(timings: list[Timing]) -> Figures:
    times = sorted(one.first_token_s for one in timings)
    return {
        "median first token s": times[len(times) // 2],
        P90: times[min(len(times) - 1, int(len(times) * 0.9))],
        "worst first token s": times[-1],
    }
