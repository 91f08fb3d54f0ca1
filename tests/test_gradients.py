"""Gradients of the differentiable backends against autograd through the recurrence."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from conftest import Call, Target
from kdaserve import ContractError, plan_prefill
from kdaserve.testing import assert_close, assert_same_bits, decode_inputs, prefill_inputs

GATES = ("bounded", "softplus", "none")
LEARNT = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
LEARNT_IN_DECODE = ("mixed_qkv", "a", "b", "A_log", "dt_bias", "initial_state")


def leaves(call: Call, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: call[name].detach().clone().requires_grad_() for name in names if isinstance(call.get(name), Tensor)}


def prefill(target: Target, op: str, call: Call) -> Callable[..., tuple[Tensor, Tensor]]:
    """Output and pool after the call as a function of the learnt tensors."""

    def function(**learnt: Tensor) -> tuple[Tensor, Tensor]:
        pool = learnt["initial_state"].clone()
        o = target.run(op, call | learnt | {"initial_state": pool})
        return o, pool

    return function


def decode(target: Target, call: Call) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(**learnt: Tensor) -> tuple[Tensor, Tensor]:
        pool = learnt["initial_state"].clone()
        return target.run("packed_decode_kda", call | learnt | {"initial_state": pool, "out": torch.zeros_like(call["out"])})

    return function


def gradients(function: Callable[..., tuple[Tensor, ...]], learnt: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a fixed random functional of all results."""
    generator, total = torch.Generator().manual_seed(0), 0
    for x in function(**learnt):
        total = total + (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)).sum()
    return dict(zip(learnt, torch.autograd.grad(total, learnt.values()), strict=True))


def doubled(call: Call) -> Call:
    return {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}


def compare(make: Callable[[Target, Call], Callable[..., tuple[Tensor, Tensor]]], target: Target, call: Call, names: tuple[str, ...]) -> None:
    """The gradients of `target` in float32 against those of the reference in float64."""
    actual = gradients(make(target, call), leaves(call, names))
    wide = doubled(call)
    expected = gradients(make(Target("reference", target.device), wide), leaves(wide, names))
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        assert gradient.isfinite().all(), f"{target}: gradient of {name} is not finite"
        assert_close(gradient, expected[name], 1e-4, f"{target}: gradient of {name}")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("beta_is_raw", [False, True])
def test_prefill_in_float32(learner: Target, op: str, gate: str, beta_is_raw: bool):
    call = prefill_inputs([130, 0, 3, 64], v_heads=4, k_dim=16, v_dim=32, gate=gate, beta_is_raw=beta_is_raw, device=learner.device)
    compare(lambda target, c: prefill(target, op, c), learner, call, LEARNT)


def test_prefill_with_a_padding_sequence_and_rows(learner: Target, op: str):
    call = prefill_inputs([70, 5, 66], device=learner.device)
    call["initial_state_indices"][1] = -1
    call["cu_seqlens"][-1] -= 10
    compare(lambda target, c: prefill(target, op, c), learner, call, LEARNT)


def test_batched_prefill(learner: Target, op: str):
    call = prefill_inputs([70, 70], batched=True, gate="softplus", device=learner.device)
    compare(lambda target, c: prefill(target, op, c), learner, call, LEARNT)


def test_long_prefill(learner: Target):
    call = prefill_inputs([450], heads=1, k_dim=32, v_dim=32, device=learner.device)
    compare(lambda target, c: prefill(target, "chunk_kda", c), learner, call, LEARNT)


@pytest.mark.parametrize("decay", [-50.0, -5.0, -1e-5, 0.0])
def test_strong_and_weak_decay(learner: Target, op: str, decay: float):
    """Gradients of a masked or vanished term must be zero, not NaN."""
    call = prefill_inputs([70, 3], gate="none", device=learner.device)
    call["g"] = torch.full_like(call["g"], decay)
    call["g"][..., 0] = -0.1
    names = tuple(name for name in LEARNT if name != "initial_state") if decay == -50.0 else LEARNT
    names = tuple(name for name in names if name in call)

    def with_pool(target: Target, c: Call) -> Callable[..., tuple[Tensor, Tensor]]:
        function = prefill(target, op, c)
        return lambda **learnt: function(**{"initial_state": c["initial_state"], **learnt})

    compare(with_pool, learner, call, names)


