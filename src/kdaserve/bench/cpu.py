"""The library on a CPU, beside plain PyTorch on the same inputs in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from kdaserve.bench.limits import product_rate
from kdaserve.bench.timing import Times, take_turns
from kdaserve.calls import checked_call
from kdaserve.demo.model import ByteLM, load_model
from kdaserve.nn import KimiDeltaAttention
from kdaserve.nn.convolution import convolve_token
from kdaserve.ops.chunk_kda.api import chunk_kda
from kdaserve.ops.chunk_kda.reference import token
from kdaserve.ops.gate import activate, l2_norm, log_decay, sigmoid
from kdaserve.ops.prefill import PrefillCall
from kdaserve.testing import decode_inputs, verify_call
from kdaserve.testing.cases import CPU_PREFILL, PrefillCase

STEPS = len(CPU_PREFILL) + 2
"""How many times `measure_cpu` says what comes next."""


@torch.inference_mode()
def measure_cpu(rounds: int, step: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each prefill case and for a decode step of the demo model.

    Raises:
        KdaError: KDA309 or whatever a call raises, when a check is red; nothing is timed then.
    """
    step("checking")
    for case in CPU_PREFILL:
        verify_call("chunk_kda", case.inputs())
    verify_call("packed_decode_kda", decode_inputs(4, heads=2, k_dim=128, v_dim=128))
    rows = []
    for case in CPU_PREFILL:
        step(f"timing {case.name}")
        rows.append(_prefill(case, rounds))
    step("timing decode_b1")
    return [*rows, _decode(load_model(), rounds)]


def _prefill(case: PrefillCase, rounds: int) -> dict[str, Any]:
    """A prefill case beside the plain token recurrence, and beside the floor that this machine's products set."""
    call = case.inputs()
    times = take_turns({"ours": lambda: chunk_kda(**call), "plain": _plain_recurrence(call)}, rounds)
    floor = 1e3 * case.flops / product_rate(torch.device("cpu"), case.dtype, rounds=9)
    extra = {"bytes": case.nbytes, "gflop": round(case.flops / 1e9, 3), "floor_ms": round(floor, 3)}
    return {**_row(case.name, times), **extra, "share_of_floor": round(floor / times["ours"].median, 3)}


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

    return _row("decode_b1", take_turns({"ours": lambda: model.decode(tokens, pool, slots), "plain": plain}, 10 * rounds))


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


def _row(name: str, times: dict[str, Times]) -> dict[str, Any]:
    figures = {f"{who}_{p}": round(ms, 4) for who, t in times.items() for p, ms in (("p20", t.p20), ("ms", t.median), ("p80", t.p80))}
    return {"case": name, **figures, "ratio": round(times["plain"].median / times["ours"].median, 2)}


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows for people."""
    table = Table("case", "ms (p20, p80)", "plain PyTorch ms", "times faster", "share of floor")
    for row in rows:
        ours = f"{row['ours_ms']:.3g} ({row['ours_p20']:.3g}, {row['ours_p80']:.3g})"
        share = f"{row['share_of_floor']:.0%}" if "share_of_floor" in row else ""
        table.add_row(row["case"], ours, f"{row['plain_ms']:.3g}", f"{row['ratio']:.2f}", share)
    return table
