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
        row = json.loads(line) if line.startswith("{") else None
        if not isinstance(row, dict) or "case" not in row:
            raise ValueError(f"line {number} of {path} is no row of a benchmark")
        rows.append(row)
    return rows


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of rows of one provider on one case and device the last; rows without a provider are left out."""
    found = {tuple(row[key] for key in ("device", "bench", "case", "variant", "provider")): row for row in rows if "provider" in row}
    return list(found.values())


def table(rows: Sequence[Row]) -> Table:
    """The rows for people. Beside the best peer: how many times as long it takes. To plain: how many times as long as the plain case."""
    shown = Table(box=SIMPLE_HEAD)
    for name in ("case", "provider"):
        shown.add_column(name, no_wrap=True)
    for name in ("eager ms\n(p20, p80)", "replay ms\n(p20, p80)", "share of floor", "best peer", "to plain", "error\no, state", "extra MiB"):
        shown.add_column(name, justify="right", overflow="fold")
    for row in rows:
        if "not_run" in row:
            shown.add_row(title(row), row["provider"], "not run")
            continue
        ratios = [f"{row[key]:.2f}" if key in row else "" for key in ("ratio_to_best_peer", "ratio_to_plain")]
        share = f"{row['share_of_floor']:.1%}" if "share_of_floor" in row else ""
        errors = ", ".join(_error(row[key]) for key in ("err_o", "err_s"))
        memory = f"{row['extra_bytes'] / 2**20:.0f}" if "extra_bytes" in row else ""
        shown.add_row(title(row), row["provider"], _times(row, "eager"), _times(row, "graph"), share, *ratios, errors, memory)
    return shown


def remarks(rows: Iterable[Row]) -> list[str]:
    """Why something did not run or could not be captured, a line for each."""
    found = []
    for row in rows:
        for key, what in (("not_run", "not run"), ("graph_reason", "no replay")):
            if key in row:
                found.append(f"{title(row)}, {row['provider']}: {what}: {row[key]}")
    return found


def title(row: Row) -> str:
    """The case, with its variant unless that is the plain one."""
    return row["case"] if row["variant"] == "plain" else f"{row['case']} {row['variant']}"


def _times(row: Row, how: str) -> str:
    if f"{how}_ms" not in row:
        return ""
    return "{:.4g} ({:.4g}, {:.4g})".format(*(row[f"{how}_{name}"] for name in ("ms", "p20", "p80")))


def _error(error: Any) -> str:
    return error if isinstance(error, str) else f"{error:.1e}"
