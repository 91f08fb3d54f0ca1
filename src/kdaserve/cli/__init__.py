"""The command line: ``kdaserve demo | bench | warmup | tune | check | explain | env | backends``."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from kdaserve import __version__
from kdaserve.cli.bench import bench
from kdaserve.cli.check import check
from kdaserve.cli.demo import demo
from kdaserve.cli.env import backends, env
from kdaserve.cli.explain import explain
from kdaserve.cli.tune import tune
from kdaserve.cli.warmup import warmup

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(demo)
app.add_typer(bench, name="bench")
app.add_typer(tune, name="tune")
for command in (warmup, check, explain, env, backends):
    app.command()(command)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Kimi Delta Attention kernels for serving."""
    if version:
        typer.echo(f"kdaserve {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the ``kdaserve`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # generated text may hold what the terminal's encoding has not
    app()
