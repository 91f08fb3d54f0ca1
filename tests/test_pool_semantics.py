"""What a prefill may read and write: slots, padding, snapshots, outputs, views (S1 to S4, S7, S8, S11, S14, S15, S17)."""

import pytest
import torch
from torch import Tensor

import oracle
from conftest import Call, Target
from gpu import alone_with_the_memory
from kdaserve import Snapshots
from kdaserve.testing import assert_same_bits, prefill_inputs

NAN = float("nan")
DATA = ("q", "k", "v", "g", "beta")


def spread(x: Tensor, gap: int) -> tuple[Tensor, Tensor]:
    """A NaN-filled buffer and a view into it that equals `x`, its rows `gap` elements apart and away from both ends."""
    stride = x[0].numel() + gap
    buffer = torch.full((2 * gap + len(x) * stride,), NAN, dtype=x.dtype, device=x.device)
    view = buffer.as_strided(x.shape, (stride, *x.stride()[1:]), gap)
    view.copy_(x)
    return buffer, view


def with_tail(x: Tensor, rows: int) -> Tensor:
    """`x` `[B, T, ...]` with NaN rows after its last."""
    return torch.cat([x, torch.full((x.shape[0], rows, *x.shape[2:]), NAN, dtype=x.dtype, device=x.device)], 1)


def cloned(call: Call) -> Call:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}


# S1, S2, S3: which bytes of the pool change


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_named_rows_of_a_strided_pool_change(target: Target, op: str, pool_dtype: torch.dtype):
    call = prefill_inputs([70, 0, 5, 130], pool_dtype=pool_dtype, slots=9, device=target.device)
    rows = call["initial_state_indices"].tolist()
    call["initial_state_indices"][2] = -1
    call["snapshots"] = Snapshots([0, 3], [64, 128], [slot for slot in range(9) if slot not in rows][:2])
    buffer, call["initial_state"] = spread(call["initial_state"], gap=37)
    before, rows_before = buffer.clone(), call["initial_state"].clone()
    target.check_prefill(op, call)  # the rows themselves
    call["initial_state"].copy_(rows_before)
    assert_same_bits(buffer, before, f"{target}: {op}: bytes between the slots")


def test_pool_of_many_layers(target: Target, op: str):
    call = prefill_inputs([70, 5], slots=6, device=target.device)
    memory = torch.full((6, 3, *call["initial_state"].shape[1:]), NAN, device=target.device)
    memory[:, 1] = call["initial_state"]
    target.check_prefill(op, call, initial_state=memory[:, 1])
    assert memory[:, [0, 2]].isnan().all(), "the layer's neighbours changed"


@pytest.mark.parametrize("indices", [[-1, 3], [3, -1], [-1, -1], [0, 4], [4, 0], [-7, 0]], ids=str)
def test_negative_index_is_padding_and_slot_0_is_a_slot(target: Target, op: str, indices: list[int]):
    call = prefill_inputs([70, 65], slots=5, device=target.device)
    call["initial_state_indices"] = torch.tensor(indices, dtype=torch.int32, device=target.device)
    call["output_intermediate_states"] = True
    target.check_prefill(op, call)


def test_padding_sequence_starts_from_zero_whatever_the_pool_holds(target: Target, op: str):
    call = prefill_inputs([70, 65], slots=5, device=target.device)
    call["initial_state_indices"] = torch.tensor([-1, 2], device=target.device)
    call["initial_state"][[0, 1, 3, 4]] = NAN
    o = target.check_prefill(op, call)
    assert o.isfinite().all()


@pytest.mark.parametrize("lengths", [[3, 0, 0], [0, 3, 0], [0, 0, 3], [1, 1, 1], [2, 0, 1]], ids=str)
def test_as_many_rows_as_sequences(target: Target, op: str, lengths: list[int]):
    target.check_prefill(op, prefill_inputs(lengths, slots=8, device=target.device))


def test_all_slots_but_one_in_use(target: Target, op: str):
    target.check_prefill(op, prefill_inputs([3] * 7, slots=8, device=target.device))


def test_slot_beyond_two_to_the_31_elements(target: Target):
    """S15; the memory of slots that nobody touches is never committed."""

    def job() -> None:
        slots, HV, D = 10_924, 12, 128
        buffer = torch.empty(slots, HV, D, D, device=target.device)
        call = prefill_inputs([2], heads=HV, k_dim=D, v_dim=D, slots=1, device=target.device)
        buffer[-1] = call["initial_state"][0]
        o = target.run("chunk_kda", call)
        far = {"initial_state": buffer, "initial_state_indices": torch.tensor([slots - 1], dtype=torch.int32, device=target.device)}
        assert_same_bits(target.run("chunk_kda", call | far), o, "output from slot 10,923")
        assert_same_bits(buffer[-1], call["initial_state"][0], "slot 10,923")

    alone_with_the_memory(job)


