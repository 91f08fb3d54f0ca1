"""Saved calls: what comes back is the call, in little space, refused for what it was refused for; damaged files are told apart from calls."""

from __future__ import annotations

import decimal
import importlib
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


# Files that are no saved call


def unreadable(path: Path) -> str:
    with pytest.raises(ContractError) as caught:
        load_call(path)
    assert caught.value.code == "KDA130"
    assert str(path.parent) in str(caught.value)
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 2
    assert "KDA130" in result.stderr
    return str(caught.value)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    call = with_snapshots_and_tracking("chunk_kda") | {"plan": plan_prefill(lengths=[70, 0, 5])}
    return save_call(tmp_path / "call", "chunk_kda", call)


def description(saved: Path) -> dict[str, Any]:
    return json.loads(saved.with_suffix(".json").read_text())


def rewrite(saved: Path, changed: Any) -> None:
    saved.with_suffix(".json").write_text(json.dumps(changed))


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="KDA130"):
        save_call(tmp_path / "none" / "call", "chunk_kda", prefill_inputs([5]))
    unreadable(tmp_path / "none" / "call")
    unreadable(tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_file_that_is_missing_or_a_folder(saved: Path, suffix: str) -> None:
    saved.with_suffix(suffix).unlink()
    assert f"call{suffix}" in unreadable(saved)
    saved.with_suffix(suffix).mkdir()
    unreadable(saved)
    with pytest.raises(ContractError, match="KDA130"):
        save_call(saved, "chunk_kda", prefill_inputs([5]))


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file(saved: Path, suffix: str, part: float) -> None:
    whole = saved.with_suffix(suffix).read_bytes()
    saved.with_suffix(suffix).write_bytes(whole[: int(part * len(whole))])
    unreadable(saved)


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00\x01" * 8, b"null", b"[1, 2]", b'"chunk_kda"', b"{}", b"[" * 100_000, b"\x00" * 64], ids=lambda b: repr(b[:6])
)
def test_a_file_of_something_else(saved: Path, suffix: str, content: bytes) -> None:
    saved.with_suffix(suffix).write_bytes(content)
    unreadable(saved)


def test_swapped_files(saved: Path, tmp_path: Path) -> None:
    """Descriptions under each other's tensors; and the two files of one call under each other's name."""
    other = save_call(tmp_path / "other", DECODE, decode_inputs(2))
    texts = [path.with_suffix(".json").read_text() for path in (saved, other)]
    for path, text in zip((other, saved), texts, strict=True):
        path.with_suffix(".json").write_text(text)
        unreadable(path)
    kept = saved.read_bytes()
    saved.write_bytes(saved.with_suffix(".json").read_bytes())
    saved.with_suffix(".json").write_bytes(kept)
    unreadable(saved)


def test_tensors_of_another_call_of_the_same_op(saved: Path, tmp_path: Path) -> None:
    """Same names, other shapes and slots."""
    call = with_snapshots_and_tracking("chunk_kda") | {"initial_state_indices": torch.tensor([8, 5, 2])}
    other = save_call(tmp_path / "other", "chunk_kda", call)
    other.with_suffix(".json").write_text(saved.with_suffix(".json").read_text())
    unreadable(other)


@pytest.mark.parametrize("key", ["format", "op", "scalars", "strides"])
def test_a_missing_key(saved: Path, key: str) -> None:
    changed = description(saved)
    del changed[key]
    rewrite(saved, changed)
    unreadable(saved)


@pytest.mark.parametrize("key", ["slots", "saved"])
def test_a_missing_key_of_the_pool(saved: Path, key: str) -> None:
    changed = description(saved)
    del changed["pool"][key]
    rewrite(saved, changed)
    unreadable(saved)


def test_missing_strides_of_one_tensor(saved: Path) -> None:
    changed = description(saved)
    del changed["strides"]["q"]
    rewrite(saved, changed)
    unreadable(saved)


@pytest.mark.parametrize("key", ["format", "op", "scalars", "strides", "pool", "refused", "out_is_v"])
@pytest.mark.parametrize("value", ["text", "", None, 7, -1, 1.5, [], ["q"], {}, {"q": 1}, True], ids=repr)
def test_any_value_of_a_key_is_a_call_or_unreadable(saved: Path, key: str, value: Any) -> None:
    """Never another exception, be it in loading or in the check."""
    rewrite(saved, description(saved) | {key: value})
    if kda130_or(load_call, saved) is None:
        unreadable(saved)
    else:
        assert isinstance(CliRunner().invoke(app, ["check", str(saved)]).exception, (SystemExit, type(None)))


@pytest.mark.parametrize(
    "stride",
    [
        [],
        [1],
        [1] * 9,
        [-1, 32, 16, 1],
        [2400, 32, 16, -1],
        ["a", 32, 16, 1],
        [None] * 4,
        "abcd",
        7,
        None,
        {"a": 1},
        [2**62] * 4,
        [10**30] * 4,
        [1.5, 32, 16, 1],
    ],
    ids=str,
)
def test_strides_that_are_none(saved: Path, stride: Any) -> None:
    changed = description(saved)
    changed["strides"]["q"] = stride
    rewrite(saved, changed)
    unreadable(saved)


@pytest.mark.parametrize("stride", [[1, 1, 1, 1], [2400, 32, 16, 0], [2400, 0, 16, 1], [2400, 16, 16, 1], [0, 0, 0, 0]], ids=str)
def test_strides_that_would_overwrite_values(saved: Path, stride: list[int]) -> None:
    """Elements that share memory cannot hold different values: no such call was saved."""
    changed = description(saved)
    changed["strides"]["q"] = stride
    rewrite(saved, changed)
    unreadable(saved)


@pytest.mark.parametrize(
    "pool",
    [
        {"saved": [-1, -2, -3, -4, -5]},
        {"saved": [0, 2, 4, 7, -1]},
        {"saved": [0, 0, 0, 0, 0]},
        {"saved": [8, 7, 4, 2, 0]},
        {"saved": ["0", "2", "4", "7", "8"]},
        {"saved": [0, 2]},
        {"saved": [0, 2, 4, 7, 8, 9]},
        {"saved": "02478"},
        {"saved": None},
        {"saved": 5},
        {"slots": -5},
        {"slots": 0},
        {"slots": "9"},
        {"slots": None},
        {"slots": -(10**30)},
        {"slots": 4},
    ],
    ids=str,
)
def test_slots_that_no_pool_has(saved: Path, pool: dict[str, Any]) -> None:
    """Negative, repeated, out of order, of another type, more or fewer than were saved, or past the pool's end."""
    changed = description(saved)
    changed["pool"] |= pool
    rewrite(saved, changed)
    unreadable(saved)


@pytest.mark.parametrize("slots", [10**30, -(10**30), 2**63, 3, 0])
def test_a_pool_of_another_size_under_an_index_past_the_end(slots: int, tmp_path: Path) -> None:
    """The index stays past the end, or the file is refused."""
    saved = save_call(tmp_path / "call", "chunk_kda", with_indices("chunk_kda", [3, 1000, 5]))
    changed = description(saved)
    changed["pool"]["slots"] = slots
    rewrite(saved, changed)
    if kda130_or(load_call, saved) is None:
        unreadable(saved)
    else:
        assert CliRunner().invoke(app, ["check", str(saved)]).exit_code == 1


@pytest.mark.parametrize("lengths", [[-5], ["70"], [1.5], "70", None, 7, {"a": 1}], ids=str)
def test_lengths_that_no_plan_has(saved: Path, lengths: Any) -> None:
    changed = description(saved)
    changed["scalars"]["plan.lengths"] = lengths
    rewrite(saved, changed)
    unreadable(saved)


# verify_call


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_backends_are_verified_and_nothing_is_written(name: str, backend: str) -> None:
    op, make = CALLS[name]
    call = make()
    before = {key: x.clone() for key, x in call.items() if isinstance(x, Tensor)}
    found = verify_call(op, call, backend)
    assert found.backend == ("torch" if backend == "auto" else backend)
    assert max(found.output, found.state) <= (1e-2 if torch.bfloat16 in (x.dtype for x in before.values()) else 1e-3)
    for key, x in before.items():
        assert_same_bits(call[key], x, f"verify_call wrote {key}")


def sabotage(monkeypatch: pytest.MonkeyPatch, op: str, disturb: Callable[[Any, Any], None]) -> None:
    """The torch backend computes `op` and then `disturb` changes the checked call's tensors or the result."""
    module = importlib.import_module(f"kdaserve.ops.{op}.torch")
    run = module.run

    def disturbed(call: Any) -> Any:
        result = run(call)
        disturb(call, result)
        return result

    monkeypatch.setattr(module, "run", disturbed)


def deviates(op: str, call: Call, **options: Any) -> str:
    """The text of KDA309; nothing of the call may have been written."""
    before = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}
    verify_call(op, call, "reference")
    with pytest.raises(ValuesError) as caught:
        verify_call(op, call, **options)
    assert caught.value.code == "KDA309"
    for name, x in before.items():
        assert_same_bits(call[name], x, f"verify_call wrote {name}")
    return str(caught.value)


