"""Equal bits: splitting a prompt, packing and order, plans, earlier calls (S7, S9, S10)."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conftest import Call, Target
from kdaserve import plan_prefill
from kdaserve.testing import assert_same_bits, decode_inputs, prefill_inputs

DATA = ("q", "k", "v", "g", "beta")


def run(target: Target, op: str, call: Call, **changes) -> tuple[Tensor, Tensor]:
    """Output and pool of a call that leaves its pool alone."""
    pool = call["initial_state"].clone()
    return target.run(op, call, initial_state=pool, **changes), pool


def subset(call: Call, lengths: list[int], chosen: list[int]) -> Call:
    """The call with only some of its packed sequences, in the order given."""
    starts = [0, *accumulate(lengths)]
    part = dict(call)
    for name in DATA:
        part[name] = torch.cat([call[name][:, starts[n] : starts[n + 1]] for n in chosen], 1)
    bounds = [0, *accumulate(lengths[n] for n in chosen)]
    part["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=call["q"].device)
    part["initial_state_indices"] = call["initial_state_indices"][torch.tensor(chosen, device=call["q"].device)]
    return part


def rows_of(o: Tensor, lengths: list[int], chosen: list[int]) -> Tensor:
    starts = [0, *accumulate(lengths)]
    return torch.cat([o[:, starts[n] : starts[n + 1]] for n in chosen], 1)


def in_pieces(target: Target, op: str, call: Call, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """One sequence run piece by piece, its state carried in the pool."""
    T, pool, outputs = call["q"].shape[1], call["initial_state"].clone(), []
    for start, end in zip([0, *cuts], [*cuts, T], strict=True):
        piece = {name: call[name][:, start:end] for name in DATA}
        bounds = torch.tensor([0, end - start], dtype=torch.int32, device=call["q"].device)
        outputs.append(target.run(op, {**call, **piece, "initial_state": pool, "cu_seqlens": bounds}))
    return torch.cat(outputs, 1), pool


# S9: splitting and carrying the state


@pytest.mark.parametrize("gate", ["bounded", "softplus", "none"])
@pytest.mark.parametrize("cuts", [[64], [128], [64, 128], [128, 192], [64, 128, 192]], ids=str)
def test_split_at_64_gives_the_same_bits(target: Target, op: str, cuts: list[int], gate: str):
    call = prefill_inputs([230], v_heads=4, gate=gate, device=target.device)
    o, pool = run(target, op, call)
    o_split, pool_split = in_pieces(target, op, call, cuts)
    target.assert_same(o_split, o, f"{op}: output cut at {cuts}")
    target.assert_same(pool_split, pool, f"{op}: pool cut at {cuts}")


@pytest.mark.parametrize(
    ("heads", "k_dim", "v_dim", "length"),
    [(1, 16, 16, 128), (5, 32, 48, 900), (2, 128, 128, 300), pytest.param(70, 16, 16, 200, marks=pytest.mark.long)],
)
def test_split_at_64_with_other_sizes(bitwise_target: Target, heads: int, k_dim: int, v_dim: int, length: int, threads: int):
    """Long or wide enough that a backend works in several blocks and threads, whose borders must not show."""
    call = prefill_inputs([length], heads=heads, k_dim=k_dim, v_dim=v_dim, device=bitwise_target.device)
    o, pool = run(bitwise_target, "chunk_kda", call)
    for cuts in ([64], [length // 128 * 64]):
        o_split, pool_split = in_pieces(bitwise_target, "chunk_kda", call, cuts)
        bitwise_target.assert_same(o_split, o, f"output cut at {cuts}")
        bitwise_target.assert_same(pool_split, pool, f"pool cut at {cuts}")


@given(length=st.integers(2, 260), data=st.data())
def test_split_at_any_multiple_of_64(target: Target, length: int, data: st.DataObject):
    cuts = data.draw(st.lists(st.sampled_from([c for c in (64, 128, 192, 256) if c <= length] or [length]), unique=True).map(sorted))
    call = prefill_inputs([length], heads=data.draw(st.integers(1, 3)), seed=length, device=target.device)
    o, pool = run(target, "chunk_kda", call)
    o_split, pool_split = in_pieces(target, "chunk_kda", call, cuts)
    target.assert_same(o_split, o, f"output of {length} tokens cut at {cuts}")
    target.assert_same(pool_split, pool, f"pool after {length} tokens cut at {cuts}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", [[1], [63], [65], [100, 101], [1, 2, 3], [10, 74, 138]], ids=str)
def test_split_elsewhere_is_close(target: Target, cuts: list[int], dtype: torch.dtype):
    call = prefill_inputs([150], dtype=dtype, device=target.device)
    o, pool = run(target, "chunk_kda", call)
    o_split, pool_split = in_pieces(target, "chunk_kda", call, cuts)
    target.assert_agree(o_split, o, f"output cut at {cuts}", call["q"].dtype)
    target.assert_agree(pool_split, pool, f"pool cut at {cuts}", call["q"].dtype)


@pytest.mark.parametrize("heads", [2, pytest.param(70, marks=pytest.mark.long)])
def test_recurrent_split_with_more_threads(bitwise_target: Target, heads: int, threads: int):
    call = prefill_inputs([20], heads=heads, k_dim=48, v_dim=32, device=bitwise_target.device)
    o, pool = run(bitwise_target, "recurrent_kda", call)
    o_split, pool_split = in_pieces(bitwise_target, "recurrent_kda", call, [1, 7])
    bitwise_target.assert_same(o_split, o, "output cut at 1 and 7")
    bitwise_target.assert_same(pool_split, pool, "pool cut at 1 and 7")


@given(length=st.integers(2, 140), data=st.data())
def test_recurrent_split_anywhere_gives_the_same_bits(target: Target, length: int, data: st.DataObject):
    cuts = sorted(data.draw(st.sets(st.integers(0, length), max_size=4)))
    call = prefill_inputs([length], v_heads=4, seed=length, device=target.device)
    o, pool = run(target, "recurrent_kda", call)
    o_split, pool_split = in_pieces(target, "recurrent_kda", call, cuts)
    target.assert_same(o_split, o, f"output of {length} tokens cut at {cuts}")
    target.assert_same(pool_split, pool, f"pool after {length} tokens cut at {cuts}")


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_split_with_a_rounded_pool_is_close(target: Target, op: str, pool_dtype: torch.dtype):
    call = prefill_inputs([150], pool_dtype=pool_dtype, device=target.device)
    o, pool = run(target, op, call)
    o_split, pool_split = in_pieces(target, op, call, [64])
    target.assert_agree(o_split, o, f"{op}: output", stored=pool_dtype)
    target.assert_agree(pool_split, pool, f"{op}: pool")


# S10: company and order


@pytest.mark.parametrize("lengths", [[200, 3, 64, 0, 130, 1, 65, 127], [5, 5, 5, 5], [64, 64, 64], [1, 1, 1, 1, 1, 1, 1, 300]], ids=str)
def test_order_does_not_matter(target: Target, op: str, lengths: list[int]):
    call = prefill_inputs(lengths, device=target.device)
    o, pool = run(target, op, call)
    for order in (list(range(len(lengths)))[::-1], torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1)).tolist()):
        o_other, pool_other = run(target, op, subset(call, lengths, order))
        target.assert_same(o_other, rows_of(o, lengths, order), f"{op}: output in order {order}")
        target.assert_same(pool_other, pool, f"{op}: pool in order {order}")


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_company_does_not_matter(target: Target, op: str, heads: int):
    lengths = [200, 3, 64, 0, 130, 1, 65, 2, 128]
    call = prefill_inputs(lengths, heads=heads, device=target.device)
    o, pool = run(target, op, call)
    for n, length in enumerate(lengths):
        slot = int(call["initial_state_indices"][n])
        o_alone, pool_alone = run(target, op, subset(call, lengths, [n]))
        target.assert_same(o_alone, rows_of(o, lengths, [n]), f"{op}: output of {length} tokens alone")
        target.assert_same(pool_alone[slot], pool[slot], f"{op}: state after {length} tokens alone")


@given(lengths=st.lists(st.integers(0, 150), min_size=1, max_size=7), data=st.data())
def test_any_subset_in_any_order(target: Target, lengths: list[int], data: st.DataObject):
    op = data.draw(st.sampled_from([op for op in ("chunk_kda", "recurrent_kda") if op in target.row.ops]))
    heads = data.draw(st.sampled_from([1, 2, 3, 8]))
    order = data.draw(st.permutations(range(len(lengths))))[: data.draw(st.integers(1, len(lengths)))]
    call = prefill_inputs(lengths, heads=heads, k_dim=data.draw(st.sampled_from([16, 48])), seed=len(lengths), device=target.device)
    o, pool = run(target, op, call)
    o_other, pool_other = run(target, op, subset(call, lengths, order))
    target.assert_same(o_other, rows_of(o, lengths, order), f"{op}: output of {order} of {lengths}")
    for slot in call["initial_state_indices"][torch.tensor(order, device=target.device)].tolist():
        target.assert_same(pool_other[slot], pool[slot], f"{op}: slot {slot} after {order} of {lengths}")


def test_many_sequences_of_all_lengths(bitwise_target: Target, threads: int):
    """Enough of them that a backend works in several groups."""
    lengths = [(37 * n) % 101 for n in range(90)]
    call = prefill_inputs(lengths, heads=2, device=bitwise_target.device)
    o, pool = run(bitwise_target, "chunk_kda", call)
    chosen = [0, 11, 45, 89]
    o_other, pool_other = run(bitwise_target, "chunk_kda", subset(call, lengths, chosen))
    bitwise_target.assert_same(o_other, rows_of(o, lengths, chosen), "output of 4 of 90")
    slots = call["initial_state_indices"][chosen].long()
    bitwise_target.assert_same(pool_other[slots], pool[slots], "states of 4 of 90")


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_batched_equals_packed(target: Target, op: str, batch: int, length: int):
    batched = prefill_inputs([length] * batch, batched=True, v_heads=4, device=target.device)
    packed = batched | {name: batched[name].flatten(0, 1)[None] for name in DATA}
    packed["cu_seqlens"] = torch.tensor([length * n for n in range(batch + 1)], dtype=torch.int32, device=target.device)
    o, pool = run(target, op, batched)
    o_packed, pool_packed = run(target, op, packed)
    target.assert_same(o_packed.view_as(o), o, f"{op}: output packed against batched")
    target.assert_same(pool_packed, pool, f"{op}: pool packed against batched")


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8, 17])
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (2, 32), pytest.param(3, 128, marks=pytest.mark.long)])
def test_decode_company_does_not_matter(bitwise_target: Target, batch: int, heads: int, dim: int, threads: int):
    call = decode_inputs(17, heads=heads, k_dim=dim, v_dim=dim, device=bitwise_target.device)
    pool = call["initial_state"].clone()
    bitwise_target.run("packed_decode_kda", call)
    order = [(5 * row + 3) % 17 for row in range(batch)]
    part = call | {name: call[name][order] for name in ("mixed_qkv", "a", "b", "ssm_state_indices")}
    part |= {"out": torch.empty_like(call["out"][order]), "initial_state": pool}
    bitwise_target.run("packed_decode_kda", part)
    bitwise_target.assert_same(part["out"], call["out"][order], f"decode output of rows {order}")
    slots = part["ssm_state_indices"].long()
    bitwise_target.assert_same(pool[slots], call["initial_state"][slots], f"states of rows {order}")


def test_padding_does_not_change_the_others_bits(target: Target, op: str):
    lengths = [70, 3, 130]
    call = prefill_inputs(lengths, device=target.device)
    o, pool = run(target, op, call)
    padded = subset(call, lengths, [0, 1, 1, 2])
    slots = call["initial_state_indices"].tolist()
    padded["initial_state_indices"] = torch.tensor([slots[0], -1, slots[1], slots[2]], dtype=torch.int32, device=target.device)
    o_padded, pool_padded = run(target, op, padded)
    target.assert_same(torch.cat([o_padded[:, :70], o_padded[:, 73:]], 1), o, f"{op}: output beside a padding sequence")
    target.assert_same(pool_padded, pool, f"{op}: pool beside a padding sequence")


# S7: what was called before, and what is handed in


def test_first_calls_do_not_change_later_ones(target: Target, op: str):
    call = prefill_inputs([130, 5], device=target.device)
    o, pool = run(target, op, call)
    for lengths in ([1], [0], [], [130, 5], [5, 130], [65, 1, 1]):
        run(target, op, prefill_inputs(lengths, seed=3, device=target.device))
        run(target, op, prefill_inputs(lengths, dtype=torch.bfloat16, device=target.device))
    o_later, pool_later = run(target, op, call)
    assert_same_bits(o_later, o, f"{op}: output of a later call")
    assert_same_bits(pool_later, pool, f"{op}: pool of a later call")


def test_a_plan_does_not_change_the_bits(target: Target, op: str):
    call = prefill_inputs([130, 0, 5], device=target.device)
    o, pool = run(target, op, call)
    for plan in (plan_prefill(call["cu_seqlens"]), plan_prefill(lengths=[130, 0, 5], device=target.device)):
        o_plan, pool_plan = run(target, op, call, plan=plan)
        assert_same_bits(o_plan, o, f"{op}: output with a plan")
        assert_same_bits(pool_plan, pool, f"{op}: pool with a plan")


def test_what_else_is_asked_for_does_not_change_the_bits(target: Target, op: str):
    call = prefill_inputs([130, 0, 5], device=target.device)
    o, pool = run(target, op, call)
    (o_h, _), pool_h = run(target, op, call, output_intermediate_states=True)
    o_values, _ = run(target, op, call, check="values")
    assert_same_bits(o_h, o, f"{op}: output beside h")
    assert_same_bits(pool_h, pool, f"{op}: pool beside h")
    assert_same_bits(o_values, o, f'{op}: output with check="values"')


def test_autograd_does_not_change_the_bits(learner: Target, op: str):
    call = prefill_inputs([130, 0, 5, 70], device=learner.device)
    o, pool = run(learner, op, call)
    o_grad, pool_grad = run(learner, op, call, q=call["q"].clone().requires_grad_())
    learner.assert_same(o_grad, o, f"{op}: output while autograd records")
    learner.assert_same(pool_grad, pool, f"{op}: pool while autograd records")


def test_inference_mode_does_not_change_the_bits(target: Target, op: str):
    call = prefill_inputs([130, 0, 5, 70], device=target.device)
    o, pool = run(target, op, call)
    with torch.inference_mode():
        plan = plan_prefill(lengths=[130, 0, 5, 70], device=target.device)
        o_inference, pool_inference = run(target, op, call, plan=plan)
    assert_same_bits(o_inference, o, f"{op}: output under inference_mode")
    assert_same_bits(pool_inference, pool, f"{op}: pool under inference_mode")
    o_later, _ = run(target, op, call, plan=plan)
    assert_same_bits(o_later, o, f"{op}: output with a plan made under inference_mode")
