"""Numbers that broke other kernels: equal keys, strong, weak and mixed decay, rounding that piles up (S12, S13)."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import oracle
from conftest import Call, Target
from kdaserve.testing import assert_close, assert_same_bits, prefill_inputs


def hostile(length: int, g: Callable[[Tensor], Tensor], **options) -> Call:
    """Two sequences with log decay `g(zeros)`, every state handed out."""
    call = prefill_inputs([length, 70], gate="none", **options)
    call["g"] = g(torch.zeros_like(call["g"]))
    call["output_intermediate_states"] = True
    return call


def unit(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True)


# Equal and nearly equal keys


def one_row_repeated(length: int, dtype: torch.dtype, device: str, D: int = 128) -> Call:
    """The same query and key at every token, 16 values in turn."""
    generator = torch.Generator().manual_seed(0)
    row, values = torch.randn(D, generator=generator), torch.randn(16, D, generator=generator)
    return {
        "q": row.to(device, dtype).expand(1, length, 1, D),
        "k": row.to(device, dtype).expand(1, length, 1, D),
        "v": values.repeat(length // 16, 1).to(device, dtype).view(1, length, 1, D),
        "g": torch.full((1, length, 1, D), -12.0, dtype=dtype, device=device),
        "beta": torch.full((1, length, 1), 8.0, dtype=dtype, device=device),
        "initial_state": torch.zeros(1, 1, D, D, device=device),
        "initial_state_indices": torch.zeros(1, dtype=torch.int32, device=device),
        "use_qk_l2norm_in_kernel": True,
        "A_log": torch.zeros(1, device=device),
        "dt_bias": torch.zeros(D, device=device),
        "lower_bound": -5.0,
        "beta_is_raw": True,
        "output_intermediate_states": True,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [128, pytest.param(4096, marks=pytest.mark.long)])
def test_one_row_repeated(target: Target, op: str, length: int, dtype: torch.dtype):
    target.check_prefill(op, one_row_repeated(length, dtype, target.device), correlated=True)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("period", [33, 1, 2, 40])
def test_keys_that_come_back(target: Target, op: str, period: int, normed: bool):
    """In both halves of a chunk of 64, and from one to the other."""
    call = prefill_inputs([150, 5, 70], heads=1, k_dim=32, v_dim=32, device=target.device) | {"use_qk_l2norm_in_kernel": normed}
    keys = call["k"] if normed else torch.nn.functional.normalize(call["k"], dim=-1)
    call["k"] = keys[:, torch.arange(keys.shape[1], device=keys.device) % period]
    call["g"] = torch.full_like(call["g"], -6.0)
    call["output_intermediate_states"] = True
    target.check_prefill(op, call, correlated=True)


@pytest.mark.parametrize("cosine", [0.5, 0.7, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("beta", [0.9, 1.0])
def test_keys_at_an_angle(target: Target, op: str, cosine: float, beta: float):
    length = 200
    call = prefill_inputs([length], heads=1, k_dim=32, v_dim=32, gate="none", device=target.device)
    D = call["k"].shape[-1]
    common, own = unit(D), unit(length, D, seed=1)
    own = own - (own @ common)[:, None] * common
    own = own / own.norm(dim=-1, keepdim=True)
    keys = (math.sqrt(cosine) * common + math.sqrt(1 - cosine) * own).float()
    call["k"] = keys.view(1, length, 1, D).to(target.device, call["k"].dtype)
    call["g"] = torch.full_like(call["g"], math.log(0.99))
    call["beta"] = torch.full_like(call["beta"], beta)
    call["output_intermediate_states"] = True
    target.check_prefill(op, call, correlated=cosine == 1.0)


def test_equal_keys_that_nothing_forgets(target: Target, op: str):
    """No decay and beta 1: each token replaces what the key holds, and A is full of ones."""
    call = hostile(130, lambda g: g, device=target.device)
    call["k"] = call["k"][:, :1].expand_as(call["k"])
    call["beta"] = torch.ones_like(call["beta"])
    target.check_prefill(op, call, correlated=True)


def test_keys_that_alternate_in_sign(target: Target, op: str):
    call = hostile(130, lambda g: g - 1e-3, device=target.device)
    signs = torch.ones_like(call["k"])
    signs[:, ::2] = -1
    call["k"] = call["k"][:, :1] * signs
    target.check_prefill(op, call, correlated=True)


# Strong, weak and mixed decay


@pytest.mark.parametrize("decay", [-1e-5, -1e-3, -1.0, -5.0, -20.0, -50.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_decay_everywhere(target: Target, op: str, decay: float, dtype: torch.dtype):
    target.check_prefill(op, hostile(130, lambda g: g + decay, dtype=dtype, device=target.device))


@pytest.mark.parametrize("channels", [[3], [0, 1, 2, 3, 4, 5, 6, 7], [15]], ids=str)
@pytest.mark.parametrize("strong", [-5.0, -50.0])
def test_channels_that_stay_beside_channels_that_vanish(target: Target, op: str, channels: list[int], strong: float):
    def g(zero: Tensor) -> Tensor:
        zero[..., channels] = strong
        return zero

    target.check_prefill(op, hostile(130, g, device=target.device))


def test_strong_decay_at_some_tokens_only(target: Target, op: str):
    """A reset at one token, at each place of a chunk that a block border may stand."""
    for token in (0, 1, 7, 8, 15, 16, 31, 32, 47, 48, 63, 64):

        def g(zero: Tensor, token: int = token) -> Tensor:
            zero -= 1e-3
            zero[:, token] = -50.0
            return zero

        target.check_prefill(op, hostile(70, g, heads=1, device=target.device))


def test_decay_that_switches(target: Target, op: str):
    def g(zero: Tensor) -> Tensor:
        zero[:, :] = -1e-3
        zero[:, :32] = -50.0
        zero[:, 130:162] = -50.0
        return zero

    target.check_prefill(op, hostile(130, g, device=target.device))


def test_decay_drawn_from_extremes(target: Target, op: str):
    levels = torch.tensor([0.0, -1e-6, -1e-2, -1.0, -8.0, -50.0, -300.0])
    generator = torch.Generator().manual_seed(0)

    def g(zero: Tensor) -> Tensor:
        return levels[torch.randint(len(levels), zero.shape, generator=generator)].to(zero)

    target.check_prefill(op, hostile(200, g, v_heads=4, k_dim=32, device=target.device))


@pytest.mark.parametrize("lower_bound", [-5.0, -50.0, None])
def test_extreme_logits(target: Target, op: str, lower_bound: float | None):
    call = prefill_inputs([130, 70], beta_is_raw=True, device=target.device)
    generator = torch.Generator().manual_seed(0)
    levels = torch.tensor([-1e4, -90.0, -12.0, 0.0, 12.0, 90.0, 1e4])
    for name in ("g", "beta"):
        call[name] = levels[torch.randint(len(levels), call[name].shape, generator=generator)].to(call[name])
    target.check_prefill(op, call, lower_bound=lower_bound, output_intermediate_states=True)


@pytest.mark.parametrize("decay", [-20.0, -50.0, -60.0])
def test_strong_decay_is_not_clamped(target: Target, op: str, decay: float):
    """Nothing is written, so that e-20 of the old state is all there is."""
    call = prefill_inputs([1, 1], gate="none", device=target.device)
    call["g"] = torch.full_like(call["g"], decay)
    target.check_prefill(op, call, k=torch.zeros_like(call["k"]))


def test_what_is_left_of_one_write_is_seen_row_by_row(target: Target, op: str):
    """One token writes, the next ones only read e-15, e-30, e-45 of it: across every border a block may have, and across chunks."""
    writers = [0, 1, 7, 8, 15, 16, 31, 32, 47, 62, 63, 64]
    lengths = [w + 5 for w in writers]
    call = prefill_inputs(lengths, heads=1, gate="none", device=target.device)
    ends = call["cu_seqlens"][1:].long()
    call["beta"] = torch.zeros_like(call["beta"])
    call["beta"][:, ends - 5] = 1.0
    call["g"] = torch.full_like(call["g"], -0.01)
    for row in (1, 2, 3, 4):
        call["g"][:, ends - row] = -15.0
    call["initial_state_indices"] = torch.full_like(call["initial_state_indices"], -1)  # from zero
    call["q"] = call["k"][:, ends - 5].repeat_interleave(torch.tensor(lengths, device=target.device), 1)  # of what was written all is read
    expected = oracle.prefill(call).o
    o = target.check_prefill(op, call)
    for row in (1, 2, 3, 4):
        for end, writer in zip((ends - row).tolist(), writers, strict=True):
            target.assert_close(o[:, end], expected[:, end], f"output {5 - row} tokens after a write at token {writer}")


def test_decay_does_not_depend_on_where_a_chunk_starts(target: Target):
    """Strong decay, then weak: state and output after the reset forget what came before it."""
    call = hostile(192, lambda g: g - 1e-3, device=target.device)
    call["g"][:, 100] = -50.0
    other = dict(call, v=call["v"].clone(), initial_state=call["initial_state"].clone())
    other["v"][:, :100] += 100.0
    o, _ = target.run("chunk_kda", call)
    o_other, _ = target.run("chunk_kda", other)
    assert o_other.isfinite().all()
    target.assert_agree(o_other[:, 101:192], o[:, 101:192], "output after the reset")


# Keys and beta at their ends


def test_zero_keys_leave_the_state_to_decay(target: Target, op: str):
    call = hostile(130, lambda g: g - 1e-3, device=target.device)
    call["k"] = torch.zeros_like(call["k"])
    target.check_prefill(op, call)


def test_zero_queries_and_values(target: Target, op: str):
    for name in ("q", "v"):
        call = hostile(130, lambda g: g - 0.1, device=target.device)
        target.check_prefill(op, call | {name: torch.zeros_like(call[name])})


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("decay", [0.0, -1e-3, -5.0])
def test_beta_at_its_ends(target: Target, op: str, beta: float, decay: float):
    call = hostile(64, lambda g: g + decay, device=target.device)
    if beta == 0.0 and decay == -5.0:
        call["g"][..., 1:] = -0.1  # or nothing at all is left to compare
    target.check_prefill(op, call, beta=torch.full_like(call["beta"], beta))


def test_beta_zero_reads_only(target: Target, op: str):
    """Without decay and writes the state keeps its bits."""
    call = hostile(130, lambda g: g, device=target.device)
    before = call["initial_state"].clone()
    target.check_prefill(op, call, beta=torch.zeros_like(call["beta"]))
    assert_same_bits(call["initial_state"], before, "state that nothing writes")


@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_small_and_large_values(target: Target, op: str, size: float):
    call = hostile(130, lambda g: g - 0.1, device=target.device)
    target.check_prefill(op, call, v=size * call["v"], initial_state=size * call["initial_state"])


def test_small_keys_under_the_norm(target: Target, op: str):
    """The 1e-6 of the norm counts: rows of size 1e-3 come out far below length 1."""
    call = hostile(130, lambda g: g - 0.1, device=target.device)
    target.check_prefill(op, call, q=1e-3 * call["q"], k=3e-4 * call["k"])


# Formulas


def test_bounded_gate_is_no_softplus(target: Target, op: str):
    """lower_bound -5, A_log 0, raw 0, no bias: the log decay is -2.5."""
    call = prefill_inputs([1], heads=1, slots=1, device=target.device)
    call |= {"A_log": torch.zeros(1, device=target.device), "dt_bias": None, "lower_bound": -5.0}
    call |= {"g": torch.zeros_like(call["g"]), "beta": torch.zeros_like(call["beta"])}
    before = call["initial_state"].clone()
    target.check_prefill(op, call)
    target.assert_close(call["initial_state"], math.exp(-2.5) * before.double().cpu(), "state after one token")


def test_bounded_gate_is_no_softplus_in_decode(target: Target):
    D, device = 16, target.device
    pool = torch.ones(1, 1, D, D, device=device)
    zeros = torch.zeros(1, 3 * D, device=device), torch.zeros(1, D, device=device), torch.zeros(1, 1, device=device)
    A_log, out, index = torch.zeros(1, device=device), torch.empty(1, 1, 1, D, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    names = ("mixed_qkv", "a", "b", "A_log", "dt_bias", "scale", "initial_state", "out", "ssm_state_indices")
    call = dict(zip(names, (*zeros, A_log, None, None, pool, out, index), strict=True))
    target.run("packed_decode_kda", call, lower_bound=-5.0)
    target.assert_close(pool, torch.full((1, 1, D, D), math.exp(-2.5), dtype=torch.float64), "state after one token")


def check_drift(target: Target, op: str, call: Call, states: dict[int, Tensor], o: Tensor) -> None:
    """States by number of tokens and the output of one long sequence whose decay is the same at every token, as is its rounding.

    Where a kernel multiplies by the decay rounded to float32, 4,096 tokens add up to 4e-5, in bfloat16 to 1e-2 and more.
    """
    exact, row = oracle.prefill(call), target.arithmetic(call["q"].dtype, op)

    def tolerance(tokens: int) -> float:
        return max(row.arithmetic, math.sqrt(tokens) * torch.finfo(torch.float32).eps)  # the pool is rounded at every token, now up, now down

    for tokens, S in states.items():
        assert_close(S.cpu(), exact.states[0][tokens], tolerance(tokens), f"{target}: state after {tokens} tokens")
    wanted = exact.o
    assert_close(o.cpu(), wanted, max(tolerance(o.shape[1]), target.tolerance(wanted, call["q"].dtype, o.dtype, op=op)), f"{target}: output")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.long
def test_long_decode_does_not_drift(target: Target, dtype: torch.dtype):
    """4,096 steps at decay 0.99992: 1e-2 off when the decay or sigmoid(beta) is rounded to bf16."""
    steps, device = 4096, target.device
    tokens = prefill_inputs([steps], heads=1, beta_is_raw=True, dtype=dtype, device=device)
    D = tokens["v"].shape[-1]
    fraction = -math.log(0.99992) / 5
    tokens["g"] = torch.full_like(tokens["g"], math.log(fraction / (1 - fraction)))
    tokens["beta"] = tokens["beta"] - 6  # weak writes, so that the old ones count
    tokens |= {"A_log": torch.zeros(1, device=device), "dt_bias": None, "lower_bound": -5.0, "cu_seqlens": None}
    start, states = tokens["initial_state"].clone(), {}
    pool, slot = tokens["initial_state"], int(tokens["initial_state_indices"][0])
    packed = torch.cat([tokens[name][0].flatten(1) for name in ("q", "k", "v")], 1)
    a, b, outs = tokens["g"][0].flatten(1), tokens["beta"][0], torch.empty(steps, 1, 1, D, dtype=packed.dtype, device=device)
    fixed = {name: tokens[name] for name in ("A_log", "dt_bias", "lower_bound", "initial_state")}
    fixed |= {"scale": None, "use_qk_l2norm_in_kernel": True, "ssm_state_indices": tokens["initial_state_indices"]}
    for t in range(steps):
        rows = {"mixed_qkv": packed[t : t + 1], "a": a[t : t + 1], "b": b[t : t + 1], "out": outs[t : t + 1]}
        target.run("packed_decode_kda", fixed | rows)
        if (t + 1) % 512 == 0:
            states[t + 1] = pool[slot].clone()
    check_drift(target, "packed_decode_kda", tokens | {"initial_state": start}, states, outs[None, :, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.long
def test_long_prefill_does_not_drift(target: Target, op: str, dtype: torch.dtype):
    call = prefill_inputs([4096], heads=1, gate="none", dtype=dtype, device=target.device)
    call["g"] = torch.full_like(call["g"], math.log(0.99992))
    call["beta"] = 0.01 * call["beta"]
    start, slot = call["initial_state"].clone(), int(call["initial_state_indices"][0])
    o = target.run(op, call)
    check_drift(target, op, call | {"initial_state": start}, {4096: call["initial_state"][slot]}, o)
