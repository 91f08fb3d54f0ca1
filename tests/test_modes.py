"""What surrounds a call changes nothing in it: modes and defaults of PyTorch, earlier calls, threads."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kdaserve
from conftest import Call, Target
from helpers import DECODE, LENGTHS, NAN, OPS, call_of, refused
from kdaserve import PoolError, Snapshots, StatePool, contract, plan_prefill
from kdaserve.nn import KimiDeltaAttention, LayerState
from kdaserve.testing import assert_close, assert_same_bits, decode_inputs, load_call, prefill_inputs, save_call, verify_call
from kdaserve.testing.cases import CPU_PREFILL, PrefillCase


def results(target: Target, op: str, call: Call, **changes: Any) -> dict[str, Tensor]:
    """All that a call gives, on copies of what it writes; `h` and a snapshot of the longest sequence among it."""
    own = call | changes
    own |= {name: own[name].clone() for name in ("initial_state", "out") if own.get(name) is not None}
    if op == DECODE:
        out, pool = target.run(op, own)
        return {"output": out, "pool": pool}
    slots = own["initial_state_indices"].tolist()
    spare = next(slot for slot in range(len(own["initial_state"])) if slot not in slots)
    device = own["q"].device
    own |= {"output_intermediate_states": True, "snapshots": Snapshots([3], [64], [spare])}
    own |= {
        "track_state": torch.zeros(4, *own["initial_state"].shape[1:], device=device, dtype=torch.float32),
        "track_chunk_idx": torch.tensor([1, -1, 0, 2], device=device),
    }
    o, h = target.run(op, own)
    return {"output": o, "h": h, "pool": own["initial_state"], "track_state": own["track_state"]}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        assert_same_bits(x, expected[name], f"{name} {what}")


# S7: no earlier call matters, in whatever mode it was


def learnt(call: Call, names: tuple[str, ...] = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")) -> Call:
    return {name: call[name].detach().clone().requires_grad_() for name in names}


def gradients(run: Callable[..., Tensor], leaves: Call) -> dict[str, Tensor]:
    o = run(**leaves)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(0)).to(o)
    return dict(zip(leaves, torch.autograd.grad((o * weight).sum(), leaves.values()), strict=True))


@pytest.mark.parametrize("shared", [None, "inside", "outside"])
def test_gradients_after_a_call_in_inference_mode(learner: Target, op: str, shared: str | None):
    """Of the same lengths, with one plan for both calls or none: nothing that the first leaves behind is an inference tensor."""
    call = prefill_inputs([71, 6, 0, 129], device=learner.device)
    plan = plan_prefill(lengths=[71, 6, 0, 129], device=learner.device) if shared == "outside" else None
    with torch.inference_mode():
        plan = plan_prefill(lengths=[71, 6, 0, 129], device=learner.device) if shared == "inside" else plan
        learner.run(op, call, initial_state=call["initial_state"].clone(), plan=plan)

    def run(**leaves: Tensor) -> Tensor:
        return learner.run(op, call, **leaves, initial_state=call["initial_state"].clone(), plan=plan)

    found = gradients(run, learnt(call))
    fresh = gradients(lambda **leaves: learner.run(op, call, **leaves, initial_state=call["initial_state"].clone()), learnt(call))
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}
    judge = Target("reference", learner.device)
    judged = gradients(lambda **leaves: judge.run(op, wide, **leaves, initial_state=wide["initial_state"].clone()), learnt(wide))
    for name, gradient in found.items():
        assert_same_bits(gradient, fresh[name], f"{op}: gradient of {name} against a call without a plan")
        assert_close(gradient, judged[name], 1e-4, f"{op}: gradient of {name}")


def test_a_layer_learns_after_it_served_in_inference_mode():
    torch.manual_seed(0)
    layer = KimiDeltaAttention(32, num_heads=2, head_dim=16)
    pool, x = StatePool(3, layers=1, **layer.state_sizes()), torch.randn(1, 76, 32)
    with torch.inference_mode():
        plan = plan_prefill(lengths=[71, 5])
        served = layer.prefill(x, LayerState.of(pool, 0), torch.tensor([0, 2]), plan)
    pool = StatePool(3, layers=1, **layer.state_sizes())
    y = layer.prefill(x, LayerState.of(pool, 0), torch.tensor([0, 2]), plan)
    assert y.requires_grad
    assert_close(y.detach(), served.clone(), 1e-6, "output while autograd records")
    y.sum().backward()
    layer(x[:, :71]).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_a_plan_made_in_inference_mode_is_an_ordinary_one(device: str):
    with torch.inference_mode():
        plans = plan_prefill(lengths=LENGTHS, device=device), plan_prefill(torch.tensor([0, *accumulate(LENGTHS)], device=device))
        plans[0].schedule(64, 4)
    for plan in plans:
        tables = [plan.cu_seqlens, plan.chunk_offsets, plan.chunk_indices]
        tables += [table for group in plan.schedule(64, 4) for block in group.blocks for table in (block.rows, block.valid) if table is not None]
        assert not any(table.is_inference() for table in tables)


@pytest.mark.parametrize("every_op", OPS)
def test_autograd_knows_what_a_call_has_written(target: Target, every_op: str):
    """A product before the call kept the pool for its gradient: that is refused, not made of the new pool."""
    call = call_of(every_op, device=target.device)
    weight = torch.ones(1, device=target.device, requires_grad=True)
    product = (weight * call["initial_state"]).sum()
    target.run(every_op, call)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("table", ["cu_seqlens", "chunk_offsets", "chunk_indices", "schedule"])
def test_a_mutated_plan_does_not_reach_the_next_step(target: Target, op: str, table: str):
    call = call_of(op, target.device)
    expected = results(target, op, call)
    plan = plan_prefill(lengths=LENGTHS, device=target.device)
    results(target, op, call, plan=plan)
    mutable = (
        [getattr(plan, table)]
        if table != "schedule"
        else [block.rows for kept in plan._schedules.values() for group in kept for block in group.blocks]
    )
    for tensor in mutable:
        tensor.zero_()
    later = plan_prefill(lengths=LENGTHS, device=target.device)
    assert_same(results(target, op, call, plan=later), expected, "with a later plan")
    assert_same(results(target, op, call), expected, "without a plan")


# S12 and defaults


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_no_bit(target: Target, op: str, dtype: torch.dtype):
    call = call_of(op, target.device)
    expected = results(target, op, call)
    with torch.autocast(target.device, dtype=dtype):
        assert_same(results(target, op, call), expected, "under autocast")
        assert torch.is_autocast_enabled(target.device), "autocast is the caller's"
        a = torch.ones(2, 2, device=target.device)
        assert (a @ a).dtype == dtype


def test_autocast_around_a_call_changes_no_gradient(learner: Target, op: str):
    """PyTorch wants the backward pass outside of autocast."""
    call = prefill_inputs([70, 5], device=learner.device)

    def run(**leaves: Tensor) -> Tensor:
        return learner.run(op, call, **leaves, initial_state=call["initial_state"].clone())

    def run_under_autocast(**leaves: Tensor) -> Tensor:
        with torch.autocast(learner.device, dtype=torch.bfloat16):
            return run(**leaves)

    assert_same(gradients(run_under_autocast, learnt(call)), gradients(run, learnt(call)), "gradient after autocast")


@pytest.fixture(params=["meta device", "float64", "float16", "deterministic", "anomaly", "no_grad", "inference_mode"])
def surroundings(request: pytest.FixtureRequest) -> Iterator[str]:
    """A mode or default of PyTorch that is none of a call's business. Inputs are made before it is entered."""
    if request.param == "meta device":
        torch.set_default_device("meta")
    elif request.param in ("float64", "float16"):
        torch.set_default_dtype(getattr(torch, request.param))
    elif request.param == "deterministic":
        torch.use_deterministic_algorithms(True)
    try:
        yield request.param
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def entered(surroundings: str) -> Any:
    """Those among them that are context managers."""
    made = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "anomaly": lambda: torch.autograd.set_detect_anomaly(True)}
    return made.get(surroundings, torch.enable_grad)()


