"""The command line, one file a command. Exit status: 0 fine, 1 findings, 2 wrong use, 130 stopped by Ctrl-C."""

from typing import Annotated

import typer

from blockscale import __version__
from blockscale.cli.audit import audit_app
from blockscale.cli.info import info
from blockscale.cli.train import train

app = typer.Typer(
    name="blockscale",
    help="Block-scaled mixture-of-experts layers for PyTorch: MXFP8, NVFP4 and FP8.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command()(train)
app.command()(info)
app.add_typer(audit_app, name="audit")

__all__ = ["app"]
