"""Prefill against the float64 recurrence: lengths, gates, heads, dimensions, dtypes; the output and the state after every 64 tokens."""

from itertools import pairwise

import pytest
import torch

import kdaserve
import oracle
from conftest import Call, Target
from kdaserve import Snapshots, plan_prefill
from kdaserve.testing import prefill_inputs

EDGES = (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 128, 129, 130)
GATES = ("bounded", "softplus", "none")


def observed(lengths: list[int], **options) -> Call:
    """A call that hands out every state it can: `h`, tracked states and a snapshot at each multiple of 64 and at the end."""
    sequence = [n for n, length in enumerate(lengths) for _ in cuts(length)]
    tokens = [t for length in lengths for t in cuts(length)]
    slots = 2 * len(lengths) + len(tokens)
    call = prefill_inputs(lengths, slots=slots, **options)
    used = call["initial_state_indices"].tolist()
    free = [slot for slot in range(slots) if slot not in used]
    call["snapshots"] = Snapshots(sequence, tokens, free[: len(tokens)])
    call["output_intermediate_states"] = True
    call["track_state"] = torch.full((len(lengths), *call["initial_state"].shape[1:]), torch.nan, device=call["q"].device)
    call["track_chunk_idx"] = torch.tensor([(length - 1) // 64 if length else -1 for length in lengths], device=call["q"].device)
    return call


def cuts(length: int) -> list[int]:
    return sorted({*range(0, length + 1, 64), length})


@pytest.mark.long
def test_every_length_up_to_130_in_one_pack(target: Target, op: str):
    target.check_prefill(op, observed(list(range(1, 131)), heads=1, device=target.device))


@pytest.mark.parametrize("length", EDGES)
def test_one_sequence_alone(target: Target, op: str, length: int):
    gate = GATES[length % 3]
    target.check_prefill(op, observed([length], heads=1, v_heads=2, gate=gate, beta_is_raw=length % 2 == 0, device=target.device, seed=length))


@pytest.mark.parametrize(
    "lengths",
    [
        [0, 70],
        [70, 0],
        [64, 0, 5],
        [0, 0, 70],
        [0, 0, 64, 0, 0, 1, 0],
        [1, 1, 128],  # cu_seqlens 0, 1, 2, 130
        [130, 1, 1],
        [63, 64, 65, 0, 200],
        [0, 0, 0],
        [1] * 9,
    ],
    ids=str,
)
def test_empty_and_short_sequences_anywhere(target: Target, op: str, lengths: list[int]):
    call = observed(lengths, device=target.device)
    target.check_prefill(op, call)
    target.check_prefill(op, observed(lengths, device=target.device), plan=plan_prefill(lengths=lengths, device=target.device))


def test_boundaries_as_users_write_them(target: Target, op: str):
    for bounds in ([0, 0, 70], [0, 1, 2, 130]):
        for dtype in (torch.int32, torch.int64):
            call = prefill_inputs([b - a for a, b in pairwise(bounds)], device=target.device)
            call["cu_seqlens"] = torch.tensor(bounds, dtype=dtype, device=target.device)
            call["initial_state_indices"] = call["initial_state_indices"].to(dtype)
            target.check_prefill(op, call)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("beta_is_raw", [False, True])
@pytest.mark.parametrize("l2norm", [False, True])
def test_gates_beta_and_norm(target: Target, op: str, gate: str, beta_is_raw: bool, l2norm: bool):
    call = observed([70, 3, 129], gate=gate, beta_is_raw=beta_is_raw, device=target.device)
    if not l2norm:
        call |= {"k": 0.25 * call["k"], "use_qk_l2norm_in_kernel": False}  # |k| near 1, or the recurrence itself grows
    target.check_prefill(op, call)


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_gate_without_bias(target: Target, op: str, gate: str):
    target.check_prefill(op, prefill_inputs([70, 3], gate=gate, device=target.device), dt_bias=None)


@pytest.mark.parametrize("bound", [-0.25, -1, -20.0])
def test_other_bounds(target: Target, op: str, bound: float):
    target.check_prefill(op, prefill_inputs([70, 3], device=target.device), lower_bound=bound)


@pytest.mark.parametrize("scale", [None, 1, 0.125, 3.5, -1.0, 0.0])
def test_scale(target: Target, op: str, scale: float | None):
    target.check_prefill(op, prefill_inputs([70, 3], device=target.device), scale=scale)


@pytest.mark.parametrize(
    ("heads", "v_heads", "k_dim", "v_dim"),
    [(1, 1, 16, 16), (2, 4, 32, 16), (1, 3, 16, 32), (2, 8, 16, 48), (3, 3, 48, 80), (1, 1, 256, 16), (1, 1, 16, 256), (1, 2, 128, 128)],
)
def test_heads_and_dimensions(target: Target, op: str, heads: int, v_heads: int, k_dim: int, v_dim: int):
    call = observed([67, 130], heads=heads, v_heads=v_heads, k_dim=k_dim, v_dim=v_dim, device=target.device)
    target.check_prefill(op, call)


@pytest.mark.long
def test_largest_dimensions(target: Target, op: str):
    target.check_prefill(op, observed([66], heads=1, k_dim=256, v_dim=256, device=target.device))


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 65), (3, 1), (3, 64), (4, 130), (5, 17)])
def test_batched(target: Target, op: str, batch: int, length: int):
    lengths = [length] * batch
    target.check_prefill(op, observed(lengths, batched=True, device=target.device))
    target.check_prefill(op, observed(lengths, batched=True, device=target.device), plan=plan_prefill(lengths=lengths, device=target.device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(target: Target, op: str, dtype: torch.dtype, pool_dtype: torch.dtype):
    for gate in GATES:
        call = observed([70, 0, 130], v_heads=4, dtype=dtype, pool_dtype=pool_dtype, gate=gate, beta_is_raw=True, device=target.device)
        target.check_prefill(op, call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gate_and_beta_in_a_dtype_of_their_own(target: Target, op: str, dtype: torch.dtype):
    for inputs, own in ((dtype, torch.float32), (torch.float32, dtype)):
        call = prefill_inputs([70, 130], dtype=inputs, device=target.device)
        call |= {name: call[name].to(own) for name in ("g", "beta") if name not in target.row.short}
        target.check_prefill(op, call)


@pytest.mark.parametrize("gate", GATES)
def test_float64_end_to_end(target64: Target, op: str, gate: str):
    call = observed([64, 1, 130], v_heads=4, gate=gate, dtype=torch.float64, pool_dtype=torch.float64, device=target64.device)
    for name in ("A_log", "dt_bias"):
        if name in call:
            call[name] = call[name].double()
    target64.check_prefill(op, call)


def test_float64_pool_under_float32_inputs(target64: Target, op: str):
    target64.check_prefill(op, observed([64, 1, 130], pool_dtype=torch.float64, device=target64.device))


def test_the_first_fourteen_parameters_by_position(target: Target, op: str):
    call = prefill_inputs([70, 3], device=target.device)
    names = (
        "q", "k", "v", "g", "beta", "scale", "initial_state", "initial_state_indices", "use_qk_l2norm_in_kernel", "cu_seqlens", "A_log",
        "dt_bias", "lower_bound",
    )  # fmt: skip
    call["scale"] = None
    expected = oracle.prefill(call)
    o, h = getattr(kdaserve, op)(*[call[name] for name in names], True, backend=target.backend)
    target.assert_close(o, expected.o, op)
    wanted = [expected.states[0][0], expected.states[0][64], expected.states[1][0]]
    target.assert_close(h, torch.stack(wanted)[None], f"{op}: h")


def test_chunk_equals_recurrent(target: Target):
    lengths = [1, 64, 200]
    one, other = prefill_inputs(lengths, device=target.device), prefill_inputs(lengths, device=target.device)
    o, r = target.run("chunk_kda", one), target.with_op("recurrent_kda").run("recurrent_kda", other)
    target.assert_agree(o, r, "chunk_kda against recurrent_kda")
    target.assert_agree(one["initial_state"], other["initial_state"], "states of chunk_kda against recurrent_kda")


def test_chunk_tables_of_engines_are_never_trusted(target: Target, op: str):
    nonsense = torch.full((7, 2), 12345, dtype=torch.int32, device=target.device)
    target.check_prefill(op, prefill_inputs([70, 0, 3], device=target.device), chunk_indices=nonsense, chunk_offsets=nonsense[0])


def test_plan_stands_in_for_the_boundaries(target: Target, op: str):
    call = prefill_inputs([70, 0, 3], device=target.device)
    target.check_prefill(op, call, cu_seqlens=None, plan=plan_prefill(lengths=[70, 0, 3], device=target.device))
