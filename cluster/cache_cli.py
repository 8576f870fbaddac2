"""`headwater cache`: the KV blocks that workers keep on disk.

It reads their directories, so that it needs no running cluster. It shows neither tokens nor salts, which tell of
prompts.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster import stored_blocks
from cluster.config import load
from cluster.errors import UserError
from cluster.stored_blocks import StoredFile, StoredPrefix
from cluster.tables import table

app = typer.Typer(no_args_is_help=True, help="KV blocks on disk.")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
"""Units of an age, in seconds."""

PathFlag = Annotated[Path | None, typer.Option(help="directory of the blocks; default: tiers.disk_path")]
ConfigFlag = Annotated[Path | None, typer.Option(help="YAML file of the cluster, for tiers.disk_path")]
WorkerFlag = Annotated[str | None, typer.Option(help="only that worker's directory")]
JsonFlag = Annotated[bool, typer.Option("--json", help="print one JSON object")]


@app.command()
def stat(path: PathFlag = None, config: ConfigFlag = None, as_json: JsonFlag = False) -> None:
    """Show how much each worker has, for each model and layout."""
    where = _directory(path, config)
    rows = [row for name in stored_blocks.worker_names(where) for row in _rows(where, name)]
    if as_json:
        _print({"path": str(where), "stores": rows})
        return
    stores = table("worker", "running", "fingerprint", "blocks", "size", "oldest", "newest")
    for row in rows:
        running = "yes" if row["running"] else "no"
        ages = (_age(row["oldest_s"]), _age(row["newest_s"]))
        stores.add_row(
            row["worker"], running, _short(row["fingerprint"]), str(row["blocks"]), decimal(row["bytes"]), *ages
        )
    Console().print(stores)


@app.command(name="ls")
def list_prefixes(
    path: PathFlag = None,
    config: ConfigFlag = None,
    worker: WorkerFlag = None,
    limit: Annotated[int, typer.Option(min=1, help="how many to show")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """List prefixes, those first that were used last."""
    where = _directory(path, config)
    found: list[StoredPrefix] = []
    unreadable = 0
    for files in _by_worker(where, worker):
        headers = [(file, stored_blocks.header(file)) for file in _progress(files, "reading headers")]
        good = [(file, block) for file, block in headers if block is not None]
        unreadable += len(headers) - len(good)
        found.extend(stored_blocks.prefixes(good))
    found.sort(key=lambda one: -one.used)
    now = time.time()
    if as_json:
        shown = [_prefix(one, now) for one in found[:limit]]
        _print({"path": str(where), "total": len(found), "unreadable": unreadable, "prefixes": shown})
        return
    listing = table("prefix", "tokens", "size", "used", "worker")
    for one in found[:limit]:
        listing.add_row(one.digest, str(one.tokens), decimal(one.bytes), _age(now - one.used), one.worker)
    Console().print(listing)
    if len(found) > limit:
        typer.echo(f"{limit} of {len(found)} prefixes; --limit shows more")
    if unreadable:
        typer.echo(f"{unreadable} files are no good blocks; `headwater cache verify` names them")


@app.command()
def verify(
    path: PathFlag = None, config: ConfigFlag = None, worker: WorkerFlag = None, as_json: JsonFlag = False
) -> None:
    """Read every block and check it; exit code 1 when one is bad."""
    where = _directory(path, config)
    files = [file for one in _by_worker(where, worker) for file in one]
    bad = []
    for file in _progress(files, "verifying"):
        if problem := stored_blocks.problem(file):
            bad.append({"path": file.path, "worker": file.worker, "problem": problem})
    checked = {"blocks": len(files), "bytes": sum(file.bytes for file in files)}
    if as_json:
        _print({"path": str(where), **checked, "bad": bad})
    else:
        for one in bad:
            typer.echo(f"{one['path']}: {one['problem']}")
        typer.echo(f"{checked['blocks']} blocks, {decimal(checked['bytes'])}: {len(bad)} bad")
    raise typer.Exit(1 if bad else 0)


@app.command()
def clear(
    path: PathFlag = None,
    config: ConfigFlag = None,
    worker: WorkerFlag = None,
    older_than: Annotated[
        str | None, typer.Option(help="only what was not used for so long: 90s, 30m, 12h, 7d or 2w")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="also from directories of workers that run")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete blocks, and bad files that were put aside."""
    where = _directory(path, config)
    before = time.time() - _seconds(older_than) if older_than is not None else float("inf")
    names = stored_blocks.worker_names(where, worker)
    if not force and (busy := [name for name in names if stored_blocks.running(where, name)]):
        raise UserError(f"{', '.join(busy)} in {where}: in use by a running worker; nothing is deleted without --force")
    cleared: list[dict[str, Any]] = []
    for name in names:
        done = stored_blocks.clear(where, name, before, force)
        if done is None:
            raise UserError(f"{name} in {where}: a worker has started there; the rest is not deleted without --force")
        cleared.append({"worker": name, "files": done[0], "bytes": done[1]})
    if as_json:
        _print({"path": str(where), "cleared": cleared})
        return
    for one in cleared:
        typer.echo(f"{one['worker']}: {one['files']} files deleted, {decimal(one['bytes'])}")