EXPECTED: dict[tuple[Target, str], tuple[Call, dict[str, Tensor]]] = {}


@pytest.fixture
def undisturbed(target: Target, every_op: str) -> tuple[Call, dict[str, Tensor]]:
    """A call and its results, made in plain surroundings."""
    key = target, every_op
    if key not in EXPECTED:
        call = call_of(every_op, target.device)
        EXPECTED[key] = call, results(target, every_op, call)
    return EXPECTED[key]


def test_surroundings_change_no_bit(target: Target, every_op: str, undisturbed: tuple[Call, dict[str, Tensor]], surroundings: str):
    call, expected = undisturbed
    with entered(surroundings):
        plan = {} if every_op == DECODE else {"plan": plan_prefill(lengths=LENGTHS, device=target.device)}
        found = [results(target, every_op, call, **changes) for changes in ({}, plan)]
    for actual in found:
        assert actual.keys() == expected.keys()
        for name, x in actual.items():
            assert x.device.type == target.device, name
            assert_same_bits(x.clone(), expected[name], f"{name} under {surroundings}")


def test_tools_work_in_any_surroundings(
    tmp_path: Path, undisturbed: tuple[Call, dict[str, Tensor]], target: Target, every_op: str, surroundings: str
):
    """Verifying, saving and loading a call; slots of a pool; lists of indices."""
    call, _ = undisturbed
    within = 1e-3 if target.usual == torch.float32 else 2e-2
    with entered(surroundings):
        assert verify_call(every_op, call, target.backend).output < within
        _, loaded = load_call(save_call(tmp_path / "call", every_op, call))
        assert {x.device.type for x in loaded.values() if isinstance(x, Tensor)} == {"cpu"}
        there = {name: x.to(target.device) if isinstance(x, Tensor) else x for name, x in loaded.items()}
        assert verify_call(every_op, there, target.backend).state < within
        pool = StatePool(2, 1, v_heads=2, k_dim=16, v_dim=16)
        assert pool.recurrent(0).dtype == torch.float32
        assert pool.recurrent(0).device.type == "cpu"
        pool.fork(pool.allocate())
        assert Snapshots([0], [64], [5]).rows() == [(0, 64, 5)]
        assert plan_prefill(lengths=[70]).cu_seqlens.device.type == "cpu"