# S4, S5: rows past the end


@pytest.mark.parametrize("lengths", [[51], [20, 0, 31], [0, 0], [64, 128]], ids=str)
def test_rows_past_the_last_boundary_are_never_read(target: Target, op: str, lengths: list[int]):
    call = prefill_inputs(lengths, device=target.device)
    for name in DATA:
        call[name] = with_tail(call[name], 256 - sum(lengths))
    call["output_intermediate_states"] = True
    o, _ = target.check_prefill(op, call)
    assert_same_bits(o[:, sum(lengths) :], torch.zeros_like(o[:, sum(lengths) :]), "padding rows")


def test_padding_rows_of_a_given_out_are_zeroed(target: Target, op: str):
    call = prefill_inputs([51], device=target.device)
    for name in DATA:
        call[name] = with_tail(call[name], 13)
    call["out"] = torch.full_like(call["v"], NAN)
    target.check_prefill(op, call)


@pytest.mark.parametrize("batched", [False, True])
def test_longer_g_and_beta(target: Target, op: str, batched: bool):
    call = prefill_inputs([51, 51], batched=batched, device=target.device)
    call["g"], call["beta"] = with_tail(call["g"], 13), with_tail(call["beta"], 77)
    target.check_prefill(op, call)


@pytest.mark.parametrize("length", [63, 65, 500, 1000])
def test_last_real_row_ends_a_chunk(target: Target, length: int):
    call = prefill_inputs([length, 3], heads=1, device=target.device)
    for name in DATA:
        call[name] = with_tail(call[name], 7)
    target.check_prefill("chunk_kda", call)


# S7, S3: nothing to do


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("sequences", [0, 3])
def test_no_tokens_packed(target: Target, op: str, rows: int, sequences: int):
    call = prefill_inputs([0] * sequences, device=target.device)
    for name in DATA:
        call[name] = with_tail(call[name], rows)
    call["output_intermediate_states"] = True
    o, h = target.check_prefill(op, call)
    assert o.shape == call["v"].shape
    assert o.shape[1] == rows
    assert h.shape == (1, 0, *call["initial_state"].shape[1:])


@pytest.mark.parametrize(("batch", "length"), [(0, 0), (0, 5), (2, 0)])
@pytest.mark.parametrize("with_h", [False, True])
def test_no_tokens_batched(target: Target, op: str, batch: int, length: int, with_h: bool):
    call = prefill_inputs([0] * batch, device=target.device)
    for name in DATA:
        call[name] = call[name].new_empty(batch, length, *call[name].shape[2:])
    call |= {"cu_seqlens": None, "output_intermediate_states": with_h}
    result = target.check_prefill(op, call)
    o = result[0] if with_h else result
    assert o.shape == (batch, length, *call["v"].shape[2:])


def test_nothing_is_stored_for_no_tokens(target: Target, op: str):
    call = prefill_inputs([0, 0], slots=4, device=target.device)
    call["initial_state"].fill_(NAN)  # an uninitialised slot stays what it is
    target.check_prefill(op, call)


# S8: outputs


def test_output_is_new_memory(target: Target, op: str):
    call = prefill_inputs([70], device=target.device)
    o = target.check_prefill(op, call)
    assert o.untyped_storage().data_ptr() not in {call[name].untyped_storage().data_ptr() for name in (*DATA, "initial_state")}


@pytest.mark.parametrize("kind", ["contiguous", "wide rows", "head-major", "last dimension strided"])
def test_out_of_any_strides(target: Target, op: str, kind: str):
    call = prefill_inputs([70, 0, 5], v_heads=4, device=target.device)
    plain = target.run(op, cloned(call))
    B, T, HV, V = call["v"].shape
    buffer, out = {
        "contiguous": lambda x: (x(B, T, HV, V),) * 2,
        "wide rows": lambda x: ((b := x(B, T, HV, 3 * V)), b[..., V : 2 * V]),
        "head-major": lambda x: ((b := x(B, HV, T, V)), b.transpose(1, 2)),
        "last dimension strided": lambda x: ((b := x(B, T, HV, V, 2)), b[..., 1]),
    }[kind](lambda *shape: torch.full(shape, NAN, dtype=call["v"].dtype, device=target.device))
    call["out"] = out
    result = target.check_prefill(op, call)
    assert result is out
    assert_same_bits(out.contiguous(), plain, "out= against a new output")
    out.fill_(NAN)
    assert buffer.isnan().all(), "elements around `out` were written"


