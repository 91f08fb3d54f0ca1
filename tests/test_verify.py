"""`verify_call`: a backend that is wrong at one place is caught, and the place is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import Call
from helpers import sabotage
from kdaserve import KdaError, ValuesError, dispatch
from kdaserve.testing import assert_same_bits, prefill_inputs, verify_call
from test_saved import CALLS, DECODE, NAN, OPS, call_of, indices_of


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_backends_are_verified_and_nothing_is_written(name: str, backend: str) -> None:
    op, make = CALLS[name]
    call = make()
    before = {key: x.clone() for key, x in call.items() if isinstance(x, Tensor)}
    found = verify_call(op, call, backend)
    assert found.backend == ("torch" if backend == "auto" else backend)
    assert max(found.output, found.state) <= (1e-2 if torch.bfloat16 in (x.dtype for x in before.values()) else 1e-3)
    for key, x in before.items():
        assert_same_bits(call[key], x, f"verify_call wrote {key}")


def deviates(op: str, call: Call, **options: Any) -> str:
    """The text of KDA309; nothing of the call may have been written."""
    before = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}
    verify_call(op, call, "reference")
    with pytest.raises(ValuesError) as caught:
        verify_call(op, call, **options)
    assert caught.value.code == "KDA309"
    for name, x in before.items():
        assert_same_bits(call[name], x, f"verify_call wrote {name}")
    return str(caught.value)


@pytest.mark.parametrize("op", ["chunk_kda", "recurrent_kda"])
@pytest.mark.parametrize("value", [1.01, NAN, float("inf"), 0.0])
@pytest.mark.parametrize(
    ("row", "where"), [(0, "sequence 0, token 0,"), (69, "sequence 0, token 69,"), (70, "sequence 2, token 0,"), (74, "sequence 2, token 4,")]
)
def test_one_wrong_token_is_named(op: str, value: float, row: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, op, lambda call, result: result[0][0, row, 1].mul_(value))
    text = deviates(op, call_of(op))
    assert f"{where} head 1" in text
    assert "output" in text
    assert "torch" in text


@pytest.mark.parametrize("op", ["chunk_kda", "recurrent_kda"])
@pytest.mark.parametrize(
    ("place", "where"),
    [((0, 64), "sequence 0, after 64 tokens,"), ((0, 70), "sequence 0, after 70 tokens,"), ((2, 5), "sequence 2, after 5 tokens,")],
)
def test_one_wrong_state_is_named(op: str, place: tuple[int, int], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def disturb(call: Any, result: Any) -> None:
        for sequence, tokens, slot in call.snapshots.entries():
            if (sequence, tokens) == place:
                call.initial_state[slot, 1, 3, 5] += 1

    sabotage(monkeypatch, op, disturb)
    text = deviates(op, call_of(op))
    assert f"{where} head 1" in text
    assert "state" in text


def test_a_quiet_sequence_is_not_lost_beside_a_loud_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where products are of 16 bits, rows that are small differences are forgiven much, but not all of a sequence."""
    monkeypatch.setattr(dispatch, "BACKENDS", tuple(dataclasses.replace(row, rounds=True) for row in dispatch.BACKENDS))
    call = prefill_inputs([70, 40], dtype=torch.bfloat16)
    call["v"][:, 70:] *= 0.005
    call["initial_state"][call["initial_state_indices"][1].long()] *= 0.005
    verify_call("chunk_kda", call, "torch")
    sabotage(monkeypatch, "chunk_kda", lambda call, result: result[0][0, 70:].zero_())
    assert "sequence 1" in deviates("chunk_kda", call)


@pytest.mark.parametrize("value", [1.01, NAN])
def test_one_wrong_request_of_decode_is_named(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, DECODE, lambda call, result: call.out[2, 0, 1].mul_(value))
    assert "request 2, head 1" in deviates(DECODE, call_of(DECODE))


def test_output_of_padding_in_decode_must_be_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, DECODE, lambda call, result: call.out[1].fill_(1e-3))
    call = call_of(DECODE)
    call["ssm_state_indices"][1] = -1
    assert "request 1, head 0" in deviates(DECODE, call)


def test_one_wrong_state_of_decode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, DECODE, lambda call, result: call.initial_state[call.ssm_state_indices[2], 1].mul_(1.01))
    call = call_of(DECODE) | {"ssm_state_indices": torch.tensor([3, -1, 5])}
    assert "request 2, slot 5, head 1" in deviates(DECODE, call)


@pytest.mark.parametrize("op", OPS)
def test_the_tolerance_is_the_callers(op: str) -> None:
    """No float32 arithmetic is exact; any is within one."""
    assert "1.0e-12" in deviates(op, call_of(op), tolerance=1e-12)
    assert verify_call(op, call_of(op), tolerance=1.0).backend == "torch"


@pytest.mark.parametrize("op", OPS)
def test_only_a_right_call_is_verified(op: str) -> None:
    call = call_of(op)
    with pytest.raises(ValuesError, match="KDA301"):
        verify_call(op, call | {indices_of(op): torch.tensor([0, 1, 7])})
    with pytest.raises(KdaError, match="KDA201"):
        verify_call(op, call, "cudnn")
    call["A_log"][0] = NAN
    with pytest.raises(ValuesError, match="KDA304"):
        verify_call(op, call)
