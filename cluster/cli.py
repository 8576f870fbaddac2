"""The `headwater` command."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from cluster import running
from cluster.batch_cli import batch
from cluster.bench.cli import app as bench_app
from cluster.cache_cli import app as cache_app
from cluster.config import ClusterConfig, load, on_this_machine, with_batches
from cluster.deploy_cli import Address, add_to, connected
from cluster.errors import UserError
from cluster.key_cli import app as key_app
from cluster.signals import interruptible, on_signals
from cluster.simulate.cli import simulate
from router.batch.errors import BatchError

if TYPE_CHECKING:
    from cluster.control import Control
    from cluster.controller import Report

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Disaggregated LLM serving on Ray."
)
model_app = typer.Typer(no_args_is_help=True, help="Models in the local cache.")
app.add_typer(model_app, name="model")
app.add_typer(cache_app, name="cache")
app.add_typer(key_app, name="key")
app.add_typer(bench_app, name="bench")
add_to(app)
app.command()(batch)
app.command()(simulate)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)

READY = """\
Headwater is ready: {model} on {urls}

  curl -s {url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "What is a headwater?"}}], "max_tokens": 64}}'

  {python} -c 'from openai import OpenAI; client = OpenAI(base_url="{url}/v1", api_key="{key}"); \
print(client.chat.completions.create(model="{model}", max_tokens=64, \
messages=[{{"role": "user", "content": "What is a headwater?"}}]).choices[0].message.content)'

What it does: {url}/dashboard

