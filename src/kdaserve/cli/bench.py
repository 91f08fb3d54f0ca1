"""``kdaserve bench``: how long calls take, after checking what they give."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from kdaserve import dispatch
from kdaserve.bench import cpu, plot, rows
from kdaserve.bench.limits import COMMIT, commit
from kdaserve.bench.measure import Bench, Row
from kdaserve.bench.providers import automatic_backends, peer_names, providers
from kdaserve.cli.env import environment
from kdaserve.errors import KdaError
from kdaserve.testing.cases import CPU_DECODE, CPU_PREFILL, GPU_DECODE, GPU_PREFILL, VARIANTS, Case, grid

PREFILL = {"cpu": CPU_PREFILL, "cuda": GPU_PREFILL}
DECODE = {"cpu": CPU_DECODE, "cuda": GPU_DECODE}
SWEEP = {"cpu": ((2, 8), (64, 256, 1024), (1, 4)), "cuda": ((8, 12, 32, 64), (64, 512, 2048, 8192), (1, 8))}
"""By device what runs when nothing is named; of a sweep the heads, lengths and numbers of sequences."""
SWEEP_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
SWEEP_CHECK_TOKENS = 2048
NO_PEER = "none"

T = TypeVar("T")

Names = Annotated[list[str] | None, typer.Argument(metavar="[CASE]...", help="Names of cases; default all of the device.")]
BackendNames = Annotated[
    list[str] | None, typer.Option("--backend", help="One of ours; may be given several times. Default: all that auto may pick.")
]
PeerNames = Annotated[
    list[str] | None, typer.Option("--peer", help=f"{', '.join(peer_names())}, or {NO_PEER}; may be given several times. Default: all.")
]
DeviceName = Annotated[str | None, typer.Option("--device", help="cuda or cpu; default cuda where there is one.")]
Rounds = Annotated[int | None, typer.Option(min=3, help="Timed repetitions; default as many as take 0.15 s, but 10 to 200.")]
Warm = Annotated[bool, typer.Option("--warm", help="Check and compile, time nothing: so several processes can compile side by side.")]
Save = Annotated[
    Path | None, typer.Option(help=f"Append the rows to this JSON-lines file, with date, environment and commit (without git: of ${COMMIT}).")
]
Figures = Annotated[Path | None, typer.Option("--plot", help="Draw the rows into this folder. Needs matplotlib.")]
Json = Annotated[bool, typer.Option("--json", help="A JSON list of the rows.")]


@dataclasses.dataclass(frozen=True)
class Output:
    """Where rows go besides the screen: a file, figures."""

    save: Path | None
    figures: Path | None
    as_json: bool


bench = typer.Typer(no_args_is_help=True, help="Time calls, after checking what they give: no figures on a red check.")


@bench.command("cpu")
def bench_cpu(
    rounds: Annotated[int, typer.Option(min=3, help="Timed repetitions of each row.")] = 7, save: Save = None, as_json: Json = False
) -> None:
    """Time prefill and decode on the CPU beside plain PyTorch. Takes about 20 s."""
    with _progress(cpu.STEPS) as step:
        measured = cpu.measure_cpu(rounds, step)
    if save is not None:
        rows.append(save, measured, _facts())
    if as_json:
        typer.echo(json.dumps(measured))
    else:
        Console().print(cpu.table(measured))


@bench.command()
def prefill(
    cases: Names = None,
    variant: Annotated[list[str] | None, typer.Option(help=f"Beside each case also {', '.join(VARIANTS)}; may be given several times.")] = None,
    check_tokens: Annotated[int, typer.Option(min=1, help="Check larger cases on so many tokens.")] = 8192,
    backend: BackendNames = None,
    peer: PeerNames = None,
    device: DeviceName = None,
    rounds: Rounds = None,
    warm: Warm = False,
    save: Save = None,
    figures: Figures = None,
    as_json: Json = False,
) -> None:
    """Time prefills beside peers: eager, and replayed from a CUDA graph."""
    where = _device(device)
    chosen = _named("CASE", cases, {case.name: case for case in (*CPU_PREFILL, *GPU_PREFILL)}, PREFILL[where.type])
    variants = _named("--variant", variant, dict(zip(VARIANTS, VARIANTS, strict=True)), ())
    varied = [each for case in chosen for each in (case, *(case.varied(name) for name in variants))]
    _run("prefill", varied, where, backend, peer, check_tokens, rounds, warm, Output(save, figures, as_json))


@bench.command()
def decode(
    cases: Names = None,
    backend: BackendNames = None,
    peer: PeerNames = None,
    device: DeviceName = None,
    rounds: Rounds = None,
    warm: Warm = False,
    save: Save = None,
    figures: Figures = None,
    as_json: Json = False,
) -> None:
    """Time decode steps beside peers: eager, and replayed from a CUDA graph that walks over pools no cache can hold."""
    where = _device(device)
    chosen = _named("CASE", cases, {case.name: case for case in (*CPU_DECODE, *GPU_DECODE)}, DECODE[where.type])
    _run("decode", chosen, where, backend, peer, max(case.tokens for case in chosen), rounds, warm, Output(save, figures, as_json))


@bench.command()
def sweep(
    heads: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of heads; may be given several times.")] = None,
    length: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of each sequence; may be given several times.")] = None,
    sequences: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of sequences; may be given several times.")] = None,
    backend: BackendNames = None,
    peer: PeerNames = None,
    device: DeviceName = None,
    rounds: Rounds = None,
    warm: Warm = False,
    save: Save = None,
    figures: Figures = None,
    as_json: Json = False,
) -> None:
    """Time prefills of every combination of heads, lengths and numbers of sequences."""
    where = _device(device)
    usual = SWEEP[where.type]
    cases = grid(heads or usual[0], length or usual[1], sequences or usual[2], SWEEP_DTYPE[where.type])
    _run("sweep", cases, where, backend, peer, SWEEP_CHECK_TOKENS, rounds, warm, Output(save, figures, as_json))


@bench.command("plot")
def bench_plot(
    file: Annotated[Path, typer.Argument(help="Rows that --save wrote.", exists=True, dir_okay=False)],
    folder: Annotated[Path, typer.Argument(help="Where the figures go.", file_okay=False)],
) -> None:
    """Draw stored rows: latency against tokens, share of the floor, and of a sweep the time a token. SVG and PNG."""
    _need_matplotlib()
    try:
        stored = rows.load(file)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from wrong
    if not _draw(stored, folder):
        raise typer.BadParameter(f"{file} has nothing to draw: no times of prefill, decode or sweep")


def _run(
    name: str,
    cases: Sequence[Case],
    device: torch.device,
    backend: list[str] | None,
    peer: list[str] | None,
    checked_tokens: int,
    rounds: int | None,
    warm: bool,
    output: Output,
) -> None:
    """Checks, times, keeps and shows; rows are kept case by case, so that a run that is cut short leaves what it had."""
    known = dispatch.backends()
    ours = _named("--backend", backend, {status.name: status.name for status in known}, automatic_backends(cases[0].op, device))
    peers = _named("--peer", peer, {name: name for name in (*peer_names(), NO_PEER)}, peer_names())
    if output.figures is not None:
        _need_matplotlib()
    plan = Bench(name, cases, providers(cases[0].op, ours, peers), device, checked_tokens, rounds)
    measured: list[Row] = []
    facts = _facts()
    with _progress(plan.steps) as step:
        plan = dataclasses.replace(plan, step=step)
        checked = plan.check()
        if warm:
            measured, output = plan.untimed_rows(checked), Output(None, None, output.as_json)
        else:
            for of_case in plan.rows(checked):
                measured += of_case
                if output.save is not None:
                    rows.append(output.save, of_case, facts)
    if output.as_json:
        typer.echo(json.dumps(measured))
    else:
        Console().print(rows.table(measured))
        for remark in rows.remarks(measured):
            typer.echo(remark)
    if output.figures is not None:
        _draw([{**row, **facts} for row in measured], output.figures)


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on the error stream, and a function that moves it on. An error of ours ends the command: no figures on a red check."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=steps)
        try:
            yield lambda what: progress.update(task, advance=1, description=what)
        except KdaError as fault:
            red: KdaError | None = fault
        else:
            red = None
    if red is not None:
        typer.echo(f"No figures on a red check. {red}", err=True)
        raise typer.Exit(1) from red


def _facts() -> dict[str, object]:
    return {"date": f"{datetime.datetime.now():%Y-%m-%d}", "commit": commit(), "environment": environment()}


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in PREFILL:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(PREFILL)}", param_hint="--device")
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no CUDA GPU here", param_hint="--device")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def _named(what: str, names: Sequence[str] | None, known: Mapping[str, T], default: Sequence[T]) -> list[T]:
    """What the names stand for, each once; `default` when there are none."""
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=what)
    return [known[name] for name in dict.fromkeys(names)] if names else list(default)


def _need_matplotlib() -> None:
    try:
        importlib.import_module("matplotlib")
    except ImportError as missing:
        typer.echo(f"Figures need matplotlib, which cannot be imported ({missing}); pip install 'kdaserve[bench]' brings it.", err=True)
        raise typer.Exit(2) from missing


def _draw(measured: Sequence[Row], folder: Path) -> list[Path]:
    """Draws, and tells which files that made."""
    paths = plot.draw(measured, folder)
    for path in paths:
        typer.echo(str(path), err=True)
    return paths
