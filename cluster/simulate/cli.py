"""The `headwater simulate` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.errors import UserError
from cluster.signals import interruptible

BOUNDS: dict[str, tuple[float, float]] = {
    "workers": (1, 4096),
    "routers": (1, 4096),
    "capacity": (1, 10_000_000),
    "speed": (0.001, 1_000_000),
    "rate": (1, 1_000_000_000),
    "staleness": (0, 60_000),
    "loss": (0, 0.99),
    "kv_bytes_per_token": (1, 1_000_000_000),
    "slow_worker": (0.01, 1),
    "cut_off_at": (0, 1_000_000_000),
}
"""Least and greatest values of flags."""
OF_OUTPUT = {"trace", "policy", "png", "as_json", "check"}
"""Parameters that change nothing in a policy's figures."""


def simulate(
    context: typer.Context,
    trace: Annotated[Path, typer.Option(help="JSON lines: timestamp (ms), input_length, output_length, hash_ids")],
    workers: Annotated[int, typer.Option(help="number of workers")] = 16,
    routers: Annotated[int, typer.Option(help="routers, to which requests come at random")] = 4,
    capacity: Annotated[int, typer.Option(help="blocks of 512 tokens that a worker caches")] = 2000,
    speed: Annotated[float, typer.Option(help="how many times as fast the trace is played")] = 1.0,
    rate: Annotated[float, typer.Option(help="prompt tokens a second of a worker")] = 8000.0,
    policy: Annotated[list[str] | None, typer.Option(help="may be repeated; default: all of them")] = None,
    staleness: Annotated[float, typer.Option(help="how old a router's news may be, in milliseconds")] = 250.0,
    loss: Annotated[float, typer.Option(help="share of gossip datagrams that are lost")] = 0.0,
    raw_timestamps: Annotated[
        bool, typer.Option("--raw-timestamps", help="requests of one stamp come at once, not spread to the next stamp")
    ] = False,
    fetch_bandwidth: Annotated[
        str | None, typer.Option(help="such as 10GB/s: a worker may copy a prefix from another one")
    ] = None,
    kv_bytes_per_token: Annotated[int | None, typer.Option(help="size of what is copied")] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="answers keep their blocks and count as load until they end")
    ] = False,
    slow_worker: Annotated[float, typer.Option(help="what share of the rate the first worker computes at")] = 1.0,
    cut_off_at: Annotated[
        float | None, typer.Option(help="second from which half of the routers hear no gossip for 30 s")
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="find the policies' constants on the first quarter of the trace")
    ] = False,
    seed: Annotated[int, typer.Option(help="the result is a function of it and of everything else here")] = 0,
    png: Annotated[
        Path | None, typer.Option(help="draw hit rate against p90 into this file (needs matplotlib)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    check: Annotated[
        bool, typer.Option("--assert", help="exit 1 unless something was checked and every check holds")
    ] = False,
) -> None:
    """Play a request trace in virtual time: Headwater's router and gossip, and other routers' rules, over simulated
    workers. Policies: headwater, round-robin, two-choices, chwbl, sglang, dynamo, lmetric, and oracle, which is
    headwater with exact and instant knowledge."""
    interruptible()
    _check_bounds(context)
    if cut_off_at is not None and routers == 1:
        raise UserError(f"--cut-off-at {cut_off_at:g}: needs 2 --routers or more, half of which are cut off")
    copy_s = _block_copy_s(fetch_bandwidth, kv_bytes_per_token)
    # What follows imports numba, torch and more; mistakes in the command line should not have to wait for that.
    from cluster.simulate.trace import read

    requests = read(trace, speed, raw_timestamps)
    from cluster.bench.peers.chart import check_png
    from cluster.simulate.chart import draw
    from cluster.simulate.compare import chosen, compare
    from cluster.simulate.gossiping import check_limits
    from cluster.simulate.policies import HEADWATER
    from cluster.simulate.run import CUT_OFF_S, Settings
    from cluster.simulate.table import table

    policies = chosen(policy)
    if HEADWATER in policies:
        check_limits(workers, routers, capacity)
    if png is not None:
        check_png(png)
    settings = Settings(
        workers=workers,
        routers=routers,
        capacity=capacity,
        rate=rate,
        staleness_s=staleness / 1000,
        loss=loss,
        block_copy_s=copy_s,
        kv_bytes_per_token=kv_bytes_per_token or 0,
        decode=decode,
        seed=seed,
        slow={0: slow_worker},
        cut_off=frozenset(range(routers // 2)) if cut_off_at is not None else frozenset(),
        cut_from_s=cut_off_at or 0.0,
        cut_until_s=(cut_off_at or 0.0) + CUT_OFF_S,
    )
    about = {"trace": trace.name, "requests": len(requests), "speed": speed, "raw_timestamps": raw_timestamps}
    report = compare(requests, settings, policies, tune, about)
    if png is not None:
        draw(report, png)
    if as_json:
        report.show(as_json)
    else:
        typer.echo(table(report, f"{trace.name}, {len(requests)} requests{_unusual(context)}"))
    if check and not report.ok:
        raise typer.Exit(1)


def _check_bounds(context: typer.Context) -> None:
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value is None or parameter.name not in BOUNDS:
            continue
        least, most = BOUNDS[parameter.name]
        if not least <= value <= most:
            raise UserError(f"{parameter.opts[0]} {value:.10g}: must be from {least:.10g} to {most:.10g}")


def _unusual(context: typer.Context) -> str:
    """The flags whose values are not the default ones, as they are given."""
    said = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in OF_OUTPUT or value is None or value == parameter.default:
            continue
        form = "" if value is True else f" {value:.10g}" if isinstance(value, int | float) else f" {value}"
        said.append(f", {parameter.opts[0]}{form}")
    return "".join(said)


def _block_copy_s(bandwidth: str | None, bytes_per_token: int | None) -> float | None:
    """Seconds to copy a block between workers; None where that is not to be."""
    if (bandwidth is None) != (bytes_per_token is None):
        raise UserError("--fetch-bandwidth and --kv-bytes-per-token belong together: give both or neither")
    if bandwidth is None or bytes_per_token is None:
        return None
    from cluster.simulate.trace import BLOCK_TOKENS
    from workers.config import parse_bytes

    try:
        bytes_s = parse_bytes(bandwidth.strip().removesuffix("/s"))
    except ValueError:
        bytes_s = 0
    if bytes_s <= 0:
        raise UserError(f"--fetch-bandwidth {bandwidth}: must be a size a second, such as 10GB/s")
    return BLOCK_TOKENS * bytes_per_token / bytes_s
