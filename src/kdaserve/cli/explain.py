"""``kdaserve explain``: the error catalogue in the terminal."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from kdaserve import errors


def explain(
    code: Annotated[str | None, typer.Argument(help="Error code such as KDA102; without it all codes are listed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain JSON: one entry, or a list of all.")] = False,
) -> None:
    """Tell what an error code means, when it is raised and what to do."""
    if code is None:
        _print_json([entry.as_dict() for entry in errors.CATALOGUE.values()]) if as_json else _print_table()
        return
    try:
        entry = errors.explain(code)
    except errors.KdaError as problem:
        typer.echo(str(problem), err=True)
        raise typer.Exit(2) from None
    if as_json:
        _print_json(entry.as_dict())
    else:
        Console().print(Markdown(entry.as_markdown()))


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_table() -> None:
    table = Table("code", "raises", "what is wrong", box=None, pad_edge=False)
    for entry in errors.CATALOGUE.values():
        table.add_row(entry.code, entry.raises, entry.title)
    Console(markup=False, highlight=False).print(table)