def test_equal_and_zero_keys(learner: Target, op: str):
    call = prefill_inputs([70, 3], device=learner.device)
    call["k"][:, 1:40] = call["k"][:, :1]
    call["k"][:, 40:50] = 0
    compare(lambda target, c: prefill(target, op, c), learner, call, LEARNT)


def test_a_plan_made_in_inference_mode_serves_a_recorded_call(learner: Target, op: str):
    """As does one that an inference call used before."""
    call = prefill_inputs([70, 5], device=learner.device)
    with torch.inference_mode():
        plan = plan_prefill(lengths=[70, 5], device=learner.device)
        learner.run(op, call | {"initial_state": call["initial_state"].clone(), "plan": plan})
    compare(lambda target, c: prefill(target, op, c | {"plan": plan}), learner, call, LEARNT)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_decode_in_float32(learner: Target, lower_bound: float | None):
    call = decode_inputs(4, v_heads=4, v_dim=32, lower_bound=lower_bound, device=learner.device)
    call["ssm_state_indices"][2] = -1
    compare(decode, learner, call, LEARNT_IN_DECODE)


# Finite differences: a judge of its own


def check_by_differences(function: Callable[..., tuple[Tensor, ...]], learnt: dict[str, Tensor]) -> None:
    def positional(*tensors: Tensor) -> tuple[Tensor, ...]:
        return function(**dict(zip(learnt, tensors, strict=True)))

    assert torch.autograd.gradcheck(positional, tuple(learnt.values()), fast_mode=True)


@pytest.mark.parametrize("gate", GATES)
def test_prefill_by_differences(learner: Target, op: str, gate: str):
    call = doubled(prefill_inputs([66, 0, 3], v_heads=2, heads=1, gate=gate, beta_is_raw=True, slots=3, device=learner.device))
    check_by_differences(prefill(learner, op, call), leaves(call, LEARNT))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_decode_by_differences(learner: Target, lower_bound: float | None):
    call = doubled(decode_inputs(2, heads=1, v_heads=2, lower_bound=lower_bound, device=learner.device))
    check_by_differences(decode(learner, call), leaves(call, LEARNT_IN_DECODE))


# In place and autograd


def test_gradient_reaches_untouched_slots_unchanged(learner: Target, op: str):
    call = prefill_inputs([5], slots=3, device=learner.device)
    call["initial_state_indices"] = torch.tensor([1], device=learner.device)
    learnt = leaves(call, LEARNT)
    _, pool = prefill(learner, op, call)(**learnt)
    pool[[0, 2]].sum().backward()
    ones = torch.ones_like(pool[:2])
    assert_same_bits(learnt["initial_state"].grad[[0, 2]], ones, "gradient of slots that no one named")
    grad = learnt["q"].grad
    assert grad is None or not grad.any()


@pytest.mark.parametrize("name", ["initial_state", "out", "track_state"])
def test_a_leaf_is_not_written(learner: Target, op: str, name: str):
    call = prefill_inputs([5], device=learner.device)
    call["out"] = torch.zeros_like(call["v"])
    call |= {"track_state": torch.zeros(1, 2, 16, 16, device=learner.device), "track_chunk_idx": call["initial_state_indices"] * 0}
    call[name].requires_grad_()
    before = call[name].detach().clone()
    with pytest.raises(ContractError, match=f"KDA122.*`{name}`"):
        learner.run(op, call)
    assert_same_bits(call[name].detach(), before, f"{name} after the refusal")
    with torch.no_grad():
        learner.run(op, call)
    assert not torch.equal(call[name].detach(), before), f"{name} under no_grad"


@pytest.mark.parametrize("name", ["initial_state", "out"])
def test_a_leaf_is_not_written_by_decode(learner: Target, name: str):
    call = decode_inputs(2, device=learner.device)
    call[name].requires_grad_()
    before = call[name].detach().clone()
    with pytest.raises(ContractError, match=f"KDA122.*`{name}`"):
        learner.run("packed_decode_kda", call)
    assert_same_bits(call[name].detach(), before, f"{name} after the refusal")


def test_nothing_is_recorded_without_gradients(target: Target, op: str):
    call = prefill_inputs([70], device=target.device)
    assert not target.run(op, call).requires_grad
    call["q"].requires_grad_()
    with torch.no_grad():
        assert not target.run(op, call).requires_grad