@pytest.mark.parametrize("op", ["chunk_kda", "recurrent_kda"])
@pytest.mark.parametrize("value", [1.01, NAN, float("inf"), 0.0])
@pytest.mark.parametrize(
    ("row", "where"), [(0, "sequence 0, token 0,"), (69, "sequence 0, token 69,"), (70, "sequence 2, token 0,"), (74, "sequence 2, token 4,")]
)
def test_one_wrong_token_is_named(op: str, value: float, row: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, op, lambda call, result: result[0][0, row, 1].mul_(value))
    text = deviates(op, call_of(op))
    assert f"{where} head 1" in text
    assert "output" in text
    assert "torch" in text


@pytest.mark.parametrize("op", ["chunk_kda", "recurrent_kda"])
@pytest.mark.parametrize(
    ("place", "where"),
    [((0, 64), "sequence 0, after 64 tokens,"), ((0, 70), "sequence 0, after 70 tokens,"), ((2, 5), "sequence 2, after 5 tokens,")],
)
def test_one_wrong_state_is_named(op: str, place: tuple[int, int], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def disturb(call: Any, result: Any) -> None:
        for sequence, tokens, slot in call.snapshots.entries():
            if (sequence, tokens) == place:
                call.initial_state[slot, 1, 3, 5] += 1

    sabotage(monkeypatch, op, disturb)
    text = deviates(op, call_of(op))
    assert f"{where} head 1" in text
    assert "state" in text


@pytest.mark.parametrize("value", [1.01, NAN])
def test_one_wrong_request_of_decode_is_named(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, DECODE, lambda call, result: call.out[2, 0, 1].mul_(value))
    assert "request 2, head 1" in deviates(DECODE, call_of(DECODE))


def test_output_of_padding_in_decode_must_be_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, DECODE, lambda call, result: call.out[1].fill_(1e-3))
    call = call_of(DECODE)
    call["ssm_state_indices"][1] = -1
    assert "request 1, head 0" in deviates(DECODE, call)


def test_one_wrong_state_of_decode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, DECODE, lambda call, result: call.initial_state[call.ssm_state_indices[2], 1].mul_(1.01))
    call = call_of(DECODE) | {"ssm_state_indices": torch.tensor([3, -1, 5])}
    assert "request 2, slot 5, head 1" in deviates(DECODE, call)


@pytest.mark.parametrize("op", OPS)
def test_the_tolerance_is_the_callers(op: str) -> None:
    """No float32 arithmetic is exact; any is within one."""
    assert "1.0e-12" in deviates(op, call_of(op), tolerance=1e-12)
    assert verify_call(op, call_of(op), tolerance=1.0).backend == "torch"


@pytest.mark.parametrize("op", OPS)
def test_only_a_right_call_is_verified(op: str) -> None:
    call = call_of(op)
    with pytest.raises(ValuesError, match="KDA301"):
        verify_call(op, call | {indices_of(op): torch.tensor([0, 1, 7])})
    with pytest.raises(KdaError, match="KDA201"):
        verify_call(op, call, "cudnn")
    call["A_log"][0] = NAN
    with pytest.raises(ValuesError, match="KDA304"):
        verify_call(op, call)
