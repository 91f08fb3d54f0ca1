"""Which backend runs a call: the one named and no other, or the best that takes it (S20)."""

import dataclasses
import itertools
import sys
import types
from collections.abc import Callable

import pytest
import torch

import kdaserve
from conftest import Call, Target
from kdaserve import BackendError, ContractError, InternalError, calls, contract, dispatch
from kdaserve.testing import assert_same_bits, decode_inputs, prefill_inputs

OPS = tuple(contract.TABLE)
FAKES = itertools.count()
ROWS = {backend.name: backend for backend in dispatch.BACKENDS}


def call_of(op: str, device: str = "cpu", **options) -> Call:
    return decode_inputs(3, device=device, **options) if op == "packed_decode_kda" else prefill_inputs([5, 70], device=device, **options)


def run(op: str, call: Call, backend: str = "auto") -> object:
    return getattr(kdaserve, op)(**call, backend=backend)


def table(monkeypatch: pytest.MonkeyPatch, *rows: dispatch.Backend) -> None:
    """Another table of backends, and nothing remembered of what those of the same names refused."""
    monkeypatch.setattr(dispatch, "BACKENDS", rows)
    monkeypatch.setattr(contract, "_remembered", {})


def fake(monkeypatch: pytest.MonkeyPatch, behaviour: Callable[[object], object], **changes) -> tuple[dispatch.Backend, list]:
    """A row like that of `torch` which runs `behaviour`, and the calls that reached it."""
    seen: list = []

    def entry(call: object) -> object:
        seen.append(call)
        return behaviour(call)

    module = f"fake_{next(FAKES)}_{{op}}"
    for op in OPS:
        monkeypatch.setitem(sys.modules, module.format(op=op), types.SimpleNamespace(run=entry))
    return dataclasses.replace(ROWS["torch"], **{"name": "fake", "module": module, **changes}), seen


def failing(exception: Exception) -> Callable[[object], object]:
    def behaviour(call: object) -> object:
        raise exception

    return behaviour


# What there is


def test_backends_lists_the_whole_table():
    rows = kdaserve.backends()
    assert [row.name for row in rows] == [backend.name for backend in dispatch.BACKENDS]
    assert {"torch", "reference"} <= {row.name for row in rows if row.available}
    for row in rows:
        assert row.role
        assert bool(row.reason) != row.available, f"{row.name}: a reason goes with what cannot run"
    assert not next(row for row in rows if row.name == "reference").automatic


@pytest.mark.parametrize("op", OPS)
def test_reference_is_for_those_who_name_it(op: str, device: str, monkeypatch: pytest.MonkeyPatch):
    choice = kdaserve.explain_choice(op, call_of(op, device))
    assert choice.backend != "reference"
    assert choice.reasons["reference"] == "runs only when named"
    table(monkeypatch, ROWS["reference"])
    with pytest.raises(BackendError, match=r"KDA204.*reference runs only when named"):
        run(op, call_of(op, device))
    assert kdaserve.explain_choice(op, call_of(op, device) | {"backend": "reference"}).backend == "reference"


# What is chosen


@pytest.mark.parametrize("op", OPS)
def test_auto_runs_what_explain_choice_says(op: str, device: str):
    call, same = call_of(op, device), call_of(op, device)
    choice = kdaserve.explain_choice(op, call)
    assert choice.reasons.keys() == ROWS.keys(), "a reason for every backend"
    assert choice.reasons[choice.backend] == "the best that takes the call"
    assert_same_bits(call["initial_state"], same["initial_state"], "explain_choice runs nothing")
    run(op, call)
    run(op, same, choice.backend)
    assert_same_bits(call["initial_state"], same["initial_state"], f"auto against {choice.backend}")


@pytest.mark.parametrize("op", OPS)
def test_auto_takes_the_first_that_can(op: str, monkeypatch: pytest.MonkeyPatch):
    first, seen = fake(monkeypatch, lambda call: (None, None))
    rest = [dataclasses.replace(first, name=name) for name in ("absent", "narrow")]
    rest[0] = dataclasses.replace(rest[0], unavailable=lambda: "there is no such GPU")
    rest[1] = dataclasses.replace(rest[1], dtypes=(torch.bfloat16,))
    table(monkeypatch, *rest, first, *ROWS.values())
    choice = kdaserve.explain_choice(op, call_of(op))
    assert choice.backend == "fake"
    assert "there is no such GPU" in choice.reasons["absent"]
    assert "float32" in choice.reasons["narrow"]
    assert choice.reasons["torch"] == "takes the call; fake is better"
    assert not seen, "explain_choice runs nothing"
    run(op, call_of(op))
    assert len(seen) == 1


def test_of_two_kinds_of_gpu_the_one_that_a_call_is_on_counts(monkeypatch: pytest.MonkeyPatch):
    """Whichever is the current one, and whichever it was when the question came first."""
    kinds = [(7, 5), (9, 0), (8, 0)]
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: kinds[0 if device is None else device.index])
    assert dispatch._no_gpu(dispatch.HOPPER) is None
    assert dispatch._no_gpu(((10, 0), (10, 0))) == (
        "it needs compute capability 10.0, there is compute capability 7.5 of cuda:0, compute capability 9.0 of cuda:1, "
        "compute capability 8.0 of cuda:2"
    )
    row = next(row for row in dispatch.BACKENDS if row.name == "sm90")
    call = calls.checked_call("chunk_kda", prefill_inputs([3], k_dim=128, v_dim=128, dtype=torch.bfloat16))
    for index in range(3):
        layout = dataclasses.replace(call.layout, device=torch.device("cuda", index), refusals={})
        refusal = row.refusal(dataclasses.replace(call, layout=layout))
        assert (refusal or {}).get("missing") == (None if index == 1 else f"compute capability {'.'.join(map(str, kinds[index]))} of cuda:{index}")
    assert "compute capability 9.0" in refusal["supported"]


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_a_need_like_any_other(op: str, monkeypatch: pytest.MonkeyPatch):
    row, _ = fake(monkeypatch, lambda call: (None, None), gradients=False)
    table(monkeypatch, row, ROWS["torch"])
    call = call_of(op)
    assert kdaserve.explain_choice(op, call).backend == "fake"
    learnt = call | {"A_log": call["A_log"].clone().requires_grad_()}
    assert kdaserve.explain_choice(op, learnt).backend == "torch"
    with pytest.raises(BackendError, match=r"KDA203.*gradients"):
        run(op, learnt, "fake")
    with torch.no_grad():
        assert kdaserve.explain_choice(op, learnt).backend == "fake"


