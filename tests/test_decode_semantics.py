"""Decode against the float64 recurrence, after a prefill, with padding, in strided memory (S1, S2, S8, S14, S17)."""

import pytest
import torch
from torch import Tensor

from conftest import Target
from gpu import alone_with_the_memory
from helpers import DECODE
from kdaserve.testing import assert_same_bits, decode_inputs, prefill_inputs
from test_pool_semantics import spread, with_tail

NAN = float("nan")
ROWS = ("mixed_qkv", "a", "b", "ssm_state_indices")


@pytest.mark.parametrize("lower_bound", [-5.0, -0.5, None])
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gates_and_norm(target: Target, lower_bound: float | None, l2norm: bool, bias: bool):
    call = decode_inputs(5, lower_bound=lower_bound, device=target.device)
    target.check_decode(call, use_qk_l2norm_in_kernel=l2norm, dt_bias=call["dt_bias"] if bias else None)


@pytest.mark.parametrize(
    ("heads", "v_heads", "k_dim", "v_dim"), [(1, 1, 16, 16), (2, 4, 32, 16), (1, 3, 16, 48), (4, 8, 16, 32), (1, 1, 256, 256), (2, 2, 128, 128)]
)
def test_heads_and_dimensions(target: Target, heads: int, v_heads: int, k_dim: int, v_dim: int):
    target.check_decode(decode_inputs(3, heads=heads, v_heads=v_heads, k_dim=k_dim, v_dim=v_dim, device=target.device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_dtypes(target: Target, dtype: torch.dtype, pool_dtype: torch.dtype, lower_bound: float | None):
    target.check_decode(decode_inputs(4, v_heads=4, dtype=dtype, pool_dtype=pool_dtype, lower_bound=lower_bound, device=target.device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gates_in_a_dtype_of_their_own(target: Target, dtype: torch.dtype):
    call = decode_inputs(4, dtype=dtype, device=target.device)
    target.check_decode(call, a=call["a"].float(), b=call["b"].float())


def test_float64_end_to_end(target64: Target):
    call = decode_inputs(4, v_heads=4, dtype=torch.float64, pool_dtype=torch.float64, device=target64.device)
    target64.check_decode(call, A_log=call["A_log"].double(), dt_bias=call["dt_bias"].double())


@pytest.mark.parametrize("scale", [None, 1, -0.5, 0.0])
def test_scale(target: Target, scale: float | None):
    target.check_decode(decode_inputs(3, device=target.device), scale=scale)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("indices", [[-1, 3], [0, 4], [4, 0], [-1, -1], [-9, 0]], ids=str)
def test_slots(target: Target, indices: list[int], dtype: torch.dtype):
    call = decode_inputs(2, slots=5, device=target.device)
    target.check_decode(call, ssm_state_indices=torch.tensor(indices, dtype=dtype, device=target.device))


@pytest.mark.parametrize("batch", [0, 1, 33])
def test_batch_sizes(target: Target, batch: int):
    target.check_decode(decode_inputs(batch, device=target.device))


def test_padding_rows_are_never_read(target: Target):
    call = decode_inputs(6, device=target.device)
    call["ssm_state_indices"][[0, 3, 5]] = -1
    for name in ("mixed_qkv", "a", "b"):
        call[name][[0, 3, 5]] = NAN
    free = [slot for slot in range(8) if slot not in call["ssm_state_indices"].tolist()]
    call["initial_state"][free] = NAN
    out = target.check_decode(call)
    assert out.isfinite().all()


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_named_rows_of_a_strided_pool_change(target: Target, pool_dtype: torch.dtype):
    call = decode_inputs(4, pool_dtype=pool_dtype, device=target.device)
    call["ssm_state_indices"][1] = -1
    buffer, call["initial_state"] = spread(call["initial_state"], gap=21)
    before, rows = buffer.clone(), call["initial_state"].clone()
    target.check_decode(call)
    call["initial_state"].copy_(rows)
    assert_same_bits(buffer, before, f"{target}: bytes between the slots")


def test_slot_beyond_two_to_the_31_elements(target: Target):

    def job() -> None:
        slots, HV, D = 10_924, 12, 128
        buffer = torch.empty(slots, HV, D, D, device=target.device)
        call = decode_inputs(1, heads=HV, k_dim=D, v_dim=D, slots=1, device=target.device)
        buffer[-1] = call["initial_state"][0]
        far = {"initial_state": buffer, "ssm_state_indices": torch.tensor([slots - 1], dtype=torch.int32, device=target.device)}
        far["out"] = torch.empty_like(call["out"])
        target.run("packed_decode_kda", call)
        target.run("packed_decode_kda", call | far)
        assert_same_bits(far["out"], call["out"], "output from slot 10,923")
        assert_same_bits(buffer[-1], call["initial_state"][0], "slot 10,923")

    alone_with_the_memory(job)


def test_strided_rows(target: Target):
    """mixed_qkv, a and b as columns of one projection."""
    call = decode_inputs(4, v_heads=4, device=target.device)
    names = ("b", "mixed_qkv", "a")
    widths = [call[name].shape[1] for name in names]
    packed = torch.full((4, sum(widths) + 5), NAN, device=target.device)
    for name, view in zip(names, packed.split([*widths, 5], -1), strict=False):
        view.copy_(call[name])
        call[name] = view
    target.check_decode(call)


@pytest.mark.parametrize("kind", ["rows of a wider buffer", "first rows", "last dimension strided"])
def test_out_in_a_larger_buffer(target: Target, kind: str):
    call = decode_inputs(4, v_heads=4, device=target.device)
    call["ssm_state_indices"][2] = -1
    buffer = torch.full((6, 3, 4, 48, 2), NAN, device=target.device)
    call["out"] = {
        "rows of a wider buffer": buffer[1:5, 1:2, :, 16:32, 0],
        "first rows": buffer.view(-1)[: call["out"].numel()].view_as(call["out"]),
        "last dimension strided": buffer[:4, :1, :, :16, 1],
    }[kind]
    target.check_decode(call)
    call["out"].fill_(NAN)
    assert buffer.isnan().all(), "elements around `out` were written"


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b", "initial_state"])
def test_a_nan_stays_in_its_request(target: Target, name: str, value: float):
    clean, poisoned = decode_inputs(4, device=target.device), decode_inputs(4, device=target.device)
    slots = clean["ssm_state_indices"].tolist()
    poisoned[name][slots[1] if name == "initial_state" else 1] = value
    target.run("packed_decode_kda", clean)
    target.run("packed_decode_kda", poisoned)
    rows = [0, 2, 3]
    assert_same_bits(poisoned["out"][rows], clean["out"][rows], "the other requests")
    kept = [slot for slot in range(6) if slot != slots[1]]
    assert_same_bits(poisoned["initial_state"][kept], clean["initial_state"][kept], "the other slots")


def test_a_nan_stays_in_its_head(target: Target):
    clean, poisoned = decode_inputs(3, heads=3, device=target.device), decode_inputs(3, heads=3, device=target.device)
    poisoned["b"][1, 2] = NAN
    target.run("packed_decode_kda", clean)
    target.run("packed_decode_kda", poisoned)
    assert poisoned["out"][1, 0, 2].isnan().all()
    assert_same_bits(poisoned["out"][:, :, :2], clean["out"][:, :, :2], "the other heads")
    assert_same_bits(poisoned["initial_state"][:, :2], clean["initial_state"][:, :2], "the other heads' states")


# Decode after prefill


def decode_step(prefill: dict, token: int, indices: Tensor, l2norm: bool = True) -> dict:
    """The decode call that runs row `token` of each batch row of a batched prefill call with raw gates."""
    out = torch.empty_like(prefill["v"][:, :1])
    return {
        "mixed_qkv": torch.cat([prefill[name][:, token].flatten(1) for name in ("q", "k", "v")], 1),
        "a": prefill["g"][:, token].flatten(1),
        "b": prefill["beta"][:, token],
        **{name: prefill.get(name) for name in ("A_log", "dt_bias", "initial_state", "lower_bound")},
        "scale": None,
        "out": out,
        "ssm_state_indices": indices,
        "use_qk_l2norm_in_kernel": l2norm,
    }


@pytest.mark.long
def test_every_length_below_a_chunk_then_one_decode_step(target: Target, op: str):
    """Sequence n has n tokens before the last one; all prefills in one pack, all decode steps in one call."""
    lengths = list(range(1, 64))
    whole = prefill_inputs([n + 1 for n in lengths], v_heads=4, v_dim=32, beta_is_raw=True, device=target.device)
    ends = whole["cu_seqlens"][1:].long()
    head = torch.ones(whole["q"].shape[1], dtype=torch.bool, device=target.device)
    head[ends - 1] = False
    first = whole | {name: whole[name][:, head] for name in ("q", "k", "v", "g", "beta")}
    first["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=target.device)
    first["initial_state"] = whole["initial_state"].clone()
    target.run(op, first)
    last = whole | {name: whole[name][0, ends - 1][:, None] for name in ("q", "k", "v", "g", "beta")}
    step = decode_step(last | {"initial_state": first["initial_state"]}, 0, whole["initial_state_indices"])
    target.with_op(DECODE).check_decode(step)
    o = target.check_prefill(op, whole)
    target.assert_agree(step["out"][:, 0], o[0, ends - 1], "last token decoded against prefilled")
    target.assert_agree(first["initial_state"], whole["initial_state"], "states of the two")


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_prefill_then_decode_is_a_longer_prefill(target: Target, lower_bound: float | None):
    """K != V and a state that is not symmetric: a transposed state shows."""
    tokens, steps = 66, 5
    whole = prefill_inputs([tokens + steps] * 3, batched=True, v_heads=4, k_dim=32, v_dim=16, beta_is_raw=True, device=target.device)
    whole["lower_bound"] = lower_bound
    pool = whole["initial_state"].clone()
    start = whole | {name: whole[name][:, :tokens].contiguous() for name in ("q", "k", "v", "g", "beta")} | {"initial_state": pool}
    target.run("chunk_kda", start)
    decoded = []
    for token in range(tokens, tokens + steps):
        step = decode_step(whole | {"initial_state": pool}, token, whole["initial_state_indices"])
        decoded.append(target.with_op(DECODE).check_decode(step))
    o = target.run("chunk_kda", whole)
    target.assert_agree(torch.cat(decoded, 1), o[:, tokens:], "decoded tokens")
    target.assert_agree(pool, whole["initial_state"], "pool after decoding")


def test_square_state_is_not_transposed(target: Target):
    """With K = V a mistaken layout has the right shape: a state of one entry off the diagonal tells."""
    call = decode_inputs(1, heads=1, slots=1, device=target.device)
    call["initial_state"].zero_()
    call["initial_state"][0, 0, 3, 7] = 1.0  # [V, K]
    call["mixed_qkv"].zero_()
    call["mixed_qkv"][0, 7] = 1.0  # q reads key channel 7
    call |= {"use_qk_l2norm_in_kernel": False, "scale": 1.0, "a": torch.full_like(call["a"], -1e4), "lower_bound": -5.0}
    out, _ = target.run("packed_decode_kda", call)
    wanted = torch.zeros(1, 1, 1, 16, device=target.device)
    wanted[..., 3] = 1.0
    assert_same_bits(out, wanted, "the value that key channel 7 holds")


def test_decode_equals_recurrent_of_one_token(target: Target):
    tokens = prefill_inputs([1] * 5, batched=True, v_heads=4, beta_is_raw=True, device=target.device)
    step = decode_step(tokens | {"initial_state": tokens["initial_state"].clone()}, 0, tokens["initial_state_indices"])
    target.check_decode(step)
    o = target.check_prefill("recurrent_kda", tokens)
    target.assert_agree(step["out"], o, "decode against recurrent_kda")


def test_nothing_is_remembered_of_a_tensor(target: Target):
    call = decode_inputs(3, slots=8, device=target.device)
    for slots in ([0, 1, 2], [7, -1, 3], [-1, 0, -1]):
        call["ssm_state_indices"].copy_(torch.tensor(slots))
        target.check_decode(call)


@pytest.mark.parametrize("batch", [4, 8])
def test_a_larger_captured_batch_gives_the_same_bits(target: Target, batch: int):
    """A step padded to a graph's batch size against the step alone."""
    call = decode_inputs(3, device=target.device)
    padded = {name: torch.cat([call[name], call[name].new_full((batch - 3, *call[name].shape[1:]), -1)]) for name in ROWS}
    for name in ("mixed_qkv", "a", "b"):
        padded[name] = with_tail(call[name][None], batch - 3)[0]
    padded |= {"out": torch.full((batch, 1, 2, 16), NAN, device=target.device), "initial_state": call["initial_state"].clone()}
    padded = call | padded
    target.check_decode(call)
    target.check_decode(padded)
    target.assert_same(padded["out"][:3], call["out"], "outputs beside padding")
    target.assert_same(padded["initial_state"], call["initial_state"], "pool beside padding")
