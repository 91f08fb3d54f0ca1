"""`kdaserve.warmup`: afterwards no call of the model compiles, whatever its lengths, batch, strides and alignment.

Without a GPU kernels are recorded in place of launched: a launch asks for a compiled form by types, constants and memory, and what calls ask for must
be what `warmup` asked for. That such a form is compiled once for all numbers is tested in `test_triton_compile.py`; the last test here counts
compilations themselves.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import kdaserve
from commands import run
from kdaserve import KdaError, contract, dispatch
from kdaserve.ops.chunk_kda import sm90
from kdaserve.ops.chunk_kda.triton import config
from kdaserve.ops.chunk_kda.triton.chain import chain_kernel
from kdaserve.ops.chunk_kda.triton.prepare import prepare_kernel
from kdaserve.ops.forms import Form
from kdaserve.ops.jit import chunking
from kdaserve.ops.packed_decode_kda.triton import packed_decode_kda_kernel
from kdaserve.ops.recurrent_kda.triton import recurrent_kda_kernel
from served import Served

KERNELS = (prepare_kernel, chain_kernel, packed_decode_kda_kernel, recurrent_kda_kernel, sm90.prepare_kernel, sm90.chain_kernel)
HOPPER = (132, 227 * 1024)
"""Multiprocessors of an H200, and bytes of shared memory of a program."""
interpreted = pytest.mark.skipif(not dispatch.INTERPRETED, reason="with a GPU the triton backend does not take tensors on the CPU")

Settings = dict[str, Any]
MODELS: dict[str, Settings] = {
    "kimi": {"heads": 12, "lower_bound": -5.0},
    "softplus-snapshots": {"heads": 4, "k_dim": 64, "v_dim": 64, "snapshots": True, "ops": ("chunk_kda", "recurrent_kda")},
    "one-head-all-states": {
        "heads": 1, "k_dim": 16, "v_dim": 80, "output_intermediate_states": True, "track_state": True, "snapshots": True, "lower_bound": -20.0,
        "layouts": ("packed",), "g_dtype": torch.float32, "beta_dtype": torch.float32, "pool_dtype": torch.bfloat16,
        "index_dtypes": (torch.int32,),
    },
    "many-value-heads": {
        "heads": 16, "v_heads": 128, "k_dim": 16, "v_dim": 16, "dt_bias": False, "dtype": torch.float16, "use_qk_l2norm_in_kernel": False,
    },
    "log-decay-fp32": {"heads": 3, "A_log": False, "beta_is_raw": False, "dtype": torch.float32, "index_dtypes": (torch.int32,), "v_dim": 96},
    "hopper": {"backend": "sm90", "heads": 2, "v_heads": 4, "ops": ("chunk_kda",), "snapshots": True, "index_dtypes": (torch.int32,)},
    "int64-batched": {"heads": 8, "k_dim": 32, "v_dim": 32, "index_dtypes": (torch.int64,), "layouts": ("batched",), "track_state": True},
}  # fmt: skip


def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has run nothing yet."""
    monkeypatch.setattr(contract, "_remembered", {})
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "compiled", {})


class Recorded:
    """In place of a kernel: it can be launched and does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: None


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms that a Hopper GPU would be asked for, and no kernel runs."""
    cold(monkeypatch)
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "forms", dict.fromkeys(kernel.forms, Recorded()))
    for module in (config, chunking):
        monkeypatch.setattr(module, "INTERPRETED", False)
    for module in (sm90, chunking):
        monkeypatch.setattr(module, "processor", lambda device: HOPPER)
    here = [dataclasses.replace(row, devices=("cpu",), unavailable=lambda: None) if row.name == "sm90" else row for row in dispatch.BACKENDS]
    monkeypatch.setattr(dispatch, "BACKENDS", tuple(here))


def asked_for() -> set[tuple]:
    """What has been launched since `cold`."""
    return {(kernel.name, *key) for kernel in KERNELS for key in kernel.compiled}


def new_forms(settings: Settings, calls: Iterable[tuple[str, dict[str, Any]]]) -> set[tuple]:
    """What calls ask for that nothing asked for before."""
    before = asked_for()
    with torch.inference_mode():
        for op, call in calls:
            getattr(kdaserve, op)(**call, backend=settings["backend"])
    return asked_for() - before


def on(device: str, settings: Settings) -> Settings:
    return {"backend": "triton", **settings, "device": device}


