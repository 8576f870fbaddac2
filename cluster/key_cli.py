"""`headwater key`: API keys, and what the file of tenants has of them."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.errors import UserError
from router import tenants

app = typer.Typer(no_args_is_help=True, help="API keys of gateways.")
PREFIX = "hw-"


@app.command()
def new() -> None:
    """Make a key: the first line is for who will use it, the second for the file `gateway.keys_file`."""
    key = PREFIX + secrets.token_urlsafe(32)
    typer.echo(f"{key}\n{tenants.hashed(key)}")


@app.command(name="hash")
def hash_key() -> None:
    """Read a key from standard input and print what the file has of it."""
    key = sys.stdin.readline().strip()
    if not key:
        raise UserError("no key on standard input")
    if len(key) < tenants.MIN_KEY:
        raise UserError(f"a key of less than {tenants.MIN_KEY} characters can be guessed; make one: headwater key new")
    typer.echo(tenants.hashed(key))


@app.command()
def check(file: Annotated[Path, typer.Argument(help="file of tenants")]) -> None:
    """Say what is wrong with a file of tenants, or who is in it."""
    try:
        found = tenants.read(file).tenants
    except ValueError as error:
        raise UserError(str(error)) from None
    for name, tenant in found.items():
        typer.echo(f"{name}: {len(tenant.keys)} keys")
