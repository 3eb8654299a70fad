"""What every command does alike: consoles, machine output, errors."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import typer
from rich.console import Console

from blockscale.report import to_jsonable

FINE, FINDINGS, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def consoles() -> tuple[Console, Console]:
    """(results on stdout, progress and remarks on stderr). A pipe gets lines of 160 columns, so that tables stay whole."""
    out, err = Console(), Console(stderr=True)
    return (out if out.is_terminal else Console(width=160)), err


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(to_jsonable(value), indent=2, allow_nan=False))


def wrong_use(message: str) -> NoReturn:
    """Say what is wrong on stderr and leave with status 2."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(WRONG_USE)
