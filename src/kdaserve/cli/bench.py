"""``kdaserve bench``: how long calls take, beside plain PyTorch on the same inputs in the same run."""

from __future__ import annotations

import datetime
import functools
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from kdaserve.calls import checked_call
from kdaserve.cli.env import environment
from kdaserve.demo.model import ByteLM, load_model
from kdaserve.errors import KdaError
from kdaserve.nn import KimiDeltaAttention
from kdaserve.nn.convolution import convolve_token
from kdaserve.ops.chunk_kda.api import chunk_kda
from kdaserve.ops.chunk_kda.reference import token
from kdaserve.ops.gate import activate, l2_norm, log_decay, sigmoid
from kdaserve.ops.prefill import PrefillCall
from kdaserve.testing import decode_inputs, verify_call
from kdaserve.testing.cases import CPU_PREFILL, PrefillCase


def bench(
    cpu: Annotated[bool, typer.Option("--cpu", help="Time the `torch` backend on the CPU: the default, all there is so far.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list of the rows.")] = False,
    save: Annotated[Path | None, typer.Option(help="Append the rows, with commit, machine and versions, to this JSON-lines file.")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Timed repetitions of each row.")] = 7,
) -> None:
    """Time prefill and decode beside plain PyTorch: correctness first, then medians with the 20th and 80th percentile. Takes about 20 s."""
    jobs: dict[str, Callable[[], dict[str, Any]]] = {case.name: functools.partial(_prefill, case, rounds) for case in CPU_PREFILL}
    jobs["decode_b1"] = functools.partial(_decode, load_model(), rounds)
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress, torch.inference_mode():
        task = progress.add_task("checking", total=len(jobs) + 1)
        _refuse_on_red()
        for name, job in jobs.items():
            progress.update(task, advance=1, description=f"timing {name}")
            rows.append(job())
    if save is not None:
        facts = {"date": f"{datetime.datetime.now():%Y-%m-%d}", "commit": _commit(), "environment": environment()}
        with save.open("a") as lines:
            lines.writelines(json.dumps({**row, **facts}) + "\n" for row in rows)
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        Console().print(_table(rows))


def _refuse_on_red() -> None:
    try:
        for case in CPU_PREFILL:
            verify_call("chunk_kda", case.inputs())
        verify_call("packed_decode_kda", decode_inputs(4, heads=2, k_dim=128, v_dim=128))
    except KdaError as red:
        typer.echo(f"No figures on a red check. {red}", err=True)
        raise typer.Exit(1) from red


def _prefill(case: PrefillCase, rounds: int) -> dict[str, Any]:
    """A prefill case beside the plain token recurrence, and beside the floor that this machine's products set."""
    call = case.inputs()
    times = time_calls({"ours": lambda: chunk_kda(**call), "plain": _plain_recurrence(call)}, rounds)
    floor = 1e3 * case.flops / _product_rate()
    extra = {"bytes": case.nbytes, "gflop": round(case.flops / 1e9, 3), "floor_ms": round(floor, 3)}
    return {**_row(case.name, times), **extra, "share_of_floor": round(floor / times["ours"][1], 3)}


def _plain_recurrence(arguments: Mapping[str, Any]) -> Callable[[], Tensor]:
    """E1 to E4 in a Python loop over tokens, all heads at once, state in a plain tensor: what one writes without this library."""
    call = checked_call("chunk_kda", arguments)
    assert isinstance(call, PrefillCall)
    lengths = call.host_plan().lengths

    def run() -> Tensor:
        q, k, g, beta = activate(call, *(x[0].float() for x in (call.q, call.k, call.g, call.beta)))
        v = call.v[0].float()
        outputs: list[Tensor] = []
        for n, length in enumerate(lengths):
            S = call.initial_state[call.initial_state_indices[n]].float()
            for t in range(len(outputs), len(outputs) + length):
                S, o = token(S, q[t], k[t], v[t], g[t], beta[t], call.scale)
                outputs.append(o)
        return torch.stack(outputs)

    return run


def _decode(model: ByteLM, rounds: int) -> dict[str, Any]:
    """A decode step of the demo model, one request: state in a pool, beside the same step with state in plain tensors."""
    pool = model.state_pool(8)
    slots = torch.tensor([pool.allocate()], dtype=torch.int32)
    tokens = torch.tensor([ord("A")])
    states = [_PlainState(block.get_submodule("attention")) for block in model.blocks]

    def plain() -> Tensor:
        return model.run_layers(tokens, lambda i, layer, x: states[i].decode(x))

    return _row("decode_b1", time_calls({"ours": lambda: model.decode(tokens, pool, slots), "plain": plain}, 10 * rounds))


class _PlainState:
    """A layer that decodes one request with its state in two plain tensors."""

    def __init__(self, layer: nn.Module) -> None:
        assert isinstance(layer, KimiDeltaAttention)
        sizes = layer.state_sizes()
        self._layer = layer
        self._S = torch.zeros(1, sizes["v_heads"], sizes["v_dim"], sizes["k_dim"])
        self._conv = torch.zeros(1, sizes["conv_channels"], sizes["conv_width"] - 1)

    def decode(self, x: Tensor) -> Tensor:
        """`[1, hidden]` to the same shape."""
        qkv, self._conv = convolve_token(self._layer.project_qkv(x), self._conv, self._layer.conv_taps())
        q, k, v = (self._layer.split_heads(part) for part in qkv.split(self._layer.qkv_channels(), -1))
        g = log_decay(self._layer.split_heads(self._layer.decay_logits(x)), self._layer.A_log, self._layer.dt_bias, self._layer.lower_bound)
        beta = sigmoid(self._layer.b_proj(x))
        self._S, o = token(self._S, l2_norm(q), l2_norm(k), v, g, beta, k.shape[-1] ** -0.5)
        return self._layer.project_output(o, x)


def time_calls(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Milliseconds (p20, median, p80) of each call; the calls take turns, so that what else the machine does hits all alike."""
    for call in calls.values():
        call()
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: _percentiles(ts) for name, ts in times.items()}


def _percentiles(times: list[float]) -> tuple[float, float, float]:
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return fifths[0], statistics.median(times), fifths[3]


def _product_rate() -> float:
    """Floating-point operations a second of a plain matrix product here."""
    a = torch.randn(1024, 1024)
    return 2 * 1024**3 / (time_calls({"product": lambda: a @ a}, 9)["product"][1] / 1e3)


def _row(name: str, times: dict[str, tuple[float, float, float]]) -> dict[str, Any]:
    ours, plain = times["ours"], times["plain"]
    figures = {f"{who}_{p}": round(t, 4) for who, ts in times.items() for p, t in zip(("p20", "ms", "p80"), ts, strict=True)}
    return {"case": name, **figures, "ratio": round(plain[1] / ours[1], 2)}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("case", "ms (p20, p80)", "plain PyTorch ms", "times faster", "share of floor")
    for row in rows:
        ours = f"{row['ours_ms']:.3g} ({row['ours_p20']:.3g}, {row['ours_p80']:.3g})"
        share = f"{row['share_of_floor']:.0%}" if "share_of_floor" in row else ""
        table.add_row(row["case"], ours, f"{row['plain_ms']:.3g}", f"{row['ratio']:.2f}", share)
    return table


def _commit() -> str:
    """The commit of the checkout this runs from, with + when it has changes; "unknown" outside one."""
    here = Path(__file__).parent
    try:
        described = subprocess.run(["git", "describe", "--always", "--dirty=+", "--abbrev=12"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()
