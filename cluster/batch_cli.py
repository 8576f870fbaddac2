"""`headwater batch`: the requests of OpenAI batch files through a cluster, their answers into a file."""

from __future__ import annotations

import glob
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cluster.config import load, on_this_machine
from cluster.deploy_cli import Address, Model, connected
from cluster.errors import UserError
from cluster.signals import interruptible, on_signals, run

if TYPE_CHECKING:
    from cluster.control import Control
    from router.batch.index import Index, Line
    from router.batch.journal import Journal
    from router.batch.tally import Tally

SOME_FAILED = 3
"""Exit code of a batch that has come to its end, with rows that failed."""
_errors = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Reach:
    """How to get at a cluster: `find` gives the URLs of its gateways now. Its workers that compute prompts, and those
    that answer."""

    find: Callable[[], list[str]]
    computing: int = 1
    answering: int = 1


def batch(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="batch files (JSON lines or Parquet), or patterns such as 'in/*.jsonl'"
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="file for the answers; what is there is not done again")
    ],
    url: Annotated[list[str] | None, typer.Option(help="a gateway, such as http://HOST:8000; may be repeated")] = None,
    address: Address = None,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="start a cluster here, for this batch alone")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="YAML file of the cluster, with --standalone")] = None,
    model: Model = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="requests under way at a time; default: half of what answering workers can run"),
    ] = None,
    grouping: Annotated[
        bool, typer.Option("--grouping/--no-grouping", help="sort by shared prefix; otherwise in the inputs' order")
    ] = True,
    timeout: Annotated[
        float, typer.Option(min=1, help="seconds that a request may take, with waits for room and new attempts")
    ] = 3600.0,
    api_key: Annotated[str | None, typer.Option(envvar="HEADWATER_API_KEY", help="key for the gateways")] = None,
) -> None:
    """Answer the requests of OpenAI batch files. Ends with 0 when every row succeeded, with 3 when some failed. The
    same command goes on where a batch was stopped or killed."""
    ways = {"--url": bool(url), "--address": bool(address), "--standalone": standalone}
    if len(given := [name for name, way in ways.items() if way]) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other")
    if (config or model) and not standalone:
        raise UserError("--config and --model are for --standalone: a cluster that runs has its own")
    interruptible()
    from cluster.batch_progress import outcome_of
    from router.batch.index import Index
    from router.batch.journal import Journal
    from router.batch.run import SLOTS, resumed

    with _errors.status("reading") as status, ExitStack() as opened:
        paths = _paths(inputs, output)
        readable = [_readable(path, opened) for path in paths]
        index = Index(readable, lambda lines: status.update(f"reading: {lines:,} lines"), [str(one) for one in paths])
    with index, Journal(output) as journal:
        tally = resumed(index, journal)
        if tally.done < tally.total:
            with _reached(url, address, standalone, config, model) as reach:
                slots = concurrency or SLOTS * reach.answering
                order = index.order(grouping, min(reach.computing, slots))
                try:
                    run(_run(index, journal, order, reach, api_key, timeout, slots, tally))
                except KeyboardInterrupt:
                    _errors.print(f"stopped at {tally.done:,}/{tally.total:,} rows: the same command goes on from here")
                    raise
    _errors.print(outcome_of(tally))
    raise typer.Exit(SOME_FAILED if tally.failed else 0)


async def _run(
    index: Index,
    journal: Journal,
    order: Iterable[Line],
    reach: Reach,
    key: str | None,
    timeout_s: float,
    slots: int,
    tally: Tally,
) -> None:
    from cluster.batch_progress import shown
    from router.batch.run import run as carry_out
    from router.batch.send import Gateways

    tally.begun = time.monotonic()
    async with Gateways(reach.find, timeout_s, key) as gateways, shown(tally, _errors):
        await carry_out(index, journal, order, gateways.send, slots, tally)


def _paths(patterns: list[str], output: Path) -> list[Path]:
    """The files that patterns match, in order; the output is never one of them."""
    paths: dict[Path, None] = {}
    for pattern in patterns:
        found = [Path(pattern)] if Path(pattern).exists() else [Path(one) for one in sorted(glob.glob(pattern))]
        if not found:
            raise UserError(f"{pattern}: no such file")
        if len(found) > 1:
            found = [one for one in found if not (output.exists() and one.samefile(output))]
        paths |= dict.fromkeys(found)
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: is no file that can be read twice, such as a pipe or a directory")
        if output.exists() and path.samefile(output):
            raise UserError(f"{path}: is both input and output")
    return list(paths)


def _readable(path: Path, opened: ExitStack) -> Path:
    """The file, or where it is Parquet, its lines, until `opened` is closed."""
    from router.batch.parquet import SUFFIX, as_lines

    if path.suffix != SUFFIX:
        return path
    return Path(f"/dev/fd/{opened.enter_context(as_lines(path)).fileno()}")


@contextmanager
def _reached(
    urls: list[str] | None, address: str | None, standalone: bool, config: Path | None, model: str | None
) -> Iterator[Reach]:
    """The cluster, for a block."""
    if urls:
        gateways = [_checked(url) for url in urls]
        yield Reach(lambda: gateways)
    elif standalone:
        with _own_cluster(config, model) as control:
            yield _reach(control)
    else:
        with connected(address):
            interruptible()  # Ray has installed its own
            from cluster.control import Control

            yield _reach(Control.of())


def _checked(url: str) -> str:
    """A gateway's URL, without a slash or `/v1` at its end."""
    if not re.fullmatch(r"https?://[^/?#\s]+(/v1)?/?", url):
        raise UserError(f"--url: {url!r} is not a URL such as http://HOST:8000")
    return url.rstrip("/").removesuffix("/v1")


def _reach(control: Control) -> Reach:
    from router.view import BOTH, DECODE, PREFILL

    roles = [actor.role for actor in control.call("report").actors]
    computing, answering = (sum(role in (one, BOTH) for role in roles) for one in (PREFILL, DECODE))
    return Reach(lambda: list(control.call("report").urls), computing, answering)


@contextmanager
def _own_cluster(config: Path | None, model: str | None) -> Iterator[Control]:
    """A cluster on this machine, which ends with the block."""
    settings = on_this_machine(load(config, {"model.name": model, "gateway.port": 0}))
    from cluster.models import check_architecture, resolve

    path = resolve(settings.model.name)
    check_architecture(path)
    from cluster.connection import STOP_S, LaunchError, connect, disconnect

    control = None
    try:
        with _errors.status("starting Ray") as status:
            connect(None)
            interruptible()  # Ray has installed its own
            from cluster.control import begin

            control = begin(detached=False)
            control.call("deploy", settings, path, 0.0, progress=status.update)
        yield control
    finally:
        on_signals(signal.SIG_IGN)
        until = time.monotonic() + STOP_S
        if control is not None:
            with suppress(LaunchError):
                control.end(until, drain=False)
        disconnect(until)
        interruptible()
