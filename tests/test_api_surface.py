"""The public names and signatures that others build on, and what an import costs."""

import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import kdaserve

PREFILL = (
    "q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, "
    "A_log=None, dt_bias=None, lower_bound=None, output_intermediate_states=False, *, beta_is_raw=False, track_state=None, "
    "track_chunk_idx=None, chunk_indices=None, chunk_offsets=None, snapshots=None, plan=None, out=None, backend='auto', check='shapes'"
)
SIGNATURES = {
    "chunk_kda": PREFILL,
    "recurrent_kda": PREFILL,
    "packed_decode_kda": (
        "mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel=False, lower_bound=None, *, "
        "backend='auto', check='shapes'"
    ),
    "plan_prefill": "cu_seqlens=None, *, lengths=None, device=None",
    "Snapshots": "sequence, tokens, slot",
    "StatePool": (
        f"slots, layers, *, v_heads, k_dim, v_dim, conv_channels=0, conv_width=4, dtype={torch.float32!r}, conv_dtype={torch.float32!r}, device='cpu'"
    ),
    "StatePool.recurrent": "self, layer",
    "StatePool.conv": "self, layer",
    "StatePool.allocate": "self",
    "StatePool.free": "self, slot",
    "StatePool.copy": "self, source, target",
    "StatePool.fork": "self, slot",
    "backends": "",
    "explain": "code",
    "explain_choice": "op, arguments",
    "guards.gates_cover_q": "q, g, beta",
    "warmup": (
        f"*, heads, v_heads=None, k_dim=128, v_dim=128, dtype={torch.bfloat16!r}, g_dtype=None, beta_dtype=None, pool_dtype={torch.float32!r}, "
        "A_log=True, dt_bias=True, lower_bound=None, use_qk_l2norm_in_kernel=True, beta_is_raw=True, output_intermediate_states=False, "
        f"track_state=False, snapshots=False, layouts=('packed', 'batched'), index_dtypes=({torch.int32!r}, {torch.int64!r}), "
        "ops=('chunk_kda', 'recurrent_kda', 'packed_decode_kda'), device='cuda', backend='auto', progress=None"
    ),
}
ATTRIBUTES = {
    "PrefillPlan": {"lengths", "cu_seqlens", "chunk_offsets", "chunk_indices", "tokens"},
    "BackendStatus": {"name", "role", "available", "reason", "automatic"},
    "Choice": {"backend", "reasons"},
    "Snapshots": {"sequence", "tokens", "slot"},
    "StatePool": {"slots", "free_slots", "nbytes", "recurrent", "conv", "allocate", "free", "copy", "fork"},
    "KdaError": {"code", "details"},
    "WarmupReport": {"backends", "compiled", "seconds"},
}
NAMES = {
    "BackendError", "BackendStatus", "Choice", "ContractError", "ContractTypeError", "InternalError", "KdaError", "PoolError", "PrefillPlan",
    "Snapshots", "StatePool", "TuningError", "ValuesError", "WarmupReport", "backends", "chunk_kda", "explain", "explain_choice", "guards",
    "packed_decode_kda", "plan_prefill", "recurrent_kda", "warmup",
}  # fmt: skip


def public(name: str) -> object:
    found: object = kdaserve
    for part in name.split("."):
        found = getattr(found, part)
    return found


def rendered(function: Callable) -> str:
    """A signature without annotations."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(parameters))[1:-1]


def callables(module: object) -> Iterator[tuple[str, Callable]]:
    """Public functions, classes and methods of a module."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in names:
        found = getattr(module, name)
        if inspect.isfunction(found) and found.__module__.startswith("kdaserve"):
            yield name, found
        elif inspect.isclass(found) and found.__module__.startswith("kdaserve"):
            yield from ((f"{name}.{n}", f) for n, f in vars(found).items() if inspect.isfunction(f) and (n == "__init__" or not n.startswith("_")))