def test_out_may_be_v(target: Target, op: str):
    call = prefill_inputs([70, 0, 5], device=target.device)
    plain = cloned(call)
    o = target.run(op, plain)
    call["out"] = call["v"]
    assert target.check_prefill(op, call) is call["v"]
    assert_same_bits(call["v"], o, "out=v against a new output")
    assert_same_bits(call["initial_state"], plain["initial_state"], "pool after out=v")


def test_out_may_be_v_in_a_packed_projection(target: Target, op: str):
    call = prefill_inputs([70, 5], device=target.device)
    B, T, HV, V = call["v"].shape
    buffer = torch.full((B, T, HV, 3 * V), NAN, dtype=call["v"].dtype, device=target.device)
    buffer[..., V : 2 * V] = call["v"]
    call["v"] = call["out"] = buffer[..., V : 2 * V]
    target.check_prefill(op, call)
    call["out"].fill_(NAN)
    assert buffer.isnan().all(), "elements beside v were written"


# S11: states on the way


def test_track_state_row_by_row(target: Target, op: str):
    call = prefill_inputs([200, 70, 0, 128, 5], device=target.device)
    call["track_chunk_idx"] = torch.tensor([3, -1, -1, 1, 0], dtype=torch.int32, device=target.device)
    track = torch.full((5, *call["initial_state"].shape[1:]), NAN, device=target.device)
    buffer, call["track_state"] = spread(track, gap=19)
    target.check_prefill(op, call)
    call["track_state"].fill_(NAN)
    assert buffer.isnan().all(), "elements between the rows of `track_state` were written"


def test_snapshots_of_every_kind(target: Target, op: str):
    call = prefill_inputs([200, 70, 0, 128, 130], slots=20, device=target.device)
    call["initial_state_indices"] = torch.tensor([3, -1, 5, 0, 19], device=target.device)
    saved = [
        (0, 64, 10), (0, 128, 11), (0, 192, 12), (0, 200, 13), (0, 0, 14),  # many of one sequence, in the order of nothing
        (1, 64, 2), (1, 70, 1), (1, 0, 17),  # of a padding sequence
        (2, 0, 4),  # of an empty one
        (3, 128, 18), (4, 128, 6), (4, 130, 7),
        (4, 64, -1), (0, 12345, -1), (-1, -1, -2),  # unused entries say nothing
    ]  # fmt: skip
    saved = saved[::2] + saved[1::2]
    call["snapshots"] = Snapshots(*(list(column) for column in zip(*saved, strict=True)))
    target.check_prefill(op, call)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_snapshots_from_tensors(target: Target, op: str, dtype: torch.dtype):
    call = prefill_inputs([130], slots=5, device=target.device)
    call["initial_state_indices"] = torch.tensor([2], device=target.device)
    columns = (torch.tensor(column, dtype=dtype, device=target.device) for column in ([0, 0, 0], [128, 64, 130], [0, -1, 4]))
    target.check_prefill(op, call, snapshots=Snapshots(*columns))


def test_the_same_state_into_two_slots(target: Target, op: str):
    call = prefill_inputs([130], slots=5, device=target.device)
    call["initial_state_indices"] = torch.tensor([2], device=target.device)
    target.check_prefill(op, call, snapshots=Snapshots([0, 0], [128, 128], [0, 4]))
    assert_same_bits(call["initial_state"][0], call["initial_state"][4], "two snapshots of one state")


def test_snapshots_in_the_dtype_of_the_pool(target: Target, op: str):
    call = prefill_inputs([130], slots=5, pool_dtype=torch.bfloat16, device=target.device)
    call["initial_state_indices"] = torch.tensor([2], device=target.device)
    target.check_prefill(op, call, snapshots=Snapshots([0, 0, 0], [0, 64, 130], [0, 1, 4]))
    assert_same_bits(call["initial_state"][4], call["initial_state"][2], "snapshot at the length against the slot")


@pytest.mark.parametrize(("length", "chunks"), [(128, 2), (130, 3)])
def test_checkpoints_at_128(target: Target, op: str, length: int, chunks: int):
    call = prefill_inputs([length], slots=5, device=target.device)
    call["initial_state_indices"] = torch.tensor([2], device=target.device)
    call |= {"snapshots": Snapshots([0], [128], [4]), "output_intermediate_states": True}
    call |= {"track_state": torch.full((1, *call["initial_state"].shape[1:]), NAN, device=target.device)}
    call |= {"track_chunk_idx": torch.tensor([chunks - 1], device=target.device)}
    expected = oracle.prefill(call, lambda n: range(n + 1))
    _, h = target.check_prefill(op, call)
    assert h.shape[1] == chunks
    target.assert_close(call["initial_state"][4], expected.states[0][128], "snapshot after 128")
    target.assert_close(call["track_state"][0], expected.states[0][64 * chunks - 64], "start of the last chunk")
    assert (call["initial_state"][4] == call["initial_state"][2]).all() == (length == 128)


