"""What a call must refuse whatever else is right about it: memory it may not write, tensors and numbers of another kind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kdaserve
from conftest import Call
from helpers import DECODE, LENGTHS, OPS, call_of, refused
from kdaserve import ContractError, Snapshots, contract, plan_prefill
from kdaserve.testing import decode_inputs, prefill_inputs

# What may be written


def view_of(leaf: Tensor) -> Tensor:
    return leaf[:]


def view_of_a_view(leaf: Tensor) -> Tensor:
    return leaf[:].view_as(leaf)


def view_made_without_gradients(leaf: Tensor) -> Tensor:
    with torch.no_grad():
        return leaf[:]


def view_made_in_inference_mode(leaf: Tensor) -> Tensor:
    with torch.inference_mode():
        return leaf[:]


VIEWS = [view_of, view_of_a_view, view_made_without_gradients, view_made_in_inference_mode]


@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("every_op", "name"), [(op, name) for op in OPS for name in ("initial_state", "out", "track_state") if op != DECODE or name != "track_state"]
)
def test_views_of_leaves_are_not_written(every_op: str, name: str, view: Callable[[Tensor], Tensor]):
    call = call_of(every_op)
    call.setdefault("out", torch.zeros_like(call["v"]) if every_op != DECODE else None)
    if every_op != DECODE:
        call |= {"track_state": torch.zeros(4, 2, 16, 16), "track_chunk_idx": torch.tensor([0, -1, 0, 2])}
    leaf = call[name].clone().requires_grad_()
    assert f"`{name}`" in refused(every_op, call | {name: view(leaf)}, "KDA122")
    with torch.no_grad():
        getattr(kdaserve, every_op)(**call | {name: leaf.detach()})
    getattr(kdaserve, every_op)(**call | {name: view_of(leaf.clone())})


def one_of_many_views(pool: Tensor) -> Tensor:
    return torch.stack([pool, pool], 1).unbind(1)[1]


def one_of_two_halves(pool: Tensor) -> Tensor:
    return torch.cat([pool, pool]).split(len(pool))[0]


def made_without_gradients(pool: Tensor) -> Tensor:
    whole = pool.clone()
    with torch.no_grad():
        return whole[:]


@pytest.mark.parametrize("make", [one_of_many_views, one_of_two_halves, made_without_gradients], ids=lambda f: f.__name__)
@pytest.mark.parametrize("every_op", OPS)
@pytest.mark.parametrize("name", ["initial_state", "out"])
def test_views_that_autograd_does_not_let_us_write(every_op: str, name: str, make: Callable[[Tensor], Tensor]):
    """A layer's pool from `unbind`, say: fine while nothing is recorded, else refused as KDA122, never a fault of ours."""
    call = call_of(every_op)
    call.setdefault("out", torch.zeros_like(call["v"]) if every_op != DECODE else None)
    with torch.no_grad():
        getattr(kdaserve, every_op)(**call | {name: make(call[name])})
    getattr(kdaserve, every_op)(**call | {name: make(call[name])})
    call["A_log"].requires_grad_()
    refused(every_op, call | {name: make(call[name])}, "KDA122")


def shared(*shapes: tuple[int, ...], shift: int = 0) -> list[Tensor]:
    """Tensors over one memory, each beginning `shift` elements after the one before."""
    sizes = [torch.Size(shape).numel() + i * shift for i, shape in enumerate(shapes)]
    memory = torch.randn(max(sizes), generator=torch.Generator().manual_seed(0)) * 0.1
    return [memory[i * shift : sizes[i]].view(shape) for i, shape in enumerate(shapes)]


def overlapping(op: str, which: str) -> Call:
    """A call of which one tensor to be written lies over another tensor."""
    call = prefill_inputs([40, 24], slots=4) | {"initial_state_indices": torch.tensor([0, 2])}
    shapes = {name: tuple(x.shape) for name, x in call.items() if isinstance(x, Tensor)}
    tracked, out = (2, 2, 16, 16), shapes["v"]
    if which == "out over track_state":
        track_state, out = shared(tracked, out, shift=5)
        return call | {"track_state": track_state, "track_chunk_idx": torch.tensor([0, -1]), "out": out}
    if which == "track_state over the pool":
        return call | {"track_state": call["initial_state"][1:3], "track_chunk_idx": torch.tensor([0, -1])}
    if which == "v over a slot":
        call = prefill_inputs([10, 6], slots=4) | {"initial_state_indices": torch.tensor([0, 2])}
        return call | {"v": call["initial_state"][2].view(-1)[: call["v"].numel()].view(call["v"].shape)}
    if which == "v over a slot that no one named":
        call = prefill_inputs([10, 6], slots=4) | {"initial_state_indices": torch.tensor([0, 2])}
        return call | {"v": call["initial_state"][1].view(-1)[: call["v"].numel()].view(call["v"].shape)}
    if which == "pool over g":
        pool, g = shared(shapes["initial_state"], shapes["g"])
        return call | {"initial_state": pool, "g": g}
    memory = torch.zeros(out_size := torch.Size(out).numel())
    if which == "out over cu_seqlens":
        bounds = memory[out_size - 4 :].view(torch.int32)[1:]
        bounds.copy_(call["cu_seqlens"])
        return call | {"cu_seqlens": bounds, "out": memory.view(out)}
    assert which == "out over dt_bias"
    memory[7 : 7 + 32] = call["dt_bias"]
    return call | {"dt_bias": memory[7 : 7 + 32], "out": memory.view(out)}


