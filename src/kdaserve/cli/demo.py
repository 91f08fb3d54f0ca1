"""``kdaserve demo``: a small trained model, served with and without prefix reuse, timed and checked."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kdaserve.demo.measure import TOLERANCE, Report, measure
from kdaserve.demo.prompts import PREFIX, PROMPTS
from kdaserve.errors import KdaError

SHOWN = 3
"""Problems on the check line."""


def demo(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt of your own; may be given several times.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Bytes to generate for each prompt.")] = 64,
) -> None:
    """Serve a small byte-level model on the CPU: several prompts, one saved prefix, packed prefill, batched decode.

    Exit code 0: text and states are as they must be. 1: they are not; the check line says what.
    """
    console = Console(stderr=True, quiet=as_json)
    try:
        with console.status("starting") as status:
            report = measure(prompt or PROMPTS, tokens, lambda what: status.update(what))
    except KdaError as fault:
        _conclude([str(fault)], {"problems": [str(fault)]}, as_json)
    else:
        if not as_json:
            _show(report)
        _conclude(report.problems, dataclasses.asdict(report), as_json)


def _show(report: Report) -> None:
    console = Console()
    for prompt, text in zip(report.prompts, report.texts, strict=True):
        start = "... " + prompt[len(PREFIX) :] if prompt.startswith(PREFIX) else prompt
        console.print(f"[bold]{escape(start)}[/bold]{escape(text.rstrip())}\n", highlight=False, soft_wrap=True)
    first = report.first_token_seconds
    table = Table("", "figure", title=f"{len(report.prompts)} prompts, {report.prefix_tokens} tokens of them shared and saved")
    table.add_row("time to first token, without prefix reuse", f"{1e3 * first['without reuse']:.0f} ms")
    table.add_row("time to first token, with prefix reuse", f"{1e3 * first['with reuse']:.0f} ms")
    table.add_row("prefill", f"{report.prefill_tokens_per_second:.0f} tokens/s")
    table.add_row("decode", f"{report.decode_tokens_per_second:.0f} tokens/s")
    table.add_row("largest deviation of a state from the fp64 reference", f"{report.largest_deviation:.1e}")
    console.print(table)


def _conclude(problems: list[str], result: dict[str, Any], as_json: bool) -> None:
    """The check line or the JSON object, and the exit code."""
    if as_json:
        typer.echo(json.dumps({"ok": not problems, **_finite(result)}))
    elif problems:
        more = f"; and {len(problems) - SHOWN} more (--json has them all)" if len(problems) > SHOWN else ""
        Console().print(f"[red]check failed:[/red] {escape('; '.join(problems[:SHOWN]))}{more}", highlight=False, soft_wrap=True)
    else:
        passed = f"text and states with prefix reuse have the bits of the run without; deviation within {TOLERANCE:.0e}; untouched slots are zero"
        Console().print(f"[green]check passed:[/green] {passed}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if problems else 0)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
