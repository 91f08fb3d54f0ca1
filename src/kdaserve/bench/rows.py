"""Rows: kept as JSON lines, shown as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kdaserve.bench.measure import Row


def append(path: Path, rows: Iterable[Row], facts: Mapping[str, object]) -> None:
    """Appends rows to a file of JSON lines, each with `facts`."""
    with path.open("a") as lines:
        lines.writelines(json.dumps({**row, **facts}) + "\n" for row in rows)


def load(path: Path) -> list[Row]:
    """The rows of a file; ValueError when a line is no row."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or "case" not in row:
            raise ValueError(f"line {number} of {path} is no row of a benchmark")
        rows.append(row)
    return rows


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of the rows of one provider on one case and device the last; those of `bench cpu` name no provider and are left out."""
    found = {tuple(row[key] for key in ("device", "bench", "case", "variant", "provider")): row for row in rows if "provider" in row}
    return list(found.values())


def table(rows: Iterable[Row]) -> Table:
    """What was measured, for people, two lines a row. Ratios say how many times as long the best peer takes, and how many times the plain case."""
    heads = (
        "case\nvariant",
        "provider",
        "eager ms\np20 p80",
        "replay ms\np20 p80",
        "of floor",
        "best peer\nto plain",
        "error o\nstate",
        "extra\nMiB",
    )
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for head in heads:
        shown.add_column(head, justify="left" if head in heads[:2] else "right")
    for row in rows:
        if "not_run" not in row:
            variant = "" if row["variant"] == "plain" else row["variant"]
            share = f"{row['share_of_floor']:.1%}" if "share_of_floor" in row else ""
            ratios = [f"{row[key]:.2f}" if key in row else "" for key in ("ratio_to_best_peer", "ratio_to_plain")]
            memory = f"{row['extra_bytes'] / 2**20:.1f}" if "extra_bytes" in row else ""
            cells = (f"{row['case']}\n{variant}", row["provider"], _times(row, "eager"), _times(row, "graph"), share, "\n".join(ratios))
            shown.add_row(*cells, "\n".join(_error(row[key]) for key in ("err_o", "err_s")), memory)
    return shown


def remarks(rows: Sequence[Row]) -> list[str]:
    """Why something did not run or could not be captured: a line for each reason, with the cases."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for key, what in (("not_run", "not run"), ("graph_reason", "no replay")):
            if key in row:
                found.setdefault(f"{row['provider']}: {what}: {row[key]}", []).append(title(row))
    everything = list(dict.fromkeys(title(row) for row in rows))
    return [f"{remark} ({'all cases' if cases == everything else ', '.join(cases)})" for remark, cases in found.items()]


def title(row: Row) -> str:
    """The case, with its variant unless that is the plain one."""
    return row["case"] if row["variant"] == "plain" else f"{row['case']} {row['variant']}"


def _times(row: Row, how: str) -> str:
    if f"{how}_ms" not in row:
        return ""
    return "{:.4g}\n{:.3g} {:.3g}".format(*(row[f"{how}_{name}"] for name in ("ms", "p20", "p80")))


def _error(error: Any) -> str:
    return error if isinstance(error, str) else f"{error:.1e}"