Press Ctrl-C to stop."""
WATCH_S = 2.0
LOSSY = "answers to prompts of which a part is cached may differ from those of the model"


@app.command()
def serve(
    model: Annotated[str | None, typer.Option(help="known name, local directory, .gguf file or hub id")] = None,
    prefill: Annotated[int | None, typer.Option(help="number of prefill workers")] = None,
    decode: Annotated[int | None, typer.Option(help="number of decode workers")] = None,
    both: Annotated[int | None, typer.Option(help="number of workers with both roles")] = None,
    gateways: Annotated[int | None, typer.Option(help="number of gateways, on ports one after another")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="file with a chat template, instead of the model's")
    ] = None,
    tool_parser: Annotated[
        str | None, typer.Option(help="auto, hermes, llama3, mistral or pythonic: how tool calls are read")
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="auto, think or none: how reasoning in answers is read")
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option(help="file of tenants and API keys; default: no keys needed")
    ] = None,
    batch_path: Annotated[
        Path | None, typer.Option(help="directory of /v1/files and /v1/batches; default: in the cache, for 127.0.0.1")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="memory of a worker's KV pool, such as 1GiB")] = None,
    block_size: Annotated[int | None, typer.Option(help="tokens in a KV block")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="longest prompt plus output, in tokens")] = None,
    step_tokens: Annotated[int | None, typer.Option(help="token budget of a step: the size of prefill chunks")] = None,
    prefix_cache: Annotated[bool | None, typer.Option(help="reuse KV of earlier prompts and answers")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of a worker")] = None,
    tiers_host: Annotated[str | None, typer.Option(help="host memory for cached KV, per worker, such as 8GiB")] = None,
    tiers_disk: Annotated[str | None, typer.Option(help="disk space for cached KV, per worker, such as 100GiB")] = None,
    tiers_disk_path: Annotated[Path | None, typer.Option(help="directory for cached KV on disk")] = None,
    address: Annotated[str | None, typer.Option(help="a running Ray cluster; default: start one here")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; flags come on top")] = None,
) -> None:
    """Start a cluster and its gateways; Ctrl-C drains and stops everything."""
    flags = {
        "model.name": model,
        "prefill.replicas": prefill,
        "decode.replicas": decode,
        "both.replicas": both,
        "gateway.replicas": gateways,
        "gateway.host": host,
        "gateway.port": port,
        "gateway.chat_template": chat_template.resolve() if chat_template is not None else None,
        "gateway.tool_parser": tool_parser,
        "gateway.reasoning_parser": reasoning_parser,
        "gateway.keys_file": keys_file,
        "gateway.batch_path": batch_path,
        "worker.dtype": dtype,
        "worker.device": device,
        "worker.kv_memory": kv_memory,
        "worker.block_size": block_size,
        "worker.max_model_len": max_model_len,
        "worker.step_tokens": step_tokens,
        "worker.prefix_cache": prefix_cache,
        "worker.threads": threads,
        "tiers.host": tiers_host,
        "tiers.disk": tiers_disk,
        "tiers.disk_path": tiers_disk_path,
    }
    try:
        settings = load(config, flags)
        _serve(settings if address else with_batches(on_this_machine(settings)), address)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _serve(settings: ClusterConfig, address: str | None) -> None:
    stop: SimpleQueue[None] = SimpleQueue()
    interruptible()
    if settings.tiers.lossy:
        _errors.print(f"warning: tiers.format is {settings.tiers.format}: {LOSSY}")
    _check_port(settings)
    path = _resolve(settings.model.name)
    # Ray takes seconds to import; mistakes in the command line should not have to wait for it.
    import ray

    from cluster.connection import STOP_S, connect, disconnect

    status = _errors.status("starting Ray")
    try:
        with status:
            connect(address)
            interruptible()  # Ray has installed its own
            from cluster.control import begin, until_told

            control = begin(detached=False)
            control.call("deploy", settings, path, 0.0, progress=status.update)
            report = control.call("report")
        on_signals(lambda *_: stop.put(None))
    except BaseException:
        on_signals(signal.SIG_IGN)
        disconnect()
        raise
    until, healthy = None, False
    try:
        with running.announced(ray.get_runtime_context().gcs_address):
            _say_ready(settings, report)
            alive = until_told(control, partial(_told, stop))
        if not alive:
            _errors.print("the cluster has ended: by `headwater down`, or because its controller has died")
        until = time.monotonic() + settings.gateway.drain_s + STOP_S  # for all that follows together
        healthy = alive and _end(control, until)
    finally:
        on_signals(signal.SIG_IGN)
        disconnect(until)
    raise typer.Exit(0 if healthy else 1)


def _say_ready(settings: ClusterConfig, report: Report) -> None:
    keys = settings.gateway.keys_file or settings.gateway.api_keys
    access = {"header": " -H 'Authorization: Bearer KEY'" if keys else "", "key": "KEY" if keys else "none"}
    urls = {"urls": " and ".join(report.urls), "url": report.urls[0]}
    typer.echo(READY.format(python=sys.executable, model=report.model, **urls, **access))


def _told(stop: SimpleQueue[None], seconds: float) -> bool:
    """Whether a signal comes within some seconds."""
    try:
        stop.get(timeout=seconds)
    except Empty:
        return False
    return True


def _end(control: Control, until: float) -> bool:
    """Let running requests finish and everything end; False when that fails."""
    _errors.print("stopping: running requests may finish")
    try:
        if cut := control.end(until):
            _errors.print(f"{cut} requests were cut off")
    except UserError as error:
        _errors.print(f"error: draining failed: {error}", markup=False)
        return False
    return True


def _check_port(settings: ClusterConfig) -> None:
    for port in settings.gateway.ports:
        try:
            socket.create_server((settings.gateway.host, port)).close()
        except OSError as error:
            where = f"{settings.gateway.host}:{port}"
            raise UserError(f"gateway.port: cannot listen on {where}: {error.strerror}") from None


def _resolve(name: str) -> Path:
    from cluster.models import check_architecture, resolve

    path = resolve(name)
    check_architecture(path)
    return path


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="show it again every two seconds, until Ctrl-C")] = False,
    address: Address = None,
) -> None:
    """Show workers, load and cache, and what the controller does."""
    with connected(address):
        from cluster import status as workers

        if watch:
            _watch(workers.shown)
        elif as_json:
            typer.echo(json.dumps(workers.as_json(*workers.collected()), indent=2))
        else:
            Console().print(workers.as_tables(*workers.collected()))


def _watch(shown: Callable[[], RenderableType]) -> None:
    """Fill the terminal with what is shown, again and again."""
    interruptible()  # Ray has installed its own
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                live.update(shown(), refresh=True)
                time.sleep(WATCH_S)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@model_app.command()
def pull(
    name: Annotated[str, typer.Argument(help="name of a known model")] = "smollm2-135m-instruct",
) -> None:
    """Fetch a model into the cache; the last line of output is its directory."""
    from cluster import models

    typer.echo(models.pull(name))


def main() -> None:
    """Entry point. What the user can put right is one line on standard error and exit code 1."""
    try:
        app()
    except (UserError, BatchError) as error:
        _errors.print(f"error: {' '.join(str(error).split())}", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
