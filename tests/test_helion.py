"""What is particular to the backend `helion`: sizes of one, generated code on disk, tuned configurations, versions that do not work together."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("helion")

import kdaserve
from commands import run
from conftest import Call, Target, serving_targets
from helpers import DECODE, OPS
from kdaserve import BackendError, TuningError, contract, dispatch
from kdaserve.ops.chunk_kda.helion.chain import chain_kernel
from kdaserve.ops.chunk_kda.helion.prepare import prepare_kernel
from kdaserve.ops.helion import launch as launches
from kdaserve.ops.helion import source, tuned
from kdaserve.ops.helion.launch import Kernel
from kdaserve.ops.jit import chunking
from kdaserve.ops.packed_decode_kda.helion import packed_decode_kda_kernel
from kdaserve.ops.recurrent_kda.helion import recurrent_kda_kernel
from kdaserve.testing import assert_close, decode_inputs, prefill_inputs

KERNELS: tuple[Kernel, ...] = (prepare_kernel, chain_kernel, packed_decode_kda_kernel, recurrent_kda_kernel)
TARGETS = [
    pytest.param(target, marks=[pytest.mark.gpu] if device == "cuda" else [], id=str(target))
    for device in ("cpu", "cuda")
    for target in serving_targets(device)
    if target.backend == "helion"
]
every_target = pytest.mark.parametrize("helion", TARGETS)
here = pytest.mark.skipif(not dispatch.INTERPRETED, reason="with a GPU the backend does not take tensors on the CPU")


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has run nothing yet."""
    monkeypatch.setattr(contract, "_remembered", {})
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "_generated", {})
        monkeypatch.setattr(kernel, "compiled", {})


