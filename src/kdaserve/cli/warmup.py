"""``kdaserve warmup``: compile ahead what a model needs, into the compiler's cache on disk."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kdaserve import contract
from kdaserve.calls import OPS
from kdaserve.errors import KdaError, dtype_name
from kdaserve.warm import LAYOUTS
from kdaserve.warm import warmup as warm_up

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INDICES = {dtype_name(dtype): dtype for dtype in contract.INDICES}


def warmup(
    heads: Annotated[int, typer.Option(min=1, help="Query heads of this rank.")],
    v_heads: Annotated[int | None, typer.Option(min=1, help="Value heads; default as many.")] = None,
    k_dim: Annotated[int, typer.Option(help="Channels of a key.")] = 128,
    v_dim: Annotated[int, typer.Option(help="Channels of a value.")] = 128,
    dtype: Annotated[str, typer.Option(help=f"Of q, k and v: {', '.join(DTYPES)}.")] = "bf16",
    g_dtype: Annotated[str | None, typer.Option(help="Of the gate; default that of q.")] = None,
    beta_dtype: Annotated[str | None, typer.Option(help="Of beta; default that of q.")] = None,
    pool_dtype: Annotated[str, typer.Option(help="Of the states.")] = "fp32",
    activated: Annotated[bool, typer.Option("--activated", help="Prefills get the log decay as g, and no A_log.")] = False,
    dt_bias: Annotated[bool, typer.Option(help="Whether the gate has a bias.")] = True,
    lower_bound: Annotated[float | None, typer.Option(help="Of the bounded gate; without it the gate is softplus.")] = None,
    l2norm: Annotated[bool, typer.Option(help="Whether calls pass use_qk_l2norm_in_kernel.")] = True,
    beta_is_raw: Annotated[bool, typer.Option(help="Whether the beta of a prefill is a logit.")] = True,
    output_intermediate_states: Annotated[bool, typer.Option("--output-intermediate-states", help="Prefills may ask for all states.")] = False,
    track_state: Annotated[bool, typer.Option("--track-state", help="Prefills may ask for tracked states.")] = False,
    snapshots: Annotated[bool, typer.Option("--snapshots", help="Prefills may ask for snapshots.")] = False,
    layout: Annotated[list[str] | None, typer.Option(help=f"{' or '.join(LAYOUTS)}; default both.")] = None,
    index_dtype: Annotated[list[str] | None, typer.Option(help=f"{' or '.join(INDICES)}; default both.")] = None,
    op: Annotated[list[str] | None, typer.Option(help=f"{', '.join(OPS)}; may be given several times. Default: all.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cuda",
    backend: Annotated[str, typer.Option(help="As calls pass it.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Compile all that the KDA layers of a model need, so that no request waits for it. Triton keeps it on disk.

    Options are the arguments of kdaserve.warmup. Exit code 0: done. 1: the options are wrong or a kernel cannot run; the error says which.
    """
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("compiling", total=None)
            report = warm_up(
                heads=heads,
                v_heads=v_heads,
                k_dim=k_dim,
                v_dim=v_dim,
                dtype=_dtype("--dtype", dtype, DTYPES),
                g_dtype=None if g_dtype is None else _dtype("--g-dtype", g_dtype, DTYPES),
                beta_dtype=None if beta_dtype is None else _dtype("--beta-dtype", beta_dtype, DTYPES),
                pool_dtype=_dtype("--pool-dtype", pool_dtype, DTYPES),
                A_log=not activated,
                dt_bias=dt_bias,
                lower_bound=lower_bound,
                use_qk_l2norm_in_kernel=l2norm,
                beta_is_raw=beta_is_raw,
                output_intermediate_states=output_intermediate_states,
                track_state=track_state,
                snapshots=snapshots,
                layouts=layout or LAYOUTS,
                index_dtypes=[_dtype("--index-dtype", name, INDICES) for name in index_dtype or INDICES],
                ops=op or tuple(OPS),
                device=device,
                backend=backend,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
    except KdaError as fault:
        typer.echo(str(fault), err=True)
        raise typer.Exit(1) from fault
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
        return
    for name, chosen in report.backends.items():
        typer.echo(f"{name}: {chosen}")
    what = f"{report.compiled} kernels compiled or found on disk" if report.compiled else "nothing to compile"
    typer.echo(f"{what}, {report.seconds:.1f} s")


def _dtype(option: str, name: str, known: dict[str, torch.dtype]) -> torch.dtype:
    if name not in known:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=option)
    return known[name]
