"""The command line: ``kdaserve demo | bench | check | explain | env | backends``."""

from __future__ import annotations

import typer

from kdaserve.cli.bench import bench
from kdaserve.cli.check import check
from kdaserve.cli.demo import demo
from kdaserve.cli.env import backends, env
from kdaserve.cli.explain import explain

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Kimi Delta Attention kernels for serving.", pretty_exceptions_enable=False)
for command in (demo, bench, check, explain, env, backends):
    app.command()(command)


def main() -> None:
    """Entry point of the ``kdaserve`` command."""
    app()