# Pools


SIZES = {"v_heads": 2, "k_dim": 16, "v_dim": 16}


def test_a_pool_made_in_inference_mode_works_outside(op: str):
    call, step = prefill_inputs([70, 5]), decode_inputs(2)
    with torch.inference_mode():
        pool = StatePool(4, 2, **SIZES, conv_channels=3)
        first = pool.allocate()
    second = pool.fork(first)
    slots = torch.tensor([first, second])
    view = {"initial_state": pool.recurrent(1)}
    getattr(kdaserve, op)(**call | view | {"initial_state_indices": slots})
    kdaserve.packed_decode_kda(**step | view | {"ssm_state_indices": slots})
    pool.copy(first, second)
    assert_same_bits(pool.recurrent(1)[second], pool.recurrent(1)[first], "a copy")
    pool.free(first)
    assert pool.allocate() == first
    assert not pool.recurrent(1)[first].any()
    assert pool.recurrent(1)[second].any()
    getattr(kdaserve, op)(**call | {"initial_state": pool.recurrent(0).clone(), "initial_state_indices": slots, "q": call["q"].requires_grad_()})


class Unwritable:
    """Stands in for memory that cannot be written."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, slot: Any) -> Tensor:
        return self.tensor[slot]

    def __setitem__(self, slot: Any, value: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("part", ["_recurrent", "_conv"])
@pytest.mark.parametrize("operation", ["allocate", "fork"])
def test_a_failure_leaks_no_slot(part: str, operation: str, monkeypatch: pytest.MonkeyPatch):
    pool = StatePool(3, 2, **SIZES, conv_channels=3)
    held = pool.allocate()
    with monkeypatch.context() as failing:
        failing.setattr(pool, part, Unwritable(getattr(pool, part)))
        for _ in range(4):
            with pytest.raises(RuntimeError, match="illegal memory"):
                pool.allocate() if operation == "allocate" else pool.fork(held)
            assert pool._free == [1, 2]
    assert pool.free_slots == 2
    with pytest.raises(PoolError, match="KDA128"):
        pool.free(1)
    assert [pool.allocate(), pool.fork(held)] == [1, 2]
    for layer in range(2):
        assert not pool.recurrent(layer).any()
        assert not pool.conv(layer).any()


NO_SLOTS = [
    0.0,
    1.0,
    True,
    False,
    np.int64(0),
    np.int32(1),
    np.float64(0),
    np.array(0),
    np.array([0, 1]),
    torch.tensor(0),
    torch.tensor([1]),
    NAN,
    0j,
    [0],
    (0,),
    "0",
    None,
]


@pytest.mark.parametrize("slot", NO_SLOTS, ids=lambda slot: f"{type(slot).__name__} {slot}")
def test_what_equals_a_slot_is_none(slot: Any):
    pool = StatePool(4, 1, **SIZES)
    held = [pool.allocate(), pool.allocate()]
    pool.recurrent(0).fill_(3.0)
    for wrong in (lambda: pool.free(slot), lambda: pool.fork(slot), lambda: pool.copy(slot, 1), lambda: pool.copy(1, slot)):
        with pytest.raises(PoolError, match="KDA128"):
            wrong()
        assert pool.free_slots == 2
    assert (pool.recurrent(0) == 3.0).all()
    for one in held:
        pool.free(one)


def test_a_pool_without_slots_serves_padding(target: Target, op: str):
    call = prefill_inputs([70, 5], slots=2, device=target.device)
    call |= {"initial_state": call["initial_state"][:0], "initial_state_indices": torch.tensor([-1, -7], device=target.device)}
    target.check_prefill(op, call, output_intermediate_states=True)
    named = torch.tensor([-1, 0], device=target.device)
    assert "`initial_state_indices`[1]" in refused(op, call | {"initial_state_indices": named, "check": "values"}, "KDA301")


@pytest.mark.parametrize("batch", [0, 2])
def test_a_pool_without_slots_serves_padding_in_decode(target: Target, batch: int):
    call = decode_inputs(batch, slots=batch, device=target.device)
    call |= {"initial_state": call["initial_state"][:0], "ssm_state_indices": torch.full((batch,), -1, device=target.device)}
    target.check_decode(call)


# Many, failing, at once


@pytest.mark.long
def test_thousands_of_sequences_of_one_token(bitwise_target: Target, op: str):
    call = prefill_inputs([1] * 3000, heads=1, device=bitwise_target.device)
    bitwise_target.check_prefill(op, call)


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"


@pytest.mark.parametrize("every_op", OPS)
@pytest.mark.parametrize("autocast", [False, True])
def test_want_of_memory_is_said_as_pytorch_says_it(every_op: str, autocast: bool, monkeypatch: pytest.MonkeyPatch):
    failure = RuntimeError(ALLOCATOR)

    def run(call: Any) -> Any:
        raise failure

    monkeypatch.setattr(importlib.import_module(f"kdaserve.ops.{every_op}.torch"), "run", run)
    with torch.autocast("cpu", enabled=autocast), pytest.raises(RuntimeError) as caught:
        getattr(kdaserve, every_op)(**call_of(every_op))
    assert caught.value is failure


def at_once(jobs: list[Callable[[], Any]]) -> list[Any]:
    """The results of jobs that start together, one thread each."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        barrier.wait(timeout=600)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(timeout=600) for future in [pool.submit(run, job) for job in jobs]]


