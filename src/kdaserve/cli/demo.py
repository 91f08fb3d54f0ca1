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

ABOUT = "A byte-level model of 3.2 M parameters, trained on Python's own reference topics. Odd text is normal; what counts is how it is served."
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
    console.print(f"{ABOUT}\n", highlight=False, soft_wrap=True)
    for prompt, text in zip(report.prompts, report.texts, strict=True):
        start = "... " + prompt[len(PREFIX) :] if prompt.startswith(PREFIX) else prompt
        console.print(f"[bold]{_column('prompt', start)}[/bold]\n{_column('model', text.rstrip())}\n", highlight=False, soft_wrap=True)
    first, count, prefix = report.first_token_seconds, len(report.prompts), report.prefix_tokens
    shared = f"{prefix} tokens of them shared and saved" if prefix else "nothing shared"
    table = Table("on one CPU thread", "measured", title=f"{count} prompt{'s' * (count != 1)}, {shared}")
    table.add_row(f"time to first token{', without prefix reuse' * bool(prefix)}", f"{1e3 * first['without reuse']:.0f} ms")
    if prefix:
        table.add_row("time to first token, with prefix reuse", f"{1e3 * first['with reuse']:.0f} ms")
    table.add_row("prefill", f"{report.prefill_tokens_per_second:.0f} tokens/s")
    table.add_row("decode", f"{report.decode_tokens_per_second:.0f} tokens/s" if report.decode_tokens_per_second else "nothing to decode")
    table.add_row("largest deviation of a state from the fp64 reference", f"{report.largest_deviation:.1e}")
    console.print(table)


def _column(name: str, text: str) -> str:
    """`text` with `name` in a column before its first line."""
    return f"{name:>6} | " + escape(text).replace("\n", "\n       | ")


def _conclude(problems: list[str], result: dict[str, Any], as_json: bool) -> None:
    """The check line or the JSON object, and the exit code."""
    if as_json:
        typer.echo(json.dumps({"ok": not problems, **_finite(result)}))
    elif problems:
        more = f"; and {len(problems) - SHOWN} more (--json has them all)" if len(problems) > SHOWN else ""
        Console().print(f"[red]check failed:[/red] {escape('; '.join(problems[:SHOWN]))}{more}", highlight=False, soft_wrap=True)
    else:
        runs = "with prefix reuse have the bits of the run without" if result["prefix_tokens"] else "of two runs have the same bits"
        passed = f"text and states {runs}; deviation within {TOLERANCE:.0e}; untouched slots are zero"
        Console().print(f"[green]check passed:[/green] {passed}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if problems else 0)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
