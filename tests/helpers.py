"""Calls of every op, and what a refused one must leave alone; for the tests that run over all three ops."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

import kdaserve
from conftest import Call
from kdaserve import KdaError, guards
from kdaserve.testing import assert_same_bits, decode_inputs, prefill_inputs

DECODE = "packed_decode_kda"
OPS = ("chunk_kda", "recurrent_kda", DECODE)
NAN = float("nan")
LENGTHS = [70, 0, 5, 130]


def call_of(op: str, device: str = "cpu", **options: Any) -> Call:
    return decode_inputs(3, device=device, **options) if op == DECODE else prefill_inputs(LENGTHS, device=device, **options)


def refused(op: str, call: Call, *codes: str) -> str:
    """The text of a refusal from the catalogue, with one of `codes`; nothing may have been written."""
    tensors = {name: x for name, x in call.items() if guards.has_storage(x)}
    before = {name: x.detach().clone() for name, x in tensors.items()}
    with pytest.raises(KdaError) as caught:
        getattr(kdaserve, op)(**call)
    assert caught.value.code in codes, f"expected {codes}, got {caught.value}"
    for name, x in tensors.items():
        assert_same_bits(x.detach(), before[name], f"{op}: `{name}` after the refusal")
    return str(caught.value)


def sabotage(monkeypatch: pytest.MonkeyPatch, op: str, disturb: Callable[[Any, Any], None]) -> None:
    """The torch backend computes `op` and then `disturb` changes the checked call's tensors or the result."""
    module = importlib.import_module(f"kdaserve.ops.{op}.torch")
    run = module.run

    def disturbed(call: Any) -> Any:
        result = run(call)
        disturb(call, result)
        return result

    monkeypatch.setattr(module, "run", disturbed)


def one_wrong_token(call: Any, result: Any) -> None:
    """For `sabotage`."""
    (call.out[0, 0, 1] if call.op == DECODE else result[0][0, 3, 1]).add_(1)


def failing(message: str) -> Callable[[Any, Any], None]:
    """For `sabotage`: the call fails so."""

    def disturb(call: Any, result: Any) -> None:
        raise ValueError(message)

    return disturb
