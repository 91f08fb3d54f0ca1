"""Saved calls: what comes back is the call, in little space, refused for what it was refused for; damaged files are told apart from calls."""

from __future__ import annotations

import decimal
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import kdaserve
from conftest import Call
from kdaserve import ContractError, KdaError, Snapshots, StatePool, ValuesError, calls, guards, plan_prefill
from kdaserve.cli import app
from kdaserve.testing import assert_same_bits, decode_inputs, load_call, prefill_inputs, save_call, verify_call
from kdaserve.testing.saved import refusal_when_saved

NAN = float("nan")
DECODE = "packed_decode_kda"
OPS = ("chunk_kda", "recurrent_kda", DECODE)


def indices_of(op: str) -> str:
    return "ssm_state_indices" if op == DECODE else "initial_state_indices"


def call_of(op: str, slots: int = 7, **options: Any) -> Call:
    return decode_inputs(3, slots=slots, **options) if op == DECODE else prefill_inputs([70, 0, 5], slots=slots, **options)


def written(op: str, call: Call) -> list[tuple[str, Tensor]]:
    """Runs a call and names all that it returned or wrote, the pool aside."""
    result = getattr(kdaserve, op)(**call)
    found = [("out", call["out"])] if op == DECODE else [(f"result {i}", x) for i, x in enumerate(result if isinstance(result, tuple) else (result,))]
    return found + ([("track_state", call["track_state"])] if call.get("track_state") is not None else [])


def named_slots(op: str, call: Call) -> list[int]:
    """Slots that the call names, in the order in which it names them."""
    snapshots = call.get("snapshots")
    named = call[indices_of(op)].tolist() + (snapshots.slot.tolist() if snapshots is not None else [])
    return [slot for slot in named if slot >= 0]


def round_trip(path: Path, op: str, call: Call) -> Call:
    """The call saved, loaded, compared with itself and run: both runs give the same bits and states."""
    before = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}
    saved = save_call(path, op, call)
    for name, x in before.items():
        assert_same_bits(call[name], x, f"save_call wrote {name}")
    assert refusal_when_saved(saved) is None
    loaded_op, loaded = load_call(saved)
    assert loaded_op == op
    assert {name for name, value in loaded.items() if value is not None} == {name for name, value in call.items() if value is not None}
    assert list(named_slots(op, loaded)) == [sorted(set(named_slots(op, call))).index(slot) for slot in named_slots(op, call)]
    for name, value in loaded.items():
        if isinstance(value, Tensor) and name not in ("initial_state", indices_of(op)):
            assert_same_bits(value, call[name], name)
            moving = [dim for dim in range(value.ndim) if value.shape[dim] > 1]
            assert [value.stride(dim) for dim in moving] == [call[name].stride(dim) for dim in moving], f"strides of {name}"
        elif isinstance(value, Snapshots):
            assert (value.sequence.tolist(), value.tokens.tolist()) == (call[name].sequence.tolist(), call[name].tokens.tolist())
        elif not isinstance(value, (Tensor, kdaserve.PrefillPlan)):
            assert value == call[name], name
    verify_call(op, loaded)
    for (what, actual), (_, expected) in zip(written(op, loaded), written(op, call), strict=True):
        assert_same_bits(actual, expected, f"{what} of the loaded call")
    for new, old in zip(named_slots(op, loaded), named_slots(op, call), strict=True):
        assert_same_bits(loaded["initial_state"][new], call["initial_state"][old], f"state in slot {old}, {new} when loaded")
    return loaded


def views_of_one_projection() -> Call:
    """q, k and v as columns of one buffer, beta head-major."""
    call = prefill_inputs([70, 0, 5])
    mixed = torch.cat([call[name].flatten(2) for name in ("q", "k", "v")], -1)
    parts = [part.unflatten(-1, (2, 16)) for part in mixed.split(32, -1)]
    return call | dict(zip("qkv", parts, strict=True)) | {"beta": call["beta"].mT.contiguous().mT}


def expanded_gates() -> Call:
    """One gate and one beta for all heads, and for all tokens."""
    call = prefill_inputs([70, 5])
    return call | {"g": call["g"][:, :, :1].expand_as(call["g"]), "beta": call["beta"][:, :1].expand_as(call["beta"])}


