"""`headwater deploy` and what changes a cluster that runs: `scale`, `role`, `drain`, `restart`, `down`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cluster import running
from cluster.config import load
from cluster.errors import UserError

if TYPE_CHECKING:
    from cluster.control import Control

WAIT_S = 600.0
_errors = Console(stderr=True, highlight=False, soft_wrap=True)
Address = Annotated[str | None, typer.Option(help="the Ray cluster; default: that of the last `headwater serve` here")]
Model = Annotated[str | None, typer.Option(help="known name, local directory, .gguf file or hub id")]
Names = Annotated[list[str] | None, typer.Argument(help="workers, as `headwater status` names them")]
Prefill = Annotated[int | None, typer.Option(min=0, help="number of prefill workers")]
Decode = Annotated[int | None, typer.Option(min=0, help="number of decode workers")]
Both = Annotated[int | None, typer.Option(min=0, help="number of workers with both roles")]
Wait = Annotated[float, typer.Option(min=0, help="seconds to wait for nodes that have the resources")]
Gateways = Annotated[int | None, typer.Option(min=1, help="number of gateways")]


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """In the Ray cluster, for a block. A job of Ray's is told in its environment which one that is."""
    address = address or os.environ.get("RAY_ADDRESS") or running.latest() or "auto"
    import ray

    from cluster.connection import connect

    try:
        connect(address, logs=False)
        yield
    finally:
        ray.shutdown()


@contextmanager
def _control(address: str | None) -> Iterator[Control]:
    """The controller of the cluster that runs there."""
    with connected(address):
        from cluster.control import Control

        yield Control.of()


def deploy(
    config: Annotated[Path | None, typer.Option(help="YAML file; flags come on top")] = None,
    model: Model = None,
    prefill: Prefill = None,
    decode: Decode = None,
    both: Both = None,
    gateways: Gateways = None,
    port: Annotated[int | None, typer.Option(help="port to listen on")] = None,
    wait: Wait = WAIT_S,
    address: Address = None,
) -> None:
    """Start a cluster that outlives this command on a running Ray cluster, or give it another configuration."""
    flags = {
        "model.name": model,
        "prefill.replicas": prefill,
        "decode.replicas": decode,
        "both.replicas": both,
        "gateway.replicas": gateways,
        "gateway.port": port,
    }
    settings = load(config, flags)
    from cluster.models import check_architecture, resolve

    path = resolve(settings.model.name)
    check_architecture(path)
    with connected(address), _errors.status("starting the controller") as status:
        from cluster.control import begin

        control = begin(detached=True)
        try:
            control.call("deploy", settings, path, wait, progress=status.update)
        except UserError:
            control.abandon()
            raise
        report = control.call("report")
    typer.echo(f"Headwater serves {report.model} on {' and '.join(report.urls)}")


def scale(
    prefill: Prefill = None,
    decode: Decode = None,
    both: Both = None,
    gateways: Gateways = None,
    wait: Wait = 0.0,
    address: Address = None,
) -> None:
    """Have more or fewer workers or gateways. Who goes ends its requests first, or others go on with them."""
    given = {"prefill": prefill, "decode": decode, "both": both, "gateway": gateways}
    counts = {kind: count for kind, count in given.items() if count is not None}
    if not counts:
        raise UserError("nothing to change: give --prefill, --decode, --both or --gateways")
    with _control(address) as control, _errors.status("scaling") as status:
        control.call("scale", counts, wait, progress=status.update)


def role(
    name: Annotated[str, typer.Argument(help="worker, as `headwater status` names it")],
    new: Annotated[str, typer.Argument(metavar="ROLE", help="prefill, decode or both")],
    address: Address = None,
) -> None:
    """Give a worker another role, without a restart."""
    if new not in ("prefill", "decode", "both"):
        raise UserError(f"ROLE: {new!r} is none of prefill, decode and both")
    with _control(address) as control:
        control.call("set_role", name, new)


def drain(
    names: Names = None,
    node: Annotated[str | None, typer.Option(help="id, address or name of a node: all actors leave it")] = None,
    address: Address = None,
) -> None:
    """Let workers go without a request that fails. Those of a node begin again elsewhere, when there is room."""
    if bool(names) == bool(node):
        raise UserError("give either names of workers or --node")
    with _control(address) as control, _errors.status("draining") as status:
        if node:
            left = control.call("drain_node", node, progress=status.update)
            typer.echo(f"{', '.join(left) or 'nothing'} has left {node}")
        else:
            control.call("drain", names, progress=status.update)


def restart(
    rolling: Annotated[bool, typer.Option("--rolling", help="one after the other, without a request that fails")],
    address: Address = None,
) -> None:
    """Start every worker and gateway again."""
    with _control(address) as control, _errors.status("restarting") as status:
        control.call("restart", progress=status.update)


def down(
    drain: Annotated[bool, typer.Option(help="let running requests finish first")] = True, address: Address = None
) -> None:
    """End the cluster. Ray keeps running."""
    with _control(address) as control, _errors.status("ending"):
        if cut := control.end(drain=drain):
            _errors.print(f"{cut} requests were cut off")


def add_to(app: typer.Typer) -> None:
    """Make these commands of an application."""
    for command in (deploy, scale, role, drain, restart, down):
        app.command()(command)