@pytest.fixture
def configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the backend reads, not there yet."""
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "tuned" / "helion.json"))
    return tmp_path / "tuned" / "helion.json"


def made() -> int:
    """Kernels generated and compiled so far."""
    return sum(len(kernel._generated) + len(kernel.compiled) for kernel in KERNELS)


def check(helion: Target, op: str, call: Call) -> None:
    if op == DECODE:
        helion.check_decode(call)
    else:
        helion.check_prefill(op, call)


# Sizes of one

ONES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "one token": ({"lengths": [1]}, [{"lengths": [2]}, {"lengths": [130]}, {"lengths": [70, 0, 3]}]),
    "one sequence": ({"lengths": [70]}, [{"lengths": [5, 70]}, {"lengths": [0, 1, 0, 64]}]),
    "one head": ({"lengths": [33], "heads": 1}, [{"lengths": [33], "heads": 2}, {"lengths": [33], "heads": 3}]),
    "one slot": ({"lengths": [20], "slots": 1}, [{"lengths": [20], "slots": 2}, {"lengths": [20, 7], "slots": 9}]),
    "one row a batch": ({"lengths": [1], "batched": True}, [{"lengths": [3, 3], "batched": True}, {"lengths": [65], "batched": True}]),
    "nothing": ({"lengths": [0]}, [{"lengths": [1]}, {"lengths": [66]}]),
}
"""What comes first, and what comes later."""


def sized(op: str, device: str, lengths: list[int], batched: bool = False, **sizes: Any) -> Call:
    if op == DECODE:
        return decode_inputs(len(lengths), device=device, **sizes)
    return prefill_inputs(lengths, batched=batched, device=device, **sizes)


@pytest.mark.usefixtures("cold")
@every_target
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", ONES)
def test_a_size_of_one_comes_first(helion: Target, op: str, case: str):
    """Later, larger calls are right, and nothing is generated or compiled for them; but for decode, whose constants the heads are."""
    first, later = ONES[case]
    check(helion, op, sized(op, helion.device, **first))
    before = made()
    assert before > 0 or case == "nothing"
    for sizes in later:
        check(helion, op, sized(op, helion.device, **sizes))
        if case == "nothing":  # no chunk, no launch
            before = max(before, made())
        if "heads" not in sizes or op == "chunk_kda":
            assert made() == before, sizes


@here
@pytest.mark.usefixtures("cold")
def test_every_size_takes_the_same_kernels():
    """A choice by size would be visible in the reasons; there is none."""
    for lengths in ([1], [4000]):
        choice = kdaserve.explain_choice("chunk_kda", {**prefill_inputs(lengths), "backend": "helion"})
        assert choice.backend == "helion"


@here
@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("op", OPS)
def test_after_a_warmup_nothing_is_made(op: str):
    model = {"heads": 2, "k_dim": 16, "v_dim": 16, "dtype": torch.float32, "lower_bound": -5.0, "index_dtypes": (torch.int32,)}
    report = kdaserve.warmup(**model, device="cpu", backend="helion", ops=(op,), beta_is_raw=False, layouts=("packed",))
    assert report.compiled > 0
    before = made()
    for lengths in ([1], [70, 5]):
        call = sized(op, "cpu", lengths)
        getattr(kdaserve, op)(**call | {"use_qk_l2norm_in_kernel": True}, backend="helion")
    assert made() == before


@here
@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("op", OPS)
def test_no_tensor_outlives_its_call(op: str):
    """What is kept of a call to launch the next one faster has none of its memory."""
    call = sized(op, "cpu", [70, 5])
    getattr(kdaserve, op)(**call, backend="helion")
    own = [x for x in call.values() if isinstance(x, torch.Tensor)]
    places = {x.data_ptr() for x in own}
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.device.type == "cpu" and x.numel()]
    assert not [x.shape for x in tensors if x.data_ptr() in places and not any(x is y for y in own)]


# Generated code


@here
@pytest.mark.usefixtures("cold")
def test_generated_code_is_found_on_disk(monkeypatch: pytest.MonkeyPatch):
    call = decode_inputs(2)
    kdaserve.packed_decode_kda(**call, backend="helion")
    packed_decode_kda_kernel._generated.clear()
    contract._remembered.clear()
    monkeypatch.setattr(Kernel, "helion", None)  # who generates again calls this
    kdaserve.packed_decode_kda(**call, backend="helion")


def test_other_facts_are_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = [source.load("f", facts, lambda number=number: f"def f(): return {number}")() for number, facts in enumerate([("a",), ("b",), ("a",)])]
    assert made == [0, 1, 0]


# Tuned configurations


@here
@pytest.mark.usefixtures("cold")
def test_a_tuned_configuration_is_used(configurations: Path, monkeypatch: pytest.MonkeyPatch):
    tune = importlib.import_module("kdaserve.ops.helion.tune")
    searched = []

    def search(seen: Any, effort: str, seconds: int | None) -> dict[str, Any]:
        assert all(x is None or x.data_ptr() for x in seen.tensors)
        assert len(seen.arguments()) == len([*packed_decode_kda_kernel.arguments, *packed_decode_kda_kernel.constants])
        searched.append((effort, seconds))
        return {"num_warps": 1, "num_stages": 5}

    monkeypatch.setattr(tune, "search", search)
    monkeypatch.setattr(tune, "milliseconds", lambda seen, config: 1.0 if "num_stages" in config else 2.0)
    shape = ("--heads", "2", "--k-dim", "16", "--v-dim", "16", "--dtype", "fp32", "--device", "cpu", "--batch", "2")
    result = run("tune", "helion", "--op", "packed_decode_kda", *shape, "--seconds", "7")
    assert f"1 configurations kept in {configurations}" in result.stdout.replace("\n", "")
    assert searched == [("quick", 7)]
    (entry,) = json.loads(configurations.read_text())
    assert entry["evidence"]["milliseconds"] == 1.0
    assert entry["evidence"]["versions"].keys() == {"helion", "torch", "triton"}
    for kernel in KERNELS:
        kernel._generated.clear()
    contract._remembered.clear()
    kdaserve.packed_decode_kda(**decode_inputs(2), backend="helion")
    (generated,) = packed_decode_kda_kernel._generated.values()
    assert generated.config == {"num_warps": 1, "num_stages": 5}
    kdaserve.packed_decode_kda(**decode_inputs(2, k_dim=32), backend="helion")  # of another shape
    assert [*packed_decode_kda_kernel._generated.values()][1].config == {"num_warps": 1}


@here
@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("content", ["[", "{}", '[{"kernel": "chain_kernel"}]', "misfit"])
def test_a_damaged_file_is_not_passed_over(configurations: Path, content: str):
    configurations.parent.mkdir()
    if content == "misfit":
        constants = {"H": 2, "HV": 2, "K": 16, "V": 16, "BK": 16, "BV": 16, "GATE": "bounded", "L2NORM": True}
        dtypes = ["float32"] * 7 + ["int32", "int", "int", "float", "float"]
        what = {"kernel": "packed_decode_kda_kernel", "gpu": "interpreter", "dtypes": dtypes, "constants": constants}
        content = json.dumps([{**what, "config": {"warps": 3}, "evidence": {}}])
    configurations.write_text(content)
    with pytest.raises(TuningError, match="KDA401"):
        kdaserve.packed_decode_kda(**decode_inputs(2), backend="helion")


# Versions


@pytest.fixture
def unavailable(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The reason, asked for anew."""
    dispatch._helion_unavailable.cache_clear()
    yield dispatch._helion_unavailable
    dispatch._helion_unavailable.cache_clear()


@here
def test_versions_that_do_not_work_together(unavailable: Any, monkeypatch: pytest.MonkeyPatch):
    def fails(name: str) -> None:
        raise ImportError(f"cannot import name 'new' from '{name}'")

    monkeypatch.setattr(dispatch.importlib, "import_module", fails)
    reason = unavailable()
    assert all(word in reason for word in ("helion 1.", "torch 2.", "triton 3.", "do not work together", "cannot import name 'new'"))
    with pytest.raises(BackendError, match=r"KDA202.*do not work together"):
        kdaserve.packed_decode_kda(**decode_inputs(2), backend="helion")