def with_out_over_v() -> Call:
    call = views_of_one_projection()
    return call | {"out": call["v"]}


def with_snapshots_and_tracking(op: str) -> Call:
    call = call_of(op, slots=9) | {"initial_state_indices": torch.tensor([8, -1, 2]), "output_intermediate_states": True}
    call["snapshots"] = Snapshots([0, 0, 2, 7], [0, 64, 5, 77], [7, 0, 4, -1])
    return call | {"track_state": torch.full((3, 2, 16, 16), NAN), "track_chunk_idx": torch.tensor([1, -1, 0], dtype=torch.int32)}


def with_plan() -> Call:
    call = prefill_inputs([70, 0, 5])
    return call | {"cu_seqlens": None, "plan": plan_prefill(call["cu_seqlens"])}


def decode_from_columns() -> Call:
    call = decode_inputs(3, v_heads=4, v_dim=32, slots=9)
    wide = {name: torch.cat([call[name], torch.full((3, 7), NAN)], 1)[:, :-7] for name in ("mixed_qkv", "a", "b")}
    return call | wide | {"ssm_state_indices": torch.tensor([8, -1, 0]), "dt_bias": None, "scale": None, "lower_bound": None}


CALLS: dict[str, tuple[str, Callable[[], Call]]] = {
    "chunk": ("chunk_kda", lambda: call_of("chunk_kda")),
    "recurrent": ("recurrent_kda", lambda: call_of("recurrent_kda")),
    "decode": (DECODE, lambda: call_of(DECODE)),
    "grouped": ("chunk_kda", lambda: call_of("chunk_kda", v_heads=4, k_dim=32)),
    "grouped decode": (DECODE, lambda: call_of(DECODE, v_heads=4, k_dim=32, lower_bound=None)),
    "batched": ("chunk_kda", lambda: prefill_inputs([70, 70], batched=True, v_dim=32, gate="softplus")),
    "bf16": ("chunk_kda", lambda: call_of("chunk_kda", dtype=torch.bfloat16, pool_dtype=torch.bfloat16, beta_is_raw=True)),
    "fp16": ("recurrent_kda", lambda: call_of("recurrent_kda", dtype=torch.float16)),
    "bf16 decode": (DECODE, lambda: call_of(DECODE, dtype=torch.bfloat16, pool_dtype=torch.float16)),
    "fp64": ("chunk_kda", lambda: call_of("chunk_kda", dtype=torch.float64, pool_dtype=torch.float64)),
    "no gate parameters": ("chunk_kda", lambda: call_of("chunk_kda", gate="none") | {"A_log": None, "dt_bias": None, "scale": 0.1}),
    "views of one projection": ("chunk_kda", views_of_one_projection),
    "expanded gates": ("recurrent_kda", expanded_gates),
    "columns in decode": (DECODE, decode_from_columns),
    "out over v": ("chunk_kda", with_out_over_v),
    "snapshots and tracking": ("chunk_kda", lambda: with_snapshots_and_tracking("chunk_kda")),
    "snapshots and tracking, recurrent": ("recurrent_kda", lambda: with_snapshots_and_tracking("recurrent_kda")),
    "plan": ("chunk_kda", with_plan),
    "no sequence": ("chunk_kda", lambda: prefill_inputs([])),
    "no request": (DECODE, lambda: decode_inputs(0)),
    "padding alone": ("chunk_kda", lambda: prefill_inputs([5, 3]) | {"initial_state_indices": torch.tensor([-1, -2])}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_comes_back(name: str, tmp_path: Path) -> None:
    op, make = CALLS[name]
    call = make()
    loaded = round_trip(tmp_path / "call", op, call)
    assert (loaded.get("out") is loaded.get("v")) == (call.get("out") is call.get("v"))
    assert len(loaded["initial_state"]) == len(set(named_slots(op, loaded)))


def test_what_no_gradient_needs_is_saved_too(tmp_path: Path) -> None:
    call = prefill_inputs([70])
    call["A_log"] = torch.nn.Parameter(call["A_log"])
    _, loaded = load_call(save_call(tmp_path / "call", "chunk_kda", call))
    assert_same_bits(loaded["A_log"], call["A_log"], "A_log")


# Only named slots


@pytest.mark.parametrize("op", OPS)
def test_a_large_pool_makes_a_small_file(op: str, tmp_path: Path) -> None:
    call = call_of(op, slots=1000)
    saved = save_call(tmp_path / "call", op, call)
    assert saved.stat().st_size < call["initial_state"].nbytes / 20
    _, loaded = load_call(saved)
    assert len(loaded["initial_state"]) == 3
    assert loaded["initial_state"].untyped_storage().nbytes() < call["initial_state"].nbytes / 20
    round_trip(tmp_path / "again", op, call)


@pytest.mark.parametrize("op", OPS)
def test_one_layer_of_a_state_pool(op: str, tmp_path: Path) -> None:
    """Its slot stride spans all layers; poison in the others must not come along."""
    pool = StatePool(50, 40, v_heads=2, k_dim=16, v_dim=16)
    for layer in range(40):
        pool.recurrent(layer).fill_(NAN)
    call = call_of(op, slots=50)
    call["initial_state"] = pool.recurrent(17).copy_(call["initial_state"])
    saved = save_call(tmp_path / "call", op, call)
    assert saved.stat().st_size < pool.nbytes / 20
    loaded = round_trip(tmp_path / "again", op, call)
    assert loaded["initial_state"].isfinite().all()


@pytest.mark.parametrize("op", OPS)
def test_slots_that_no_one_named_are_not_saved(op: str, tmp_path: Path) -> None:
    call = call_of(op, slots=9)
    named = named_slots(op, call)
    call["initial_state"][[slot for slot in range(9) if slot not in named]] = 12345.0
    saved = save_call(tmp_path / "call", op, call)
    assert not (load_call(saved)[1]["initial_state"] == 12345.0).any()


# Wrong calls stay wrong


def with_indices(op: str, slots: list[int], pool: int = 1000) -> Call:
    return call_of(op, slots=pool) | {indices_of(op): torch.tensor(slots)}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("slots", "code"),
    [
        ([3, 1000, 5], "KDA301"),
        ([3, 5, 1003], "KDA301"),
        ([10**12, -1, 5], "KDA301"),
        ([1000, 1000, 1000], "KDA301"),
        ([7, 5, 7], "KDA302"),
        ([7, 7, -1], "KDA302"),
    ],
    ids=str,
)
def test_wrong_slots_are_refused_after_loading(op: str, slots: list[int], code: str, tmp_path: Path) -> None:
    saved = save_call(tmp_path / "call", op, with_indices(op, slots))
    assert refusal_when_saved(saved).startswith(f"[{code}]")
    loaded_op, loaded = load_call(saved)
    with pytest.raises(ValuesError, match=code):
        getattr(kdaserve, loaded_op)(**loaded)


@pytest.mark.parametrize(
    ("snapshots", "code"),
    [
        (Snapshots([0, 0], [64, 70], [9, 1000]), "KDA308"),
        (Snapshots([0, 0], [64, 70], [9, 9]), "KDA302"),
        (Snapshots([0], [64], [3]), "KDA302"),
        (Snapshots([3], [64], [9]), "KDA308"),
        (Snapshots([0], [65], [9]), "KDA308"),
    ],
    ids=repr,
)
def test_wrong_snapshots_are_refused_after_loading(snapshots: Snapshots, code: str, tmp_path: Path) -> None:
    call = with_indices("chunk_kda", [3, 999, 5]) | {"snapshots": snapshots}
    saved = save_call(tmp_path / "call", "chunk_kda", call)
    assert refusal_when_saved(saved).startswith(f"[{code}]")
    with pytest.raises(ValuesError, match=code):
        kdaserve.chunk_kda(**load_call(saved)[1])


def out_over_q() -> Call:
    call = prefill_inputs([5, 3])
    return call | {"out": call["q"]}


def out_shifted_over_v() -> Call:
    call, memory = prefill_inputs([5, 3]), torch.zeros(2 * 16 * 9)
    memory[: 2 * 16 * 8] = call["v"].flatten()
    return call | {"v": memory[: 2 * 16 * 8].view(1, 8, 2, 16), "out": memory[2 * 16 :].view(1, 8, 2, 16)}


def track_state_inside_the_pool() -> Call:
    call = prefill_inputs([5, 3], slots=9) | {"initial_state_indices": torch.tensor([0, 1])}
    return call | {"track_state": call["initial_state"][4:6], "track_chunk_idx": torch.tensor([0, -1])}


def out_expanded() -> Call:
    call = prefill_inputs([5, 3])
    return call | {"out": call["v"][:, :, :1].clone().expand_as(call["v"])}


ALIASED = [out_over_q, out_shifted_over_v, track_state_inside_the_pool, out_expanded]


@pytest.mark.parametrize("make", ALIASED, ids=lambda f: f.__name__)
def test_a_refusal_is_saved_with_its_call(make: Callable[[], Call], tmp_path: Path) -> None:
    """How tensors lay over each other is lost, what came of it is not."""
    saved = save_call(tmp_path / "call", "chunk_kda", make())
    message = refusal_when_saved(saved)
    assert message.startswith("[KDA121]")
    result = CliRunner().invoke(app, ["check", str(saved)])
    assert result.exit_code == 1
    assert message in result.stdout
    report = CliRunner().invoke(app, ["check", "--json", str(saved)])
    assert report.exit_code == 1
    assert json.loads(report.stdout)["healthy"] is False
    assert message in [row.get("message") for row in json.loads(report.stdout)["results"]]


def misspelt(call: Call) -> Call:
    return call | {"lower_bond": -5.0}


def incomplete(call: Call) -> Call:
    return {name: value for name, value in call.items() if name not in ("q", "mixed_qkv")}


def without_a_pool(call: Call) -> Call:
    return call | {"initial_state": None}


def pool_of_three_dimensions(call: Call) -> Call:
    return call | {"initial_state": call["initial_state"][0]}


def parameter_of_wrong_dtype(call: Call) -> Call:
    return call | {"A_log": call["A_log"].bfloat16()}


def index_of_two_dimensions(call: Call) -> Call:
    return {name: x[None] if name in ("initial_state_indices", "ssm_state_indices") else x for name, x in call.items()}


def index_of_floats(call: Call) -> Call:
    return {name: x.float() if name in ("initial_state_indices", "ssm_state_indices") else x for name, x in call.items()}


WRONG = [misspelt, incomplete, without_a_pool, pool_of_three_dimensions, parameter_of_wrong_dtype, index_of_two_dimensions, index_of_floats]


def refusal(op: str, call: Call) -> str:
    with pytest.raises((KdaError, TypeError)) as caught:
        calls.checked_call(op, call)
    return str(caught.value)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("spoil", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_call_is_wrong_in_the_same_way_after_loading(op: str, spoil: Callable[[Call], Call], tmp_path: Path) -> None:
    call = spoil(call_of(op))
    saved = save_call(tmp_path / "call", op, call)
    assert refusal_when_saved(saved) == refusal(op, call)
    assert refusal(*load_call(saved)) == refusal(op, call)


# Odd things


def nested(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls them a prototype
        return torch.nested.nested_tensor([x, x[:1]])


ODD: dict[str, Callable[[Call], Call]] = {
    "numpy scale": lambda call: {"scale": np.float64(0.25)},
    "numpy float32": lambda call: {"scale": np.float32(0.25)},
    "numpy bool": lambda call: {"use_qk_l2norm_in_kernel": np.bool_(True)},
    "numpy array": lambda call: {"A_log": call["A_log"].numpy()},
    "numpy integer": lambda call: {"lower_bound": np.int64(-5)},
    "huge": lambda call: {"scale": 10**400},
    "NaN": lambda call: {"scale": NAN},
    "infinity": lambda call: {"lower_bound": -float("inf")},
    "decimal": lambda call: {"scale": decimal.Decimal("0.25")},
    "complex": lambda call: {"scale": 1j},
    "bytes": lambda call: {"backend": b"torch"},
    "set": lambda call: {"backend": {"torch"}},
    "dict": lambda call: {"scale": {(1, 2): 3}},
    "dtype": lambda call: {"scale": torch.float32},
    "object": lambda call: {"scale": object()},
    "list of tensors": lambda call: {"A_log": [call["A_log"]]},
    "surrogate": lambda call: {"check": "\udcff"},
    "0-d tensor": lambda call: {"scale": torch.tensor(0.25)},
    "sparse": lambda call: {"A_log": call["A_log"].to_sparse()},
    "sparse pool": lambda call: {"initial_state": call["initial_state"].to_sparse()},
    "nested": lambda call: {"A_log": nested(call["initial_state"][0, 0])},
    "nested pool": lambda call: {"initial_state": nested(call["initial_state"])},
    "meta": lambda call: {"A_log": call["A_log"].to("meta")},
    "meta pool": lambda call: {"initial_state": call["initial_state"].to("meta")},
    "bool tensor": lambda call: {"A_log": call["A_log"] > 0},
    "complex tensor": lambda call: {"A_log": call["A_log"].to(torch.complex64)},
    "complex128 tensor": lambda call: {"A_log": call["A_log"].to(torch.complex128)},
    "conjugated tensor": lambda call: {"A_log": call["A_log"].to(torch.complex64).conj()},
}


def kda130_or(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function; None when it raised KDA130. Any other exception fails the test."""
    try:
        return function(*arguments)
    except ContractError as refused:
        if refused.code != "KDA130":
            raise
        return None


@pytest.mark.parametrize("op", ["chunk_kda", DECODE])
@pytest.mark.parametrize("name", ODD)
def test_odd_arguments_do_not_crash_saving(op: str, name: str, tmp_path: Path) -> None:
    """A call is saved while a fault is sought: saving it may be refused, but must not be a second fault."""
    call = call_of(op)
    call |= ODD[name](call)
    saved = kda130_or(save_call, tmp_path / "call", op, call)
    if saved is None:
        return
    assert load_call(saved)[0] == op
    assert CliRunner().invoke(app, ["check", str(saved)]).exit_code == (0 if refusal_when_saved(saved) is None else 1)


@pytest.mark.parametrize("op", ["chunk", "", None, 3, ["chunk_kda"]], ids=str)
def test_unknown_ops_are_not_saved(op: Any, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="KDA125"):
        save_call(tmp_path / "call", op, prefill_inputs([5]))
    assert not any(tmp_path.iterdir())


# Names


@pytest.mark.parametrize("name", ["call", "a.v1", "x.json", "x.safetensors", "step.10", ".hidden", "a.safetensors.json", "with space", "[bold]x"])
@pytest.mark.parametrize("kind", [str, Path], ids=["str", "Path"])
def test_any_name_will_do(name: str, kind: type, tmp_path: Path) -> None:
    """The same name, and the one that `save_call` returns, lead back to the call."""
    call = prefill_inputs([5])
    saved = save_call(kind(tmp_path / name), "chunk_kda", call)
    assert saved.suffix == ".safetensors"
    assert len(list(tmp_path.iterdir())) == 2
    for path in (tmp_path / name, saved, str(saved)):
        assert_same_bits(load_call(path)[1]["q"], call["q"], f"q from {path}")
        assert guards.saved_call_is_there(path), f"the guard does not see {path}"


@pytest.mark.parametrize(
    "names", [("dump.1", "dump.2"), ("a.v1", "a.v2.json"), ("1", "2"), ("a", "a.b"), ("a.1.safetensors", "a.2.safetensors")], ids=str
)
def test_numbered_dumps_do_not_collide(names: tuple[str, str], tmp_path: Path) -> None:
    made = {name: prefill_inputs([5 + i], seed=i) for i, name in enumerate(names)}
    for name, call in made.items():
        save_call(tmp_path / name, "chunk_kda", call)
    assert len(list(tmp_path.iterdir())) == 4
    for name, call in made.items():
        assert_same_bits(load_call(tmp_path / name)[1]["q"], call["q"], name)


def test_saving_again_replaces_both_files(tmp_path: Path) -> None:
    save_call(tmp_path / "call", "chunk_kda", prefill_inputs([70], slots=100))
    round_trip(tmp_path / "call", DECODE, decode_inputs(2))