@pytest.mark.parametrize("op", OPS)
def test_explain_choice_checks_the_call(op: str):
    call = call_of(op)
    with pytest.raises(ContractError, match=r"KDA105"):
        kdaserve.explain_choice(op, call | {"initial_state": call["initial_state"].long()})
    with pytest.raises(TypeError, match="lower_bond"):
        kdaserve.explain_choice(op, call | {"lower_bond": -5.0})
    with pytest.raises(BackendError, match=r"KDA201"):
        kdaserve.explain_choice(op, call | {"backend": "cudnn"})


def test_explain_choice_knows_the_ops():
    with pytest.raises(ContractError, match=r"KDA125.*chunk_kda, recurrent_kda, packed_decode_kda"):
        kdaserve.explain_choice("chunk", call_of("chunk_kda"))


# A name is a name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["Torch", "cudnn", "", None, 3])
def test_unknown_name(op: str, name: object):
    call = call_of(op)
    before = call["initial_state"].clone()
    with pytest.raises(BackendError, match=r"KDA201.*Known names: auto, .*torch"):
        run(op, call, name)
    assert_same_bits(call["initial_state"], before, "pool after the refusal")


@pytest.mark.parametrize("op", OPS)
def test_named_backend_that_cannot_run_here(op: str, monkeypatch: pytest.MonkeyPatch):
    row, seen = fake(monkeypatch, lambda call: (None, None), unavailable=lambda: "there is no such GPU")
    table(monkeypatch, row, ROWS["torch"])
    call = call_of(op)
    before = call["initial_state"].clone()
    with pytest.raises(BackendError, match=r"KDA202.*fake.*there is no such GPU"):
        run(op, call, "fake")
    assert not seen
    assert_same_bits(call["initial_state"], before, "no other backend ran")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"devices": ("xpu",)}, "device cpu"),
        ({"dtypes": (torch.float16,)}, "initial_state in float32"),
        ({"short": ("initial_state",)}, "initial_state in float32"),
        ({"dim": 128}, "K = 16, V = 16"),
        ({"ops": ()}, "Missing: "),
    ],
    ids=["device", "dtype", "short", "dim", "op"],
)
def test_named_backend_that_does_not_take_the_call(op: str, changes: dict, missing: str, monkeypatch: pytest.MonkeyPatch):
    row, seen = fake(monkeypatch, lambda call: (None, None), **changes)
    table(monkeypatch, row, ROWS["torch"])
    call = call_of(op)
    before = call["initial_state"].clone()
    with pytest.raises(BackendError) as caught:
        run(op, call, "fake")
    text = str(caught.value)
    assert caught.value.code == "KDA203"
    assert missing in text
    for word in ("Required: ", "Supported: ", "Missing: "):
        assert word in text
    assert not seen
    assert_same_bits(call["initial_state"], before, "no other backend ran")


@pytest.mark.parametrize("op", OPS)
def test_tensors_where_nothing_runs(op: str):
    call = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call_of(op).items()}
    with pytest.raises(BackendError, match=r"KDA204.*device meta"):
        run(op, call)
    with pytest.raises(BackendError, match=r"KDA203.*device meta"):
        run(op, call, "torch")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["auto", "fake"])
def test_a_failing_backend_is_not_replaced(op: str, name: str, monkeypatch: pytest.MonkeyPatch):
    row, _ = fake(monkeypatch, failing(ZeroDivisionError("a fault of ours")))
    table(monkeypatch, row, ROWS["torch"])
    call = call_of(op)
    before = call["initial_state"].clone()
    with pytest.raises(InternalError, match=r"KDA501.*fake.*ZeroDivisionError: a fault of ours") as caught:
        run(op, call, name)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert_same_bits(call["initial_state"], before, "no other backend ran")


@pytest.mark.parametrize("exception", [MemoryError("full"), torch.OutOfMemoryError("full"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_what_is_no_fault_of_ours_passes(exception: Exception, monkeypatch: pytest.MonkeyPatch):
    row, _ = fake(monkeypatch, failing(exception))
    table(monkeypatch, row)
    with pytest.raises(type(exception)):
        run("chunk_kda", call_of("chunk_kda"))


def test_errors_of_the_catalogue_pass(monkeypatch: pytest.MonkeyPatch):
    row, _ = fake(monkeypatch, failing(kdaserve.errors.error("KDA126", problem="for a test")))
    table(monkeypatch, row)
    with pytest.raises(ContractError, match=r"KDA126"):
        run("chunk_kda", call_of("chunk_kda"))


# The tree


def test_every_backend_has_the_ops_that_it_names(target: Target):
    for op in ROWS[target.backend].ops:
        run(op, call_of(op, target.device), target.backend)