@interpreted
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("model", MODELS)
def test_calls_ask_for_nothing_new(model: str):
    settings = on("cpu", MODELS[model])
    report = kdaserve.warmup(**settings)
    assert report.compiled == len(asked_for()) > 0
    assert set(report.backends.values()) == {settings["backend"]}
    served = Served(settings)
    assert new_forms(settings, served.calls()) == set()
    assert kdaserve.warmup(**settings).compiled == 0


@interpreted
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("model", MODELS)
def test_calls_ask_for_all_of_it(model: str):
    """The other way round, so that the calls above are wide enough and the warm-up compiles nothing in vain."""
    settings = on("cpu", MODELS[model])
    wanted = set[tuple]()
    for seed in range(10):
        wanted |= new_forms(settings, Served(settings, seed).calls())
    before = asked_for()
    assert before == wanted
    kdaserve.warmup(**settings)
    vain = asked_for() - before
    assert len(vain) <= len(before) // 10, f"calls never asked for {sorted(map(str, vain))}"


def one_kind_of_memory(forms: list[Form]) -> list[Form]:
    return [form for form in forms if form.aligned]


def one_sequence(forms: list[Form]) -> list[Form]:
    return [form for form in forms if form.sequences == 1]


@interpreted
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("op", "left_out"),
    [
        *((op, one_kind_of_memory) for op in ("chunk_kda", "recurrent_kda", "packed_decode_kda")),
        *((op, one_sequence) for op in ("chunk_kda", "packed_decode_kda")),
    ],
)
def test_a_form_that_a_backend_forgets_is_found(monkeypatch: pytest.MonkeyPatch, op: str, left_out: Callable[[list[Form]], list[Form]]):
    module = importlib.import_module(f"kdaserve.ops.{op}.triton")
    whole = module.forms
    monkeypatch.setattr(module, "forms", lambda call: left_out(whole(call)))
    settings = on("cpu", MODELS["kimi"]) | {"ops": (op,)}
    kdaserve.warmup(**settings)
    assert new_forms(settings, Served(settings).calls())


@interpreted
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    "left_out",
    [
        {"layouts": ("packed",)}, {"layouts": ("batched",)}, {"index_dtypes": (torch.int32,)}, {"ops": ("chunk_kda", "recurrent_kda")},
        {"snapshots": False}, {"track_state": False}, {"output_intermediate_states": False}, {"dt_bias": False}, {"lower_bound": None},
        {"dtype": torch.float32}, {"g_dtype": torch.float32}, {"beta_dtype": torch.float32}, {"pool_dtype": torch.bfloat16}, {"k_dim": 64},
        {"use_qk_l2norm_in_kernel": False}, {"beta_is_raw": False}, {"A_log": False, "lower_bound": None},
    ],
    ids=str,
)  # fmt: skip
def test_every_argument_matters(left_out: Settings):
    """Calls of another model than the one warmed up compile, and the count sees it."""
    settings = on("cpu", {"heads": 2, "k_dim": 32, "v_dim": 32, "lower_bound": -5.0, "snapshots": True, "track_state": True})
    settings |= {"output_intermediate_states": True}
    kdaserve.warmup(**{**settings, **left_out})
    assert new_forms(settings, Served(settings).calls())


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor made."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return made


@interpreted
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("heads", [1, 12, 64, 128])
def test_tensors_are_tiny(heads: int):
    settings = on("cpu", {"heads": heads, "output_intermediate_states": True, "track_state": True, "index_dtypes": (torch.int32,)})
    with Largest() as largest:
        kdaserve.warmup(**settings)
    assert 0 < largest.nbytes <= 20 * 2**20


