"""The `headwater bench` commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.config import load

if TYPE_CHECKING:
    from cluster.bench.report import Report

app = typer.Typer(no_args_is_help=True, help="Measure the running code.")

Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Assert = Annotated[bool, typer.Option("--assert", help="exit 1 unless every check holds")]
Config = Annotated[Path | None, typer.Option(help="YAML file of the cluster to measure")]
Model = Annotated[str | None, typer.Option(help="model to serve")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16")]


@app.command("shared-prefix")
def shared_prefix(
    prefix: Annotated[int, typer.Option(help="tokens that all prompts share")] = 2000,
    query: Annotated[int, typer.Option(help="tokens of each prompt's own")] = 200,
    output: Annotated[int, typer.Option(help="tokens to generate for each")] = 64,
    requests: Annotated[int, typer.Option(help="number of prompts")] = 16,
    concurrency: Annotated[int, typer.Option(help="requests under way at a time")] = 16,
    rounds: Annotated[int, typer.Option(help="repetitions, each with other prompts; medians are reported")] = 1,
    compare_no_reuse: Annotated[bool, typer.Option(help="the same work without prefix cache, in turns")] = False,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """Requests behind one long shared prefix: throughput, first token, cached share."""
    from cluster.bench.shared_prefix import Shape, run

    shape = Shape(prefix, query, output, requests, concurrency, rounds)
    settings = load(config, {"model.name": model, "worker.dtype": dtype})
    _report(lambda: run(settings, shape, compare_no_reuse), as_json, check)


@app.command("first-token")
def first_token(
    prompt: Annotated[int, typer.Option(help="prompt tokens")] = 16,
    requests: Annotated[int, typer.Option(help="number of requests")] = 40,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    as_json: Json = False,
    check: Assert = False,
) -> None:
    """What the cluster adds to the engine's own time to first token, one request at a time."""
    from cluster.bench.first_token import run

    settings = load(config, {"model.name": model, "worker.dtype": dtype})
    _report(lambda: run(settings, prompt, requests), as_json, check)


def _report(measure: Callable[[], Report], as_json: bool, check: bool) -> None:
    report: Any = measure()
    report.show(as_json)
    if check and not all(one.ok for one in report.checks):
        raise typer.Exit(1)
