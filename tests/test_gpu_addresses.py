"""Tensors of more than 2^31 elements (S15). What lies where a 32-bit address would point is NaN, and must stay it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from conftest import Call, Target
from gpu import DATA, alone_with_the_memory, every_element, results
from helpers import DECODE, NAN
from kdaserve.testing import assert_same_bits, decode_inputs, prefill_inputs

pytestmark = pytest.mark.gpu

BEYOND = 2**31
ENDS = [70, 130]
"""Tokens of the sequences that are compared, one at each end of what is large."""
WIDE: dict[str, Any] = {"heads": 128, "k_dim": 128, "v_dim": 128, "dtype": torch.bfloat16}
ROWS, REQUESTS, CHUNKS = 2**17 + 200, 43_700, 1028
"""With `WIDE` just enough for q, `mixed_qkv` and `h`."""
STRIDE = BEYOND + 512
POOLED: dict[str, Any] = {"heads": 12, "k_dim": 128, "v_dim": 128, "dtype": torch.bfloat16}
POOLS = [(torch.float32, 10_924), (torch.bfloat16, 21_848)]
"""With `POOLED` the last slot starts past 2^31 elements, and past 2^32."""


def poisoned(*shape: int, like: Tensor) -> Tensor:
    return torch.full(shape, NAN, dtype=like.dtype, device=like.device)


def of_heads(call: Call, heads: list[int]) -> Call:
    """A few heads of a call that has as many of every kind; the oracle need not see them all."""
    K = call["q"].shape[-1]
    part = {**call, **{name: call[name][:, :, heads] for name in DATA}, "A_log": call["A_log"][heads]}
    return part | {"dt_bias": call["dt_bias"].view(-1, K)[heads].flatten(), "initial_state": call["initial_state"][:, heads]}


def check_ends(target: Target, op: str, call: Call, in_company: Callable[[], dict[str, Tensor]]) -> None:
    """The results of the sequences of `call` have the same bits in company as alone, and the oracle's values.

    Alone comes first: what has to compile does not keep others waiting for the memory.
    """
    alone = results(target, op, call)
    found = alone_with_the_memory(in_company)
    heads, dtype, slots = [0, call["q"].shape[2] - 1], call["q"].dtype, call["initial_state_indices"].tolist()
    expected = oracle.prefill(of_heads(call, heads))
    for name, x in found.items():
        assert_same_bits(x, alone[name], f"{op}: {name} against the run alone")
    for n, (start, length) in enumerate(zip([0, *accumulate(expected.lengths)], expected.lengths, strict=False)):
        rows = slice(start, start + length)
        target.assert_close(found["output"].flatten(0, 1)[rows][:, heads], expected.o.flatten(0, 1)[rows], f"output of sequence {n}", dtype, op=op)
        target.assert_close(found["initial_state"][slots[n]][heads], expected.states[n][length], f"state of sequence {n}", dtype, op=op)


# Pools


@pytest.mark.parametrize(("pool_dtype", "slots"), POOLS, ids=str)
def test_slots_far_apart(serving_target: Target, every_op: str, pool_dtype: torch.dtype, slots: int):
    """Slot 0 and the last; at 32 bits the last would start before the pool, or inside slot 0."""
    made: dict[str, Any] = {**POOLED, "pool_dtype": pool_dtype, "device": serving_target.device, "slots": 2}
    call = decode_inputs(2, **made) if every_op == DECODE else prefill_inputs(ENDS, **made)
    index = "ssm_state_indices" if every_op == DECODE else "initial_state_indices"
    near, far = (torch.tensor([0, slot], dtype=torch.int32, device=serving_target.device) for slot in (1, slots - 1))
    call[index] = near
    small = results(serving_target, every_op, call)

    def large() -> dict[str, Tensor]:
        pool = poisoned(slots, *call["initial_state"].shape[1:], like=call["initial_state"])
        pool[[0, -1]] = call["initial_state"]
        own = {**call, "initial_state": pool, index: far} | ({"out": torch.full_like(call["out"], NAN)} if every_op == DECODE else {})
        result = serving_target.run(every_op, own)
        assert every_element(pool[1:-1], torch.isnan, 2000), "slots that no one named"
        return {"output": result[0] if every_op == DECODE else result, "initial_state": pool[[0, -1]]}

    for name, x in alone_with_the_memory(large).items():
        assert_same_bits(x, small[name], f"{every_op}: {name} with slots 0 and {slots - 1}")
    if every_op == DECODE:
        serving_target.check_decode(call)
    else:
        serving_target.check_prefill(every_op, call)


# Tokens


def test_packed_tokens(serving_target: Target, op: str):
    """A sequence at each end of q, k, v, g and the output of 2^31 elements; NaN in those between, which store no state."""
    device = serving_target.device
    ends = prefill_inputs(ENDS, beta_is_raw=True, slots=3, device=device, **WIDE)
    between = ROWS - sum(ENDS)
    middle = [2048] * (between // 2048) + [between % 2048]

    def in_company() -> dict[str, Tensor]:
        call = in_a_long_pack(ends, middle, lambda x: poisoned(1, between, *x.shape[2:], like=x))
        assert call["q"].numel() > BEYOND
        o = serving_target.run(op, call)
        assert every_element(o[0, ENDS[0] : -ENDS[1]], torch.isnan, 8192), "output of the sequences between"
        return {"output": torch.cat([o[:, : ENDS[0]], o[:, -ENDS[1] :]], 1), "initial_state": call["initial_state"]}

    check_ends(serving_target, op, ends, in_company)


def in_a_long_pack(ends: Call, middle: list[int], between: Callable[[Tensor], Tensor]) -> Call:
    """The call with sequences of lengths `middle` between its two, padding all of them, their tokens from `between`; a copy of its pool."""
    call, slots, device = dict(ends), ends["initial_state_indices"].tolist(), ends["q"].device
    for name in DATA:
        call[name] = torch.cat([ends[name][:, : ENDS[0]], between(ends[name]), ends[name][:, ENDS[0] :]], 1)
    call["cu_seqlens"] = torch.tensor([0, *accumulate([ENDS[0], *middle, ENDS[1]])], dtype=torch.int32, device=device)
    call["initial_state_indices"] = torch.tensor([slots[0], *[-1] * len(middle), slots[1]], dtype=torch.int32, device=device)
    return call | {"initial_state": ends["initial_state"].clone()}


def test_tokens_far_apart(serving_target: Target, op: str):
    """One token of a chunk lies more than 2^31 elements behind another."""
    length, stride = 70, 2**26
    plain = prefill_inputs([length], k_dim=64, v_dim=64, dtype=torch.bfloat16, device=serving_target.device)
    size = plain["q"][0, 0].numel()
    assert 64 * stride > BEYOND

    def far() -> dict[str, Tensor]:
        buffer = torch.empty(length * stride, dtype=torch.bfloat16, device=serving_target.device)
        call = plain | {"initial_state": plain["initial_state"].clone()}
        for i, name in enumerate(DATA):
            _, _, *inner = plain[name].stride()
            call[name] = buffer.as_strided(plain[name].shape, (length * stride, stride, *inner), i * size)
            call[name].copy_(plain[name])
        return {"output": serving_target.run(op, call), "initial_state": call["initial_state"]}

    expected = results(serving_target, op, plain)
    for name, x in alone_with_the_memory(far).items():
        assert_same_bits(x, expected[name], f"{name} of tokens far apart")


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
def test_batches_far_apart(serving_target: Target, op: str, offset: int):
    """q, k, v, g and beta as columns of one buffer, the rows of each batch more than 2^31 elements behind those before."""
    batch, length = 3, 70
    plain = prefill_inputs([length] * batch, batched=True, k_dim=64, v_dim=64, dtype=torch.bfloat16, device=serving_target.device)
    size = plain["q"][0].numel()

    def run(stride: int) -> dict[str, Tensor]:
        buffer = poisoned((batch - 1) * stride + 5 * size + offset, like=plain["q"])
        out = poisoned((batch - 1) * stride + size + offset, like=plain["q"])
        call = dict(plain)
        for i, name in enumerate(DATA):
            call[name] = buffer.as_strided(plain[name].shape, (stride, *plain[name].stride()[1:]), i * size + offset)
            call[name].copy_(plain[name])
        call["out"] = out.as_strided(plain["v"].shape, (stride, *plain["v"].stride()[1:]), offset)
        call["initial_state"] = plain["initial_state"].clone()
        found = {"output": serving_target.run(op, call).clone(), "initial_state": call["initial_state"]}
        call["out"].fill_(NAN)
        assert every_element(out, torch.isnan, 2**28), "elements around `out`"
        return found

    near = run(5 * size + 512)
    for name, x in alone_with_the_memory(lambda: run(STRIDE)).items():
        assert_same_bits(x, near[name], f"{name} of batches far apart")
    serving_target.check_prefill(op, plain)


def test_requests(serving_target: Target):
    """`mixed_qkv` of more than 2^31 elements; all requests but the first and the last are padding, and NaN."""
    device = serving_target.device
    ends = decode_inputs(2, slots=3, device=device, **WIDE)
    start = ends["initial_state"].clone()
    serving_target.check_decode(ends)

    def in_company() -> dict[str, Tensor]:
        call = dict(ends)
        for name in ("mixed_qkv", "a", "b", "out"):
            call[name] = poisoned(REQUESTS, *ends[name].shape[1:], like=ends[name])
            call[name][[0, -1]] = ends[name]
        call["out"].fill_(NAN)
        call["ssm_state_indices"] = torch.full((REQUESTS,), -1, dtype=torch.int32, device=device)
        call["ssm_state_indices"][[0, -1]] = ends["ssm_state_indices"]
        call["initial_state"] = start
        assert call["mixed_qkv"].numel() > BEYOND
        serving_target.run(DECODE, call)
        assert every_element(call["out"][1:-1], lambda x: x == 0, 4096), "output of padding"
        return {"out": call["out"][[0, -1]], "initial_state": start}

    for name, x in alone_with_the_memory(in_company).items():
        assert_same_bits(x, ends[name], f"{name} of the first and the last request")


# States


def test_h(serving_target: Target, op: str):
    """`h` of more than 2^31 elements, from as many sequences of one token; all but the first and the last are padding and start from zero."""
    ends = prefill_inputs(ENDS, slots=3, device=serving_target.device, **WIDE) | {"output_intermediate_states": True}
    first, last = (-(-length // 64) for length in ENDS)
    middle = CHUNKS - first - last

    def in_company() -> dict[str, Tensor]:
        call = in_a_long_pack(ends, [1] * middle, lambda x: torch.zeros(1, middle, *x.shape[2:], dtype=x.dtype, device=x.device))
        o, h = serving_target.run(op, call)
        assert h.numel() > BEYOND
        assert every_element(h[0, first:-last], lambda x: x == 0, 256), "h of the sequences between"
        found = {"output": torch.cat([o[:, : ENDS[0]], o[:, -ENDS[1] :]], 1), "initial_state": call["initial_state"]}
        return found | {"h": torch.cat([h[:, :first], h[:, -last:]], 1)}

    check_ends(serving_target, op, ends, in_company)