@here
def test_a_helion_that_is_too_old(unavailable: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "OLDEST_HELION", (99, 0))
    assert unavailable().startswith("it needs helion 99.0, installed is 1.")


def test_helion_is_imported_when_it_is_named_and_not_before():
    call = "from kdaserve.testing import decode_inputs; kdaserve.packed_decode_kda(**decode_inputs(2))"
    code = f"import sys, kdaserve; {call}; print('helion' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


# Forms


@here
@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("form", [*chunking.CHAINS, chunking.ALONE], ids=lambda form: f"{form.slice}-{'transposed' if form.transposed else 'plain'}")
def test_every_form_of_the_chain(form: chunking.Chain, monkeypatch: pytest.MonkeyPatch):
    """The rule takes one of them in the interpreter, and the others on a GPU."""
    monkeypatch.setattr(chunking, "chain", lambda *_: form)
    call = prefill_inputs([70, 0, 3], k_dim=48, v_dim=80, heads=1)
    call |= {"track_state": torch.zeros(3, 1, 80, 48), "track_chunk_idx": torch.tensor([1, -1, -1]), "output_intermediate_states": True}
    free = [slot for slot in range(5) if slot not in call["initial_state_indices"].tolist()]
    Target("helion", "cpu").check_prefill("chunk_kda", call, snapshots=kdaserve.Snapshots([0, 2], [64, 3], free))


# Records

REPETITIONS = {"one too few": 7, "an eighth": 8, "most": 60, "all": 63, "of a rest of 21 tokens, three": 3}
"""By chunk, how many of its tokens repeat an earlier one; the last chunk is not full."""


def with_repetitions() -> Call:
    """One sequence of two heads with keys a little shorter than 1; the second has a channel, which no key has, that is forgotten at once."""
    call = prefill_inputs([64 * (len(REPETITIONS) - 1) + 21], heads=2, gate="none")
    call["g"] = torch.full_like(call["g"], -1e-3)
    call["g"][:, :, 1, 3] = -50.0
    call["k"][..., 3] = 0.0
    call["k"] = 0.9 * torch.nn.functional.normalize(call["k"], dim=-1)
    generator = torch.Generator().manual_seed(0)
    for chunk, count in zip(call["k"][0].split(64), REPETITIONS.values(), strict=True):
        for t in sorted((torch.randperm(len(chunk) - 1, generator=generator)[:count] + 1).tolist()):
            chunk[t] = chunk[int(torch.randint(t, (1,), generator=generator))]
    return call


def by_helion(call: Call, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The records between the two kernels, one a chunk and head."""
    seen: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(launches, "OBSERVERS", [lambda launch, tensors, _: seen.update(zip(launch.views, tensors, strict=True))])
    kdaserve.chunk_kda(**call, backend="helion")
    kd, qd, ke = seen["rows"].view(-1, 3, 64, 16).unbind(1)
    qk, M = seen["pairs"].view(-1, 2, 64, 64).unbind(1)
    return {"kd": kd, "qd": qd, "ke": ke, "qk": qk, "M": M, "decay": seen["decay"].view(-1, 16)}


def by_triton(call: Call, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The same."""
    module = importlib.import_module("kdaserve.ops.chunk_kda.triton")
    seen: list[list[torch.Tensor]] = []
    pointers = module.Launches._chain_pointers

    def watched(*arguments: Any) -> Any:
        seen.append(arguments[-1])
        return pointers(*arguments)

    monkeypatch.setattr(module.Launches, "_chain_pointers", staticmethod(watched))
    kdaserve.chunk_kda(**call, backend="triton")
    header, tiles = seen[-1]
    kd, qd, ke = tiles[:, : 3 * 64 * 16].view(-1, 3, 64, 16).unbind(1)
    qk, M = tiles[:, 3 * 64 * 16 :].view(-1, 64, 2, 64).unbind(2)
    return {"kd": kd, "qd": qd, "ke": ke, "qk": qk, "M": M, "decay": header[:, :16]}


@here
def test_records_of_chunks_in_which_keys_repeat(monkeypatch: pytest.MonkeyPatch):
    """They are those of `triton`, in the basis that the chunk takes there."""
    call = with_repetitions()
    found, wanted = by_helion(call, monkeypatch), by_triton(call, monkeypatch)
    for i, (what, head) in enumerate(itertools.product(REPETITIONS, ("head", "head of wide decay"))):
        for name, tile in wanted.items():
            assert_close(found[name][i], tile[i].double(), 2e-5, f"{name} of the {head} in the chunk whose repetitions are: {what}")
        if what == "all":
            ke = found["ke"][i]
            assert ke[:-1].norm() < 0.2 * ke[-1].norm()
