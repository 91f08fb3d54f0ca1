"""``kdaserve check DUMP``: a saved call, validated and run on every backend against the fp64 reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kdaserve import calls, dispatch
from kdaserve.errors import KdaError
from kdaserve.testing.saved import load_call, refusal_when_saved
from kdaserve.testing.verify import verify_call


def check(
    dump: Annotated[Path, typer.Argument(help="A call saved with kdaserve.testing.save_call (the .safetensors file).")],
    tolerance: Annotated[float | None, typer.Option(help="Relative; default 1e-3, more for inputs and results in 16 bits.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Validate a saved call in full and compare every backend that can run it with the fp64 reference.

    Exit code 0: all is well. 1: the call is wrong or a backend deviates; the first fault is named. 2: the file cannot be read.
    """
    try:
        op, arguments = load_call(dump)
        refused = refusal_when_saved(dump)
    except KdaError as unreadable:
        typer.echo(str(unreadable), err=True)
        raise typer.Exit(2) from unreadable
    rows, healthy = _verify(op, arguments, tolerance, refused)
    if as_json:
        typer.echo(json.dumps({"op": op, "healthy": healthy, "results": rows}))
    else:
        table = Table("check", "largest deviation: output", "state", "verdict", title=escape(f"{op}: {dump}"))
        for row in rows:
            figures = [f"{row[key]:.1e}" if key in row else "" for key in ("output", "state")]
            table.add_row(row["check"], *figures, row["verdict"])
        Console().print(table)
        for row in rows:
            if "message" in row:
                typer.echo(f"{row['check']}: {row['message']}")
    raise typer.Exit(0 if healthy else 1)


def _verify(op: str, arguments: dict[str, Any], tolerance: float | None, refused: str | None) -> tuple[list[dict[str, Any]], bool]:
    """One row a check, and whether all is well."""
    contract = "contract and values"
    try:
        call = calls.checked_call(op, {**arguments, "check": "values"})
    except KdaError as wrong:
        return [{"check": contract, "verdict": wrong.code, "message": str(wrong)}], False
    except TypeError as misspelt:
        return [{"check": contract, "verdict": "wrong arguments", "message": str(misspelt)}], False
    if refused is not None:  # how tensors lay in memory does not survive saving
        return [{"check": contract, "verdict": "refused when saved", "message": refused}], False
    rows: list[dict[str, Any]] = [{"check": contract, "verdict": "ok"}]
    healthy = True
    for status in dispatch.backends():
        try:
            dispatch.choose(call, status.name)
        except KdaError as unable:
            rows.append({"check": status.name, "verdict": "not run", "message": str(unable)})
            continue
        try:
            found = verify_call(op, arguments, backend=status.name, tolerance=tolerance)
        except KdaError as fault:
            healthy = False
            rows.append({"check": status.name, "verdict": fault.code, "message": str(fault)})
        else:
            rows.append({"check": status.name, "output": found.output, "state": found.state, "verdict": "ok"})
    return rows, healthy