@interpreted
def test_calls_are_real(monkeypatch: pytest.MonkeyPatch):
    """Kernels run, and tell how far they are."""
    cold(monkeypatch)
    settings = on("cpu", {"heads": 1, "k_dim": 16, "v_dim": 16, "index_dtypes": (torch.int32,), "layouts": ("packed",), "snapshots": True})
    told: list[tuple[int, int]] = []
    report = kdaserve.warmup(**settings, progress=lambda done, steps: told.append((done, steps)))
    steps = told[0][1]
    assert told == [(done, steps) for done in range(steps + 1)]
    assert report.compiled == len(asked_for()) > 0


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_nothing_to_compile(backend: str):
    report = kdaserve.warmup(heads=2, lower_bound=-5.0, device="cpu", backend=backend)
    assert report.compiled == 0
    assert report.backends == dict.fromkeys(("chunk_kda", "recurrent_kda", "packed_decode_kda"), "torch" if backend == "auto" else backend)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"heads": 0}, "KDA125"), ({"heads": 2.0}, "KDA108"), ({"heads": True}, "KDA108"), ({"v_heads": 3}, "KDA110"), ({"v_heads": -2}, "KDA125"),
        ({"k_dim": 17}, "KDA111"), ({"v_dim": 512}, "KDA111"), ({"dtype": "bf16"}, "KDA105"), ({"dtype": None}, "KDA105"),
        ({"pool_dtype": torch.int32}, "KDA105"), ({"g_dtype": torch.int8}, "KDA105"), ({"index_dtypes": (torch.int16,)}, "KDA105"),
        ({"index_dtypes": torch.int32}, "KDA108"), ({"layouts": "packed"}, "KDA108"), ({"layouts": ("ragged",)}, "KDA125"),
        ({"ops": ("decode",)}, "KDA125"), ({"snapshots": 1}, "KDA108"), ({"dt_bias": None}, "KDA108"), ({"device": "abacus"}, "KDA125"),
        ({"lower_bound": 5.0}, "KDA114"), ({"lower_bound": -5.0, "A_log": False}, "KDA113"), ({"backend": "pytorch"}, "KDA201"),
        ({"device": "meta"}, "KDA204"), ({"device": "meta", "backend": "torch"}, "KDA203"),
        ({"layouts": ()}, "KDA125"), ({"ops": []}, "KDA125"), ({"index_dtypes": ()}, "KDA125"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments(wrong: Settings, code: str):
    with pytest.raises(KdaError) as caught:
        kdaserve.warmup(**{"heads": 2, "device": "cpu", **wrong})
    assert caught.value.code == code


# The command

OPTIONS = ("--heads", "1", "--k-dim", "16", "--v-dim", "16", "--layout", "packed", "--index-dtype", "int32", "--device", "cpu")


@interpreted
@pytest.mark.usefixtures("narrow_plain_terminal", "recorded")
def test_command():
    report = json.loads(run("warmup", *OPTIONS, "--backend", "triton", "--lower-bound", "-5", "--json").stdout)
    assert report["compiled"] == len(asked_for()) > 0
    assert report["backends"] == dict.fromkeys(("chunk_kda", "recurrent_kda", "packed_decode_kda"), "triton")
    shown = run("warmup", *OPTIONS, "--backend", "triton", "--snapshots", "--op", "chunk_kda").stdout.splitlines()
    assert shown[0] == "chunk_kda: triton"
    assert "kernels compiled or found on disk" in shown[1]
    assert "nothing to compile" in run("warmup", *OPTIONS).stdout


@pytest.mark.usefixtures("narrow_plain_terminal")
@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--device", "abacus"), 1, "KDA125"),
        (("--k-dim", "17"), 1, "KDA111"),
        (("--dtype", "fp8"), 2, "'fp8' is none of bf16, fp16, fp32"),
        (("--index-dtype", "int16"), 2, "'int16' is none of int32, int64"),
        (("--heads", "0"), 2, "--heads"),
    ],
    ids=str,
)
def test_wrong_options(options: tuple[str, ...], code: int, said: str):
    result = run("warmup", *OPTIONS, *options, code=code)
    assert said in " ".join(result.stderr.split())
    assert not result.stdout


# On a GPU

GPU_MODELS: dict[str, Settings] = {
    "kimi": MODELS["kimi"],
    "snapshots": {"heads": 4, "snapshots": True, "index_dtypes": (torch.int32,), "pool_dtype": torch.bfloat16},
    "hopper": MODELS["hopper"],
}


def compilations() -> int:
    """Entries of the caches that Triton looks into before it compiles."""
    caches = [cache for kernel in KERNELS for form in kernel.forms.values() for cache, *_ in form.device_caches.values()]
    return sum(map(len, caches))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("model", GPU_MODELS)
def test_nothing_compiles(monkeypatch: pytest.MonkeyPatch, model: str):
    cold(monkeypatch)
    for kernel in KERNELS:
        for form in kernel.forms.values():
            monkeypatch.setattr(form, "device_caches", collections.defaultdict(form.create_binder))
    settings = on("cuda", GPU_MODELS[model])
    status = next(status for status in kdaserve.backends() if status.name == settings["backend"])
    if not status.available:
        pytest.skip(status.reason)  # sm90 on a GPU that is no Hopper
    op, call = next(Served(settings).calls())
    new_forms(settings, [(op, call)])
    assert compilations() > 0, "a call that nothing was compiled for is not counted"
    first = compilations()
    report = kdaserve.warmup(**settings)
    assert report.compiled > 0
    assert compilations() == len(asked_for()) >= first + report.compiled
    before = compilations()
    assert new_forms(settings, Served(settings).calls()) == set()
    torch.cuda.synchronize()
    assert compilations() == before
