"""``python -m blockscale``: the command line."""

from blockscale.cli import app

app(prog_name="blockscale")
