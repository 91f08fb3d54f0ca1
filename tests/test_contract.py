"""Wrong calls raise before anything is written, and say what is wrong (S5, S6, S19). Driven by the contract's own table."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kdaserve
from conftest import Call
from kdaserve import KdaError, Snapshots, contract, plan_prefill
from kdaserve.contract import Argument
from kdaserve.testing import assert_same_bits, decode_inputs, prefill_inputs

NAN = float("nan")
OPS = list(contract.TABLE)
PREFILL_OPS = ["chunk_kda", "recurrent_kda"]
POOL = ("initial_state", "initial_state_indices")


def valid(op: str, device: str = "cpu", batched: bool = False) -> Call:
    """A call with every argument of the table, in which no two symbols have one size."""
    if op == "packed_decode_kda":
        return decode_inputs(5, heads=2, v_heads=4, k_dim=32, v_dim=16, slots=7, device=device)
    lengths = [14] * 3 if batched else [5, 3, 6]
    call = prefill_inputs(lengths, heads=2, v_heads=4, k_dim=32, v_dim=16, slots=7, batched=batched, device=device)
    call["track_state"] = torch.full((3, 4, 16, 32), NAN, device=device)
    call["track_chunk_idx"] = torch.zeros(3, dtype=torch.int32, device=device)
    call["out"] = torch.full_like(call["v"], NAN)
    return call


def refused(op: str, call: Call, *codes: str) -> str:
    """The text of the error that the call raises; nothing may have been written."""
    tensors = {name: x for name, x in call.items() if isinstance(x, Tensor) and x.device.type != "meta"}
    before = {name: x.clone() for name, x in tensors.items()}
    with pytest.raises((ValueError, TypeError)) as caught:
        getattr(kdaserve, op)(**call)
    assert isinstance(caught.value, KdaError), f"{type(caught.value).__name__} is not from the catalogue: {caught.value}"
    assert not codes or caught.value.code in codes, f"expected {codes}, got {caught.value}"
    text = str(caught.value)
    assert text.startswith(f"[{caught.value.code}] ")
    assert "Fix: " in text
    for name, x in tensors.items():
        assert_same_bits(x, before[name], f"{op}: `{name}` after the refusal")
    return text


def breakages(op: str, argument: Argument, x: Tensor) -> Iterator[tuple[str, Any, str]]:
    """Each way to break one argument: label, replacement, code (empty = any)."""
    yield "a list", x.tolist(), "KDA108"
    yield "a number", 1.0, "KDA108"
    if not argument.optional:
        yield "None", None, "KDA101" if op in PREFILL_OPS and argument.name in POOL else "KDA108"
    yield "one dimension more", x[None], "KDA103"
    yield "one dimension less", x[0], "KDA103"
    for dim, symbol in enumerate(argument.dims):
        if symbol == "slots":
            continue
        if not symbol.startswith(">="):
            yield f"dimension {dim} ({symbol}) + 1", torch.cat([x, x.narrow(dim, 0, 1)], dim), ""
        yield f"dimension {dim} ({symbol}) - 1", x.narrow(dim, 0, x.shape[dim] - 1).clone(), ""
    for dtype in (torch.int16, torch.bool, torch.complex64, torch.float32 if argument.dtypes == contract.INDICES else torch.int64):
        yield f"in {dtype}", x.to(dtype), "KDA105"
    if argument.same_dtype_as:
        yield "in a sibling's other dtype", x.to(torch.bfloat16), "KDA106"
    if argument.dtypes == contract.PARAMETERS:
        yield "in bfloat16", x.to(torch.bfloat16), "KDA105"
    yield "on meta", x.to("meta"), "KDA107"
    if argument.last_dim_contiguous:
        yield "last dimension strided", torch.stack([x, x], -1)[..., 0], "KDA109"
        yield "last dimension expanded", x[..., :1].expand_as(x), "KDA109"
    if argument.slot_dense:
        yield "expanded over slots", x[:1].expand_as(x), "KDA123"
        yield "expanded over heads", x[:, :1].expand_as(x), "KDA123"
        yield "[K, V] in a slot", x.mT.contiguous().mT, "KDA123"
        yield "slots that overlap", x.as_strided(x.shape, (x[0].numel() - 1, *x.stride()[1:])), "KDA123"


def all_breakages() -> list[Any]:
    cases = []
    for op, table in contract.TABLE.items():
        for batched in (False, True) if op != "packed_decode_kda" else (False,):
            call = valid(op, batched=batched)
            for argument in table:
                if call.get(argument.name) is not None:
                    labels = [label for label, _, _ in breakages(op, argument, call[argument.name])]
                    layout = "batched" if batched else "packed"
                    cases += [pytest.param(op, batched, argument, label, id=f"{op}-{layout}-{argument.name}-{label}") for label in labels]
    return cases


@pytest.mark.parametrize("op", OPS)
def test_the_valid_call_is_valid(op: str, device: str):
    getattr(kdaserve, op)(**valid(op, device))
    assert {argument.name for argument in contract.TABLE[op]} <= inspect.signature(getattr(kdaserve, op)).parameters.keys()
    assert {argument.name for argument in contract.TABLE[op]} <= valid(op, device).keys()


@pytest.mark.parametrize(("op", "batched", "argument", "label"), all_breakages())
def test_one_argument_broken(op: str, batched: bool, argument: Argument, label: str, device: str):
    call = valid(op, device, batched)
    original = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}
    broken = {found: (value, code) for found, value, code in breakages(op, argument, call[argument.name])}
    value, code = broken[label]
    text = refused(op, call | {argument.name: value}, *([code] if code else []))
    assert f"`{argument.name}`" in text, f"the text does not name `{argument.name}`: {text}"
    assert text.split("] ")[1].startswith(f"{op}: ")
    assert_same_bits(call[argument.name], original[argument.name], f"{op}: `{argument.name}` itself")
    getattr(kdaserve, op)(**call)  # a refusal leaves nothing behind


# The texts that engines know


def test_texts_of_decode(device: str):
    op, call = "packed_decode_kda", valid("packed_decode_kda", device)

    def text(**changes: Tensor) -> str:
        return refused(op, call | changes)

    strided = {name: torch.stack([call[name]] * 2, -1)[..., 0] for name in ("mixed_qkv", "a", "b")}
    assert "`mixed_qkv` must be a 2D tensor (got ndim=3)" in text(mixed_qkv=call["mixed_qkv"][:, None])
    assert "`mixed_qkv` must be a 2D tensor (got ndim=1)" in text(mixed_qkv=call["mixed_qkv"][0])
    assert "`mixed_qkv` must be contiguous in the last dim." in text(mixed_qkv=strided["mixed_qkv"])
    assert "`a` and `b` must be 2D tensors (got a.ndim=3, b.ndim=2)" in text(a=call["a"][:, None])
    assert "`a` and `b` must be 2D tensors (got a.ndim=2, b.ndim=1)" in text(b=call["b"][0])
    assert "`a` and `b` must be 2D tensors (got a.ndim=1, b.ndim=3)" in text(a=call["a"][0], b=call["b"][:, None])
    for changes in ({"a": strided["a"]}, {"b": strided["b"]}, {"a": strided["a"], "b": strided["b"]}):
        assert "`a`/`b` must be contiguous in the last dim." in text(**changes)


@pytest.mark.parametrize("op", PREFILL_OPS)
@pytest.mark.parametrize("names", [("g",), ("beta",), ("g", "beta")])
def test_text_of_short_gates(op: str, names: tuple[str, ...], device: str):
    """q, k, v with 64 rows beside g or beta with 51."""
    call = prefill_inputs([64], device=device)
    text = refused(op, call | {name: call[name][:, :51] for name in names}, "KDA102")
    assert "g and beta must cover every q token" in text
    assert f"`{names[0]}` has 51 rows, q has 64" in text


@pytest.mark.parametrize("op", PREFILL_OPS)
@pytest.mark.parametrize("names", [("initial_state",), ("initial_state_indices",), ("initial_state", "initial_state_indices")])
def test_text_of_a_missing_pool(op: str, names: tuple[str, ...], device: str):
    call = valid(op, device)
    for absent in (call | dict.fromkeys(names), {name: x for name, x in call.items() if name not in names}):
        text = refused(op, absent, "KDA101")
        assert "KDA prefill requires an indexed initial-state pool" in text
        assert all(f"`{name}`" in text for name in names)


# Arguments that belong together


def overlapping(call: Call, name: str) -> Call:
    """`out` over the memory of one input."""
    flat = call[name].view(-1)
    repeated = flat if flat.numel() >= call["out"].numel() else torch.zeros(call["out"].numel(), device=flat.device)
    if repeated is not flat:
        repeated[: flat.numel()] = flat
    return call | {name: repeated[: flat.numel()].view(call[name].shape), "out": repeated[: call["out"].numel()].view(call["out"].shape)}


@pytest.mark.parametrize("op", PREFILL_OPS)
@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({"A_log": None}, "KDA113", "`dt_bias`"),
        ({"A_log": None, "dt_bias": None}, "KDA113", "`lower_bound`"),
        *[({"lower_bound": bad}, "KDA114", "`lower_bound`") for bad in (0.0, 5.0, NAN, float("inf"), -float("inf"))],
        *[({"lower_bound": bad}, "KDA108", "`lower_bound`") for bad in ("-5", True, torch.tensor(-5.0))],
        *[({"scale": bad}, "KDA124", "`scale`") for bad in (NAN, float("inf"))],
        *[({"scale": bad}, "KDA108", "`scale`") for bad in ("1", True, torch.tensor(1.0))],
        *[
            ({flag: bad}, "KDA108", f"`{flag}`")
            for flag in ("use_qk_l2norm_in_kernel", "beta_is_raw", "output_intermediate_states")
            for bad in (1, None)
        ],
        ({"track_state": None}, "KDA118", "`track_state`"),
        ({"track_chunk_idx": None}, "KDA118", "`track_chunk_idx`"),
        ({"snapshots": ([0], [0], [0])}, "KDA108", "`snapshots`"),
        ({"plan": [5, 3, 6]}, "KDA108", "`plan`"),
        ({"plan": plan_prefill(lengths=[5, 9])}, "KDA120", "plan"),
        ({"plan": plan_prefill(lengths=[5, 3, 7])}, "KDA120", "plan"),
        ({"plan": plan_prefill(lengths=[5, 3, 6], device="meta")}, "KDA120", "plan"),
        ({"check": "all"}, "KDA125", "`check`"),
        ({"check": None}, "KDA125", "`check`"),
    ],
    ids=str,
)
def test_other_arguments_of_prefill(op: str, changes: Call, code: str, names: str):
    assert names in refused(op, valid(op) | changes, code)


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        *[({"lower_bound": bad}, "KDA114", "`lower_bound`") for bad in (0.0, 5.0, NAN)],
        *[({"scale": bad}, "KDA124", "`scale`") for bad in (NAN, float("inf"))],
        ({"scale": "1"}, "KDA108", "`scale`"),
        ({"use_qk_l2norm_in_kernel": 1}, "KDA108", "`use_qk_l2norm_in_kernel`"),
        ({"check": "all"}, "KDA125", "`check`"),
    ],
    ids=str,
)
def test_other_arguments_of_decode(changes: Call, code: str, names: str):
    assert names in refused("packed_decode_kda", valid("packed_decode_kda") | changes, code)


@pytest.mark.parametrize("op", PREFILL_OPS)
def test_packed_input_has_batch_one(op: str, device: str):
    call = valid(op, device, batched=True)
    for bounds in ([0, 14, 28, 42], []):
        assert "`cu_seqlens`" in refused(op, call | {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=device)}, "KDA115", "KDA116")
    call = valid(op, device)
    assert "`cu_seqlens`" in refused(op, call | {"cu_seqlens": call["cu_seqlens"][:0]}, "KDA115")


@pytest.mark.parametrize("op", PREFILL_OPS)
@pytest.mark.parametrize(("heads", "v_heads"), [(4, 2), (3, 4)])
def test_heads_that_do_not_divide(op: str, heads: int, v_heads: int, device: str):
    text = refused(op, prefill_inputs([5], heads=heads, v_heads=v_heads, device=device), "KDA110")
    assert f"{v_heads} value heads" in text
    assert f"{heads} query heads" in text


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [8, 17, 272])
@pytest.mark.parametrize("symbol", ["k_dim", "v_dim"])
def test_head_dimensions_that_no_kernel_takes(op: str, size: int, symbol: str, device: str):
    make = decode_inputs if op == "packed_decode_kda" else prefill_inputs
    first = 3 if op == "packed_decode_kda" else [5]
    assert f"head dimension {symbol[0].upper()} is {size}" in refused(op, make(first, **{symbol: size}, device=device), "KDA111")


@pytest.mark.parametrize("op", OPS)
def test_bias_of_one_entry_a_head(op: str, device: str):
    call = valid(op, device)
    assert "`dt_bias` has 4 entries" in refused(op, call | {"dt_bias": call["dt_bias"][:4].clone()}, "KDA112")


@pytest.mark.parametrize("op", PREFILL_OPS)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_out_over_an_input_of_prefill(op: str, name: str, device: str):
    call = valid(op, device)
    if name == "v":  # the very same view is allowed, another one is not
        memory = torch.zeros(call["v"].numel() + 16, device=device)
        call = call | {"v": memory[:-16].view(call["v"].shape), "out": memory[16:].view(call["v"].shape)}
    else:
        call = overlapping(call, name)
    assert f"`{name}`" in refused(op, call, "KDA121")


@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b", "initial_state"])
def test_out_over_an_input_of_decode(name: str, device: str):
    assert f"`{name}`" in refused("packed_decode_kda", overlapping(valid("packed_decode_kda", device), name), "KDA121")


@pytest.mark.parametrize("op", OPS)
def test_out_whose_rows_share_memory(op: str, device: str):
    """Written twice, an expanded `out` keeps one row of the result."""
    call = valid(op, device)
    assert "`out`" in refused(op, call | {"out": call["out"][..., :1, :].expand_as(call["out"])})


# Values of indices: found before anything is written, on a CPU always and elsewhere on request


@pytest.mark.parametrize("op", PREFILL_OPS)
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"initial_state_indices": [0, 7, 1]}, "KDA301"),
        ({"initial_state_indices": [0, 3, 3]}, "KDA302"),
        ({"cu_seqlens": [1, 5, 8, 14]}, "KDA303"),
        ({"cu_seqlens": [0, 8, 5, 14]}, "KDA303"),
        ({"cu_seqlens": [0, 5, 8, 15]}, "KDA303"),
        ({"track_chunk_idx": [0, 1, 0]}, "KDA307"),
        ({"snapshots": Snapshots([3], [0], [6])}, "KDA308"),
        ({"snapshots": Snapshots([-1], [0], [6])}, "KDA308"),
        ({"snapshots": Snapshots([0], [6], [6])}, "KDA308"),
        ({"snapshots": Snapshots([0], [3], [6])}, "KDA308"),
        ({"snapshots": Snapshots([0], [-64], [6])}, "KDA308"),
        ({"snapshots": Snapshots([0], [5], [7])}, "KDA308"),
        ({"snapshots": Snapshots([0, 1], [5, 3], [6, 6])}, "KDA302"),
        ({"snapshots": Snapshots([0], [5], [2])}, "KDA302"),
        ({"plan": plan_prefill(lengths=[5, 4, 5])}, "KDA120"),
    ],
    ids=str,
)
def test_wrong_indices_of_prefill(op: str, changes: Call, code: str):
    call = valid(op)
    call["initial_state_indices"] = torch.tensor([0, 1, 2])
    call |= {name: torch.tensor(value) if isinstance(value, list) else value for name, value in changes.items()}
    refused(op, call, code)
    refused(op, call | {"check": "values"}, code)


def test_128_tokens_have_no_chunk_2():
    call = prefill_inputs([128])
    call |= {"track_state": torch.zeros(1, 2, 16, 16), "track_chunk_idx": torch.tensor([2])}
    refused("chunk_kda", call, "KDA307")


@pytest.mark.parametrize(("indices", "code"), [([0, 1, 2, 3, 7], "KDA301"), ([0, 1, 2, 3, 3], "KDA302")])
def test_wrong_indices_of_decode(indices: list[int], code: str):
    refused("packed_decode_kda", valid("packed_decode_kda") | {"ssm_state_indices": torch.tensor(indices)}, code)


@pytest.mark.parametrize("op", PREFILL_OPS)
def test_values_are_checked_on_request(op: str, device: str):
    call = valid(op, device) | {"check": "values"}
    getattr(kdaserve, op)(**call)
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias"):
        bad = call[name].clone()
        bad.view(-1)[-1] = NAN
        assert f"`{name}`" in refused(op, call | {name: bad}, "KDA304")
    pool = call["initial_state"].clone()
    pool[int(call["initial_state_indices"][1]), 0, 3, 5] = NAN
    assert "initial_state" in refused(op, call | {"initial_state": pool}, "KDA304")
    plain = call | {"A_log": None, "dt_bias": None, "lower_bound": None, "g": -call["g"].abs()}
    getattr(kdaserve, op)(**plain)
    refused(op, plain | {"g": call["g"].abs()}, "KDA305")
    refused(op, call | {"beta": call["beta"] + 1}, "KDA306")
    refused(op, call | {"beta": call["beta"] - 1}, "KDA306")
    getattr(kdaserve, op)(**call | {"beta": 9 * call["beta"], "beta_is_raw": True})


def test_values_of_padding_are_nobodys_business(device: str):
    call = prefill_inputs([5, 3], device=device)
    call["cu_seqlens"][-1] = 7
    call["initial_state_indices"][0] = -1
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, 7:] = NAN
    kept = int(call["initial_state_indices"][1])
    call["initial_state"][[slot for slot in range(4) if slot != kept]] = NAN
    kdaserve.chunk_kda(**call, check="values")
    step = decode_inputs(3, device=device)
    step["ssm_state_indices"][1] = -1
    step["mixed_qkv"][1] = NAN
    kdaserve.packed_decode_kda(**step, check="values")


# Keywords, and what is remembered


@pytest.mark.parametrize("op", OPS)
def test_a_misspelt_keyword_raises(op: str):
    with pytest.raises(TypeError, match="lower_bond"):
        getattr(kdaserve, op)(**valid(op), lower_bond=-5.0)


@pytest.mark.parametrize("op", OPS)
def test_a_repeated_call_is_not_checked_again(op: str, monkeypatch: pytest.MonkeyPatch):
    checked = []
    check = contract._check_kind
    monkeypatch.setattr(contract, "_remembered", {})
    monkeypatch.setattr(contract, "_check_kind", lambda op, argument, *rest: (checked.append(argument.name), check(op, argument, *rest))[1])
    call, table = valid(op), [argument.name for argument in contract.TABLE[op]]
    getattr(kdaserve, op)(**call)
    assert checked == table
    getattr(kdaserve, op)(**call)
    getattr(kdaserve, op)(**valid(op))
    assert checked == table, "the same shapes, dtypes, strides and devices were checked again"
    wide = torch.zeros(*call["out"].shape[:-1], 64)
    getattr(kdaserve, op)(**call | {"out": wide[..., :16]})
    assert checked == 2 * table, "other strides need another look"


@pytest.mark.parametrize("op", OPS)
def test_a_refusal_is_never_remembered_as_right(op: str):
    first = contract.TABLE[op][0].name
    call = valid(op)
    for _ in range(3):
        refused(op, call | {first: torch.stack([call[first]] * 2, -1)[..., 0]}, "KDA109")
    getattr(kdaserve, op)(**call)
    refused(op, call | {first: call[first].long()}, "KDA105")