def test_snapshots_are_the_states_of_runs_cut_there(target: Target, op: str):
    whole = prefill_inputs([200], slots=6, device=target.device)
    whole["initial_state_indices"] = torch.tensor([0], device=target.device)
    whole["snapshots"] = Snapshots([0, 0, 0], [64, 128, 192], [1, 2, 3])
    start = cloned(whole)
    target.run(op, whole)
    for slot, tokens in enumerate((64, 128, 192), 1):
        cut = cloned(start) | {"snapshots": None, "cu_seqlens": torch.tensor([0, tokens], device=target.device)}
        target.run(op, cut)
        target.assert_same(whole["initial_state"][slot], cut["initial_state"][0], f"{op}: state after {tokens}")


# S14: what is not finite stays where it is


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [*DATA, "initial_state"])
def test_a_nan_stays_in_its_sequence_and_head(target: Target, op: str, name: str, value: float):
    lengths = [5, 70, 130]
    clean = prefill_inputs(lengths, heads=3, slots=5, device=target.device)
    poisoned = cloned(clean)
    slots = clean["initial_state_indices"].tolist()
    sequence, head = 1, 2
    if name == "initial_state":
        poisoned[name][slots[sequence], head, 3, 4] = value
    else:
        poisoned[name][:, 5 + 30, head] = value
    o, other = target.run(op, clean), target.run(op, poisoned)
    assert_same_bits(other[:, :, :head], o[:, :, :head], "the other heads")
    assert_same_bits(other[:, :5], o[:, :5], "the sequence before")
    assert_same_bits(other[:, 75:], o[:, 75:], "the sequence after")
    rows = [slot for slot in range(5) if slot != slots[sequence]]
    assert_same_bits(poisoned["initial_state"][rows], clean["initial_state"][rows], "the other slots")
    good, bad = clean["initial_state"][slots[sequence]], poisoned["initial_state"][slots[sequence]]
    assert_same_bits(bad[:head], good[:head], "the other heads of its slot")


# S17: views


def test_views_of_one_projection(target: Target, op: str):
    call = prefill_inputs([70, 5], v_heads=4, v_dim=32, device=target.device)
    widths = [*(call[name][0, 0].numel() for name in DATA), 3]
    packed = torch.full((1, 75, sum(widths)), NAN, device=target.device)
    views = packed.split(widths, -1)
    for name, view in zip(DATA, views, strict=False):
        view.copy_(call[name].flatten(2))
        call[name] = view.unflatten(-1, call[name].shape[2:])
        assert not call[name].is_contiguous()
    target.check_prefill(op, call)


@pytest.mark.parametrize("kind", ["every third", "head-major", "one value for all"])
def test_beta_of_any_strides(target: Target, op: str, kind: str):
    call = prefill_inputs([70, 5], v_heads=4, device=target.device)
    beta = call["beta"]
    call["beta"] = {
        "every third": lambda: torch.stack([beta, beta * NAN, beta * NAN], -1)[..., 0],
        "head-major": lambda: beta.transpose(1, 2).contiguous().transpose(1, 2),
        "one value for all": lambda: beta[:, :1, :1].expand_as(beta),
    }[kind]()
    target.check_prefill(op, call)


def test_head_major_and_expanded_inputs(target: Target, op: str):
    call = prefill_inputs([65, 65, 65], batched=True, device=target.device)
    for name in ("q", "v"):
        call[name] = call[name].transpose(1, 2).contiguous().transpose(1, 2)
    call["k"] = call["k"][:1].expand_as(call["k"])
    call["g"] = call["g"][:, :, :1].expand_as(call["g"])
    target.check_prefill(op, call)


def test_nothing_is_remembered_of_a_tensor(target: Target, op: str):
    """The same tensors with new contents, as a replayed graph sees them."""
    call = prefill_inputs([70, 5, 25], slots=8, device=target.device)
    for bounds, slots in (([0, 70, 75, 100], [0, 1, 2]), ([0, 1, 99, 99], [7, -1, 3]), ([0, 0, 0, 64], [2, 3, 4])):
        call["cu_seqlens"].copy_(torch.tensor(bounds))
        call["initial_state_indices"].copy_(torch.tensor(slots))
        call["initial_state"].mul_(0.5)
        target.check_prefill(op, call)