OVERLAPS = {
    "out over track_state": ("out", "track_state"),
    "track_state over the pool": ("track_state", "initial_state"),
    "v over a slot": ("initial_state", "v"),
    "v over a slot that no one named": ("initial_state", "v"),
    "pool over g": ("initial_state", "g"),
    "out over cu_seqlens": ("out", "cu_seqlens"),
    "out over dt_bias": ("out", "dt_bias"),
}


@pytest.mark.parametrize("which", OVERLAPS)
def test_what_is_written_lies_on_nothing_else(op: str, which: str):
    text = refused(op, overlapping(op, which), "KDA121")
    assert all(f"`{name}`" in text for name in OVERLAPS[which]), text


@pytest.mark.parametrize("name", ["dt_bias", "A_log", "ssm_state_indices", "initial_state"])
def test_what_decode_writes_lies_on_nothing_else(name: str):
    call = decode_inputs(4, slots=6)
    memory = torch.zeros(max(call["out"].numel(), call[name].numel() * call[name].element_size() // 4))
    under = memory[: call[name].numel() * call[name].element_size() // 4].view(call[name].dtype).view(call[name].shape)
    under.copy_(call[name])
    text = refused(DECODE, call | {name: under, "out": memory[: call["out"].numel()].view(call["out"].shape)}, "KDA121")
    assert "`out`" in text
    assert f"`{name}`" in text


# Tensors of another kind


def nested(x: Tensor, layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls them a prototype
        return torch.nested.nested_tensor([x, x], layout=layout)


def compressed(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls them a beta
        return x.flatten(0, -2).to_sparse_csr() if x.ndim > 1 else x[None].to_sparse_csr()


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda x: x.to_sparse(),
    "compressed": compressed,
    "nested": lambda x: nested(x[0] if x.ndim > 1 else x, torch.strided),
    "jagged": lambda x: nested(x[0] if x.ndim > 1 else x, torch.jagged),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("every_op", "name"), [(op, argument.name) for op in OPS for argument in contract.TABLE[op]])
def test_tensors_that_are_not_dense(every_op: str, name: str, kind: str):
    call = call_of(every_op)
    if every_op != DECODE:
        call |= {"track_state": torch.zeros(4, 2, 16, 16), "track_chunk_idx": torch.zeros(4, dtype=torch.int32), "out": torch.zeros_like(call["v"])}
    assert f"`{name}`" in refused(every_op, call | {name: KINDS[kind](call[name])}, "KDA108")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["q", "initial_state_indices"])
def test_tensors_that_are_not_dense_beside_a_plan(op: str, name: str, kind: str):
    """The plan is held against q and the indices before they are looked at."""
    call = prefill_inputs([70]) | {"cu_seqlens": None, "plan": plan_prefill(lengths=[70])}
    refused(op, call | {name: KINDS[kind](call[name])}, "KDA108", "KDA120")


@pytest.mark.parametrize("every_op", OPS)
@pytest.mark.parametrize("check", ["shapes", "values"])
def test_tensors_on_meta(every_op: str, check: str):
    call = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in call_of(every_op).items()}
    refused(every_op, call | {"check": check}, "KDA204")
    refused(every_op, call | {"check": check, "backend": "torch"}, "KDA203")
    if every_op != DECODE:
        with_all = {"snapshots": Snapshots([0], [64], [4]), "plan": plan_prefill(lengths=LENGTHS, device="meta")}
        tracking = {"track_state": torch.zeros(4, 2, 16, 16, device="meta"), "track_chunk_idx": torch.zeros(4, dtype=torch.int32, device="meta")}
        refused(every_op, call | with_all | tracking | {"check": check}, "KDA204")


class Wrapper(torch.Tensor):
    """Shape and strides of a tensor, and no memory: as DTensor."""

    @staticmethod
    def __new__(cls, x: Tensor) -> Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device)

    @classmethod
    def __torch_dispatch__(cls, *args: Any) -> Any:
        raise AssertionError("nothing is computed with it")


def resized(x: Tensor) -> Tensor:
    """Its memory was given back, as that of sharded parameters."""
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def of_a_transform(x: Tensor) -> Tensor:
    """What a function of `torch.func` is called with."""
    return torch._C._functorch._add_batch_dim(x[None], 0, 1)


@pytest.mark.parametrize("without_memory", [Wrapper, resized, of_a_transform], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("every_op", "name"), [(op, name) for op in OPS for name in ("initial_state", "mixed_qkv" if op == DECODE else "q")])
def test_tensors_without_memory(every_op: str, name: str, without_memory: Callable[[Tensor], Tensor]):
    call = call_of(every_op)
    assert f"`{name}`" in refused(every_op, call | {name: without_memory(call[name])}, "KDA108")


INDEX_KINDS = {**KINDS, "meta": lambda x: x.to("meta")}


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize("argument", ["cu_seqlens", "lengths"])
def test_plans_need_values(argument: str, kind: str):
    with pytest.raises(ContractError, match="KDA126"):
        plan_prefill(**{argument: INDEX_KINDS[kind](torch.tensor([0, 64]))})


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_snapshots_need_values(place: int, kind: str):
    columns: list[Any] = [[0, 0], [64, 0], [5, 6]]
    columns[place] = INDEX_KINDS[kind](torch.tensor([0, 64]))
    with pytest.raises(ContractError, match="KDA119"):
        Snapshots(*columns)


# Numbers and options of another kind


def named(parameter: Any) -> str:
    """The name of a case. Some numbers are too long to be printed."""
    if not isinstance(parameter, dict):
        return parameter[0]
    ((name, value),) = parameter.items()
    return f"{name}, {f'{value.bit_length()} bits' if isinstance(value, int) else f'{type(value).__name__} {str(value)[:12]}'}"


@pytest.mark.parametrize("every_op", OPS)
@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"scale": 10**400}, ("KDA124",)),
        ({"scale": -(10**400)}, ("KDA124",)),
        ({"scale": 10**5000}, ("KDA124",)),
        ({"lower_bound": -(10**400)}, ("KDA114",)),
        ({"lower_bound": -(10**5000)}, ("KDA114",)),
        ({"scale": np.array(0.25)}, ("KDA108",)),
        ({"scale": np.array([0.25, 0.5])}, ("KDA108",)),
        ({"scale": 0.25j}, ("KDA108",)),
        ({"lower_bound": np.array([-5.0, -4.0])}, ("KDA108",)),
        ({"use_qk_l2norm_in_kernel": np.array([True, False])}, ("KDA108",)),
        ({"use_qk_l2norm_in_kernel": np.bool_(True)}, ("KDA108",)),
        ({"check": np.array(["shapes", "values"])}, ("KDA125",)),
        ({"check": np.array("values")}, ("KDA125",)),
        ({"check": ["values"]}, ("KDA125",)),
        ({"check": torch.tensor([1, 2])}, ("KDA125",)),
        ({"backend": np.array(["torch", "auto"])}, ("KDA201",)),
        ({"backend": np.array("torch")}, ("KDA201",)),
        ({"backend": ["torch"]}, ("KDA201",)),
        ({"backend": torch.tensor([1, 2])}, ("KDA201",)),
        ({"A_log": np.zeros(2, np.float32)}, ("KDA108",)),
        ({"initial_state": np.zeros((6, 2, 16, 16), np.float32)}, ("KDA108",)),
        ({"initial_state": np.zeros(())}, ("KDA108",)),
    ],
    ids=named,
)
def test_arguments_of_another_kind(every_op: str, changes: Call, codes: tuple[str, ...]):
    (name,) = changes
    assert name in refused(every_op, call_of(every_op) | changes, *codes)


@pytest.mark.parametrize("name", ["snapshots", "plan", "track_state", "cu_seqlens", "out", "initial_state_indices"])
def test_numpy_arrays_in_place_of_tensors(op: str, name: str):
    refused(
        op,
        call_of(op) | {"track_chunk_idx": torch.zeros(4, dtype=torch.int32)} | {"track_state": torch.zeros(4, 2, 16, 16)} | {name: np.zeros(4)},
        "KDA108",
    )


@pytest.mark.parametrize("scale", [np.float64(0.25), 1, 2**60, 1e300], ids=str)
def test_numbers_that_will_do(op: str, scale: float):
    getattr(kdaserve, op)(**call_of(op), scale=scale)
