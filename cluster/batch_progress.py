"""How far a batch is, for people: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from router.batch.tally import Tally

REDRAW_S = 0.5
LINE_S = 30.0


@asynccontextmanager
async def shown(tally: Tally, console: Console) -> AsyncIterator[None]:
    """Show it on the console for a block."""
    task = asyncio.create_task(_bar(tally, console) if console.is_terminal else _lines(tally, console))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _bar(tally: Tally, console: Console) -> None:
    with Progress(BarColumn(), TextColumn("{task.description}"), console=console, transient=True) as progress:
        task = progress.add_task("", total=tally.total)
        while True:
            progress.update(task, completed=tally.done, description=progress_of(tally))
            await asyncio.sleep(REDRAW_S)


async def _lines(tally: Tally, console: Console) -> None:
    while True:
        await asyncio.sleep(LINE_S)
        console.print(progress_of(tally))


def progress_of(tally: Tally) -> str:
    """Where a batch stands, as one line."""
    parts = [f"{tally.done:,}/{tally.total:,} rows"]
    if tally.failed:
        parts.append(f"{tally.failed:,} failed")
    parts.append(f"{tally.tokens_per_s:,.0f} tokens/s")
    parts.append(f"{tally.cached_share:.0%} cached")
    if tally.left_s is not None:
        parts.append(f"{timedelta(seconds=round(tally.left_s))} left")
    return ", ".join(parts)


def outcome_of(tally: Tally) -> str:
    """What a batch came to, as one line."""
    ended = f"{tally.done - tally.failed:,} rows succeeded, {tally.failed:,} failed"
    before = f" ({tally.before:,} were there before)" if tally.before else ""
    prompts = f"{tally.prompt_tokens:,} prompt tokens ({tally.cached_share:.0%} cached)"
    speed = f"{tally.tokens_per_s:,.0f} tokens/s in {timedelta(seconds=round(tally.seconds))}"
    return f"{ended}{before}; {prompts}, {tally.output_tokens:,} output tokens, {speed}"