def _directory(path: Path | None, config: Path | None) -> Path:
    """Where the blocks are. Raises UserError."""
    found = path or load(config, {}).tiers.disk_path
    if found is None:
        raise UserError("tiers.disk_path is not set; say where the blocks are with --path, or --config")
    return found


def _by_worker(where: Path, worker: str | None) -> Iterator[list[StoredFile]]:
    """The block files of each worker, without those that were put aside."""
    for name in stored_blocks.worker_names(where, worker):
        yield [file for file in stored_blocks.stored_files(where, name) if file.fingerprint is not None]


def _rows(where: Path, worker: str) -> list[dict[str, Any]]:
    """A worker's stores, one a fingerprint; that of bad files last."""
    stores: dict[str | None, list[StoredFile]] = {}
    for file in stored_blocks.stored_files(where, worker):
        stores.setdefault(file.fingerprint, []).append(file)
    now, running = time.time(), stored_blocks.running(where, worker)
    return [
        {
            "worker": worker,
            "running": running,
            "fingerprint": fingerprint,
            "blocks": len(files),
            "bytes": sum(file.bytes for file in files),
            "oldest_s": round(now - min(file.used for file in files), 1),
            "newest_s": round(now - max(file.used for file in files), 1),
        }
        for fingerprint, files in sorted(stores.items(), key=lambda item: (item[0] is None, item[0] or ""))
    ]


def _prefix(one: StoredPrefix, now: float) -> dict[str, Any]:
    return {
        "digest": one.digest,
        "worker": one.worker,
        "fingerprint": one.fingerprint,
        "tokens": one.tokens,
        "bytes": one.bytes,
        "used_s": round(now - one.used, 1),
    }


def _progress(files: list[StoredFile], label: str) -> Iterable[StoredFile]:
    """The files, with a bar on standard error where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty()) as bar:
        yield from bar.track(files, description=label)


def _seconds(age: str) -> int:
    """An age such as 7d in seconds. Raises UserError."""
    found = re.fullmatch(r"(\d{1,9})([smhdw])", age.strip())
    if found is None:
        raise UserError(f"--older-than {age}: is not an age; write for example 12h or 7d")
    return int(found[1]) * UNITS[found[2]]


def _age(seconds: float) -> str:
    """An age as people say it, in the largest unit that fits."""
    unit = next((unit for unit in ("d", "h", "m") if seconds >= UNITS[unit]), "s")
    return f"{max(0.0, seconds) / UNITS[unit]:.0f} {unit}"


def _short(fingerprint: str | None) -> str:
    return fingerprint[:12] if fingerprint is not None else "(bad files)"


def _print(result: dict[str, Any]) -> None:
    typer.echo(json.dumps(result, indent=2))
