"""Figures of stored rows, as SVG and PNG: told apart by marker, line and hatch too, so that they can be read in grey."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdaserve.bench.measure import Row, best_ms
from kdaserve.bench.rows import latest, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Those of Okabe and Ito, which colour-blind readers can tell apart."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3)))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kdaserve",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "savefig.facecolor": "white",
}
COLUMNS = 3
"""Panels side by side."""

Point = tuple[float, float]


def draw(rows: Iterable[Row], folder: Path) -> list[Path]:
    """Draws for each benchmark the latency, and the share of the floor or, of a sweep, the time a token.

    Args:
        rows: from `kdaserve.bench.rows.load`; of rows that repeat a case the last counts.
        folder: where the files go; made if need be.

    Returns:
        The files written; none when no row has times of a provider.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib as mpl

    measured = [row for row in latest(rows) if "not_run" not in row]
    written: list[Path] = []
    with mpl.rc_context(STYLE):
        for device, bench in dict.fromkeys((row["device"], row["bench"]) for row in measured):
            chosen = [row for row in measured if (row["device"], row["bench"]) == (device, bench)]
            second = {"token": _token(chosen)} if bench == "sweep" else {"floor": _floor(chosen)}
            figures = {"latency": _latency(chosen), **second}
            for name, figure in figures.items():
                written += _saved(figure, folder / f"{bench}_{name}_{_slug(device)}", f"{bench}: {device}, {_provenance(chosen)}")
    return written


def _latency(rows: Sequence[Row]) -> Figure:
    """Milliseconds against tokens: a panel for each number of heads and pool, in a sweep also of sequences; a line for each provider."""

    def panel(row: Row) -> str:
        return f"{row['heads']} heads, {row['pool_dtype']} pool" + (f", {_sequences(row)}" if row["bench"] == "sweep" else "")

    plain = sorted((row for row in rows if row["variant"] == "plain"), key=lambda row: row["heads"])
    labels = "tokens of all sequences", "milliseconds a call"
    return _lines(_grouped(plain, panel), COLUMNS, list(_grouped(plain, _provider)), _provider, lambda row: (row["tokens"], best_ms(row)), labels)


def _token(rows: Sequence[Row]) -> Figure:
    """Microseconds a token against length: a column for each provider, a line of panels for each number of sequences, a line for each of heads."""

    def heads(row: Row) -> str:
        return f"{row['heads']} heads"

    def point(row: Row) -> Point:
        return row["tokens"] / row["sequences"], 1e3 * best_ms(row) / row["tokens"]

    providers = list(_grouped(rows, _provider))
    ordered = sorted(rows, key=lambda row: (row["sequences"], providers.index(row["provider"])))
    panels = _grouped(ordered, lambda row: f"{row['provider']}, {_sequences(row)}")
    return _lines(panels, len(providers), list(_grouped(rows, heads)), heads, point, ("tokens of each sequence", "microseconds a token"))


def _lines(
    panels: dict[str, list[Row]],
    columns: int,
    order: list[str],
    line: Callable[[Row], str],
    point: Callable[[Row], Point],
    labels: tuple[str, str],
) -> Figure:
    """Log-log panels that share their axes; `order` gives each line its style."""
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(max(5.0, 3.2 * columns), 2.6 * lines + 0.8), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax, (name, rows) in zip(axes, panels.items(), strict=False):
        for label, of_line in _grouped(rows, line).items():
            _line(ax, label, order.index(label), sorted(point(row) for row in of_line))
        ax.set(xscale="log", yscale="log", title=name, xlabel=labels[0], ylabel=labels[1])
        ax.tick_params(labelbottom=True, labelleft=True)
    _legend(figure, axes)
    return figure


def _line(ax: Axes, label: str, style: int, points: Sequence[Point]) -> None:
    x, y = zip(*points, strict=True)
    options: dict[str, Any] = {"color": _of(COLOURS, style), "marker": _of(MARKERS, style), "linestyle": _of(LINES, style)}
    ax.plot(x, y, label=label, markersize=5, linewidth=1.4, **options)


def _floor(rows: Sequence[Row]) -> Figure:
    """Share of the floor: a group of bars for each case, a bar for each provider."""
    from matplotlib.figure import Figure

    cases, providers = _grouped(rows, title), list(_grouped(rows, _provider))
    height = 0.8 / len(providers)
    figure = Figure(figsize=(7.0, 1.6 + 0.13 * len(cases) * (len(providers) + 1)), layout="constrained")
    ax = figure.subplots()
    for i, provider in enumerate(providers):
        found = {at: row for at, of_case in enumerate(cases.values()) for row in of_case if row["provider"] == provider}
        bars = ax.barh(
            [at + (i - (len(providers) - 1) / 2) * height for at in found],
            [100 * row["share_of_floor"] for row in found.values()],
            height,
            label=provider,
            color=_of(COLOURS, i),
            hatch=_of(HATCHES, i),
            edgecolor="white",
        )
        ax.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
    right = max(100, *(110 * row["share_of_floor"] for row in rows))
    ax.set(xlabel="share of the floor, %", xlim=(0, right), ylim=(-0.6, len(cases) - 0.4), yticks=range(len(cases)), yticklabels=list(cases))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    _legend(figure, [ax])
    return figure


def _legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """One legend for all panels, below them."""
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=min(5, len(handles)), frameon=False)


def _saved(figure: Figure, path: Path, heading: str) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.suptitle(heading, fontsize=9)
    svg, png = path.with_name(f"{path.name}.svg"), path.with_name(f"{path.name}.png")
    figure.savefig(svg, metadata={"Date": None})
    figure.savefig(png, dpi=160)
    return [svg, png]


def _provenance(rows: Sequence[Row]) -> str:
    """Commits and dates of the rows."""
    return ", ".join(dict.fromkeys(f"{row['commit']} of {row['date']}" for row in rows))


def _grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Rows by a key, in the order of its first appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _sequences(row: Row) -> str:
    return f"{row['sequences']} sequence{'s' if row['sequences'] > 1 else ''}"


def _provider(row: Row) -> str:
    return row["provider"]


def _of(styles: Sequence[Any], i: int) -> Any:
    return styles[i % len(styles)]


def _slug(text: str) -> str:
    return "_".join("".join(character if character.isalnum() else " " for character in text).lower().split())