def test_public_names():
    assert set(kdaserve.__all__) == NAMES
    assert all(hasattr(kdaserve, name) for name in NAMES)


@pytest.mark.parametrize(("name", "signature"), SIGNATURES.items())
def test_signature(name: str, signature: str):
    assert rendered(public(name)) == signature


@pytest.mark.parametrize(("name", "attributes"), ATTRIBUTES.items())
def test_attributes(name: str, attributes: set[str]):
    found = public(name)
    source = inspect.getsource(found)
    missing = {a for a in attributes if not hasattr(found, a) and not re.search(rf"^    {a}: |self\.{a} = ", source, re.MULTILINE)}
    assert not missing, f"{name} lost {missing}"


@pytest.mark.parametrize("module", ["kdaserve", "kdaserve.guards", "kdaserve.testing", "kdaserve.nn"])
def test_no_public_function_swallows_a_misspelt_name(module: str):
    found = dict(callables(importlib.import_module(module)))
    assert found
    for name, function in found.items():
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds, f"{module}.{name} takes **kwargs"


@pytest.mark.parametrize("op", ["chunk_kda", "packed_decode_kda"])
def test_docstrings_speak_of_every_argument(op: str):
    function = getattr(kdaserve, op)
    text = inspect.getdoc(function)
    for section in ("Args:", "Returns:", "Raises:", "Unchecked:", "Numerics:", "Source:", "Example:"):
        assert section in text, f"{op}: the docstring lacks {section}"
    described = text.split("Args:")[1].split("Returns:")[0]
    for name in inspect.signature(function).parameters:
        assert re.search(rf"\b{name}\b", described), f"{op}: the docstring does not describe `{name}`"


def test_type_information_is_shipped():
    assert (Path(kdaserve.__file__).parent / "py.typed").exists()
    for name in ("chunk_kda", "recurrent_kda", "packed_decode_kda", "plan_prefill", "backends", "explain", "explain_choice", "warmup"):
        signature = inspect.signature(getattr(kdaserve, name))
        assert signature.return_annotation is not inspect.Signature.empty, name
        assert all(p.annotation is not p.empty for p in signature.parameters.values()), name


BLOCKED = ("triton", "helion", "typer", "click", "rich", "safetensors", "numpy", "matplotlib", "hypothesis", "pytest")
ALONE = f"""
    import sys, warnings
    warnings.simplefilter("ignore")  # torch itself speaks of an absent numpy
    for name in {BLOCKED!r}:
        sys.modules[name] = None
    import torch
    before = set(sys.modules)
    import kdaserve
    loaded = [name for name in set(sys.modules) - before if not name.startswith("kdaserve")]
    backends = [name for name in sys.modules if name.startswith("kdaserve.ops") and name.split(".")[-1] in {{b.name for b in kdaserve.backends()}}]
    heavy = [name for name in sys.modules if name.startswith(("kdaserve.cli", "kdaserve.nn", "kdaserve.demo", "kdaserve.testing"))]
    assert not backends, f"importing kdaserve imports {{backends}}"
    assert not heavy, f"importing kdaserve imports {{heavy}}"
    assert not [name for name in loaded if name.split(".")[0] in {BLOCKED!r}], loaded
    x = lambda *shape: torch.randn(1, 70, *shape)
    pool = torch.zeros(2, 2, 16, 16)
    o = kdaserve.chunk_kda(x(2, 16), x(2, 16), x(2, 16), -x(2, 16).abs(), x(2).sigmoid(), None, pool, torch.tensor([1]), True)
    step = (torch.randn(1, 96), torch.randn(1, 32), torch.randn(1, 2), torch.zeros(2), None, None, pool, torch.empty(1, 1, 2, 16), torch.tensor([1]))
    kdaserve.packed_decode_kda(*step)
    assert o.isfinite().all() and pool[1].any() and not pool[0].any()
    assert kdaserve.explain("KDA102").title
    print("fine")
"""


def test_torch_is_all_it_needs():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(ALONE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"
