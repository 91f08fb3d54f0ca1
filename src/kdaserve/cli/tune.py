"""``kdaserve tune helion``: Helion's autotuner for the kernels of a shape."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from kdaserve import dispatch
from kdaserve.calls import OPS
from kdaserve.cli.warmup import DTYPES
from kdaserve.errors import KdaError, error
from kdaserve.ops.helion import tuned
from kdaserve.testing import decode_inputs, prefill_inputs

tune = typer.Typer(no_args_is_help=True, help="Tune the kernels of a backend for a shape.")
EFFORTS = ("quick", "full")


@tune.callback()
def backends() -> None:
    """Tune the kernels of a backend for a shape."""


@tune.command()
def helion(
    heads: Annotated[int, typer.Option(min=1, help="Query heads of this rank.")],
    op: Annotated[str, typer.Option(help=f"One of {', '.join(OPS)}.")] = "chunk_kda",
    v_heads: Annotated[int | None, typer.Option(min=1, help="Value heads; default as many.")] = None,
    k_dim: Annotated[int, typer.Option(help="Channels of a key.")] = 128,
    v_dim: Annotated[int, typer.Option(help="Channels of a value.")] = 128,
    dtype: Annotated[str, typer.Option(help=f"Of the inputs: {', '.join(DTYPES)}.")] = "bf16",
    pool_dtype: Annotated[str, typer.Option(help="Of the states.")] = "fp32",
    lower_bound: Annotated[bool, typer.Option(help="The bounded gate, at -5; otherwise softplus.")] = True,
    lengths: Annotated[str, typer.Option(help="Tokens of the sequences of a prefill, with commas.")] = "8192",
    batch: Annotated[int, typer.Option(min=1, help="Requests of a decode.")] = 32,
    effort: Annotated[str, typer.Option(help=f"{' or '.join(EFFORTS)}, as Helion means them.")] = "quick",
    seconds: Annotated[int | None, typer.Option(min=1, help="At most, a kernel.")] = None,
    device: Annotated[str, typer.Option(help="Where to tune.")] = "cuda",
    save: Annotated[Path | None, typer.Option(help="The file to add to; default the one that the backend reads.")] = None,
) -> None:
    """Run Helion's autotuner on the kernels of one call, and keep what is faster, with the evidence, where the backend helion finds it.

    Nothing is tuned while serving: the backend reads the file when it needs a kernel for the first time. Exit code 0: done. 1: it cannot run here.
    """
    for option, value, known in (("--op", op, OPS), ("--dtype", dtype, DTYPES), ("--pool-dtype", pool_dtype, DTYPES), ("--effort", effort, EFFORTS)):
        if value not in known:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(known)}", param_hint=option)
    shape: dict[str, Any] = {
        "heads": heads,
        "v_heads": v_heads,
        "k_dim": k_dim,
        "v_dim": v_dim,
        "dtype": DTYPES[dtype],
        "pool_dtype": DTYPES[pool_dtype],
    }
    file = save or tuned.path()
    try:
        reason = next(b for b in dispatch.BACKENDS if b.name == "helion").unavailable()
        if reason is not None:
            raise error("KDA202", op=op, backend="helion", reason=reason)
        from kdaserve.ops.helion.tune import tune as search

        with torch.inference_mode():
            if op == "packed_decode_kda":
                call = decode_inputs(batch, lower_bound=-5.0 if lower_bound else None, device=device, **shape)
            else:
                tokens = [int(length) for length in lengths.split(",")]
                gate: Literal["bounded", "softplus"] = "bounded" if lower_bound else "softplus"
                call = {**prefill_inputs(tokens, gate=gate, beta_is_raw=True, device=device, **shape), "use_qk_l2norm_in_kernel": True}
            found = search(lambda: OPS[op](**call, backend="helion"), effort, seconds, typer.echo)
        tuned.keep(file, found)
    except KdaError as fault:
        typer.echo(str(fault), err=True)
        raise typer.Exit(1) from fault
    typer.echo(f"{len(found)} configurations kept in {file}")
