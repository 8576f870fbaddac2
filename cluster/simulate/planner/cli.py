"""The `headwater bench planner` command."""

from __future__ import annotations

from typing import Annotated

import typer


def planner(
    hours: Annotated[float, typer.Option(min=0.5, max=240, help="length of the day")] = 24,
    requests_s: Annotated[float, typer.Option(min=0.1, max=20, help="requests a second on average")] = 4,
    prompt: Annotated[int, typer.Option(min=16, max=100_000, help="tokens of a prompt on average")] = 4000,
    answer: Annotated[int, typer.Option(min=1, max=100_000, help="tokens of an answer on average")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="the result is a function of it and of everything else here")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    check: Annotated[bool, typer.Option("--assert", help="exit 1 unless every check holds")] = False,
) -> None:
    """The planner in virtual time, on a day with five times as many requests at its peak as at its trough, long prompts
    in the morning and long answers in the evening: requests within the latency targets, and worker-hours, beside fixed
    numbers of prefill and decode workers."""
    from cluster.simulate.planner.compare import compare
    from cluster.simulate.planner.day import Day

    report = compare(Day(hours, requests_s, prompt, answer, seed))
    report.show(as_json)
    if check and not report.ok:
        raise typer.Exit(1)