@pytest.mark.parametrize(("every_op", "shared_plan"), [*((op, False) for op in OPS), ("chunk_kda", True), ("recurrent_kda", True)])
def test_two_threads_on_two_pools(target: Target, every_op: str, shared_plan: bool):
    """Layouts that nothing remembers yet, a schedule that no one has made yet: both threads meet them at once."""
    lengths = [70, 0, 5, 3]
    calls = [
        decode_inputs(3, **made) if every_op == DECODE else prefill_inputs(lengths, **made)
        for made in ({"seed": i, "device": target.device} for i in (0, 1))
    ]
    rounds = 3 if target.backend == "reference" or target.interpreted else 10

    def job(call: Call, plans: list[Any]) -> Callable[[], list[tuple[Tensor, Tensor]]]:
        def run() -> list[tuple[Tensor, Tensor]]:
            found = []
            for plan in plans:
                own = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
                result = target.run(every_op, own | ({} if plan is None else {"plan": plan}))
                found.append((result[0] if every_op == DECODE else result, own["initial_state"]))
            return found

        return run

    plans = [plan_prefill(lengths=lengths, device=target.device) if shared_plan else None for _ in range(rounds)]
    contract._remembered.clear()
    found = at_once([job(call, plans) for call in calls])
    for call, actual in zip(calls, found, strict=True):
        (expected,) = job(call, [None])()
        for o, pool in actual:
            assert_same_bits(o, expected[0], "output beside another thread")
            assert_same_bits(pool, expected[1], "pool beside another thread")


def test_two_threads_share_a_state_pool():
    """Each on slots of its own, as two engines on one pool might."""
    pool = StatePool(4, 1, **SIZES)
    calls = [prefill_inputs([70, 5], seed=i) for i in range(2)]
    slots = [[pool.allocate(), pool.allocate()] for _ in calls]
    jobs = [
        lambda call=call, own=own: kdaserve.chunk_kda(**call | {"initial_state": pool.recurrent(0), "initial_state_indices": torch.tensor(own)})
        for call, own in zip(calls, slots, strict=True)
    ]
    for call, own, o in zip(calls, slots, at_once(jobs), strict=True):
        alone = torch.zeros(4, 2, 16, 16)
        expected = kdaserve.chunk_kda(**call | {"initial_state": alone, "initial_state_indices": torch.tensor(own)})
        assert_same_bits(o, expected, f"output of slots {own}")
        assert_same_bits(pool.recurrent(0)[own], alone[own], f"states in slots {own}")


# Named cases


@pytest.mark.parametrize("case", CPU_PREFILL, ids=lambda case: case.name)
def test_named_cases_verify(case: PrefillCase):
    found = verify_call("chunk_kda", case.inputs())
    assert found.backend == "torch"
    assert max(found.output, found.state) < 1e-4
