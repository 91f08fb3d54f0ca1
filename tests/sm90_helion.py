"""Compiles what Helion generates for Hopper, like `sm90.py`, and prints what the assembler says; `test_helion_compile.py` runs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from kdaserve import Snapshots, calls
from kdaserve.ops.helion.launch import Launch
from kdaserve.ops.jit import chunking
from kdaserve.testing import decode_inputs, prefill_inputs
from sm90 import HOPPER, SHARED, assemble

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
SHAPE: dict[str, Any] = {"heads": 12, "k_dim": 128, "v_dim": 128, "dtype": torch.bfloat16}
PREPARES = {"prepare-never": ("bounded", 0), "prepare-marked": ("softplus", 0), "prepare-only": ("softplus", 1)}


def launches(op: str, call: dict[str, Any]) -> list[Launch]:
    """What a call would launch."""
    found: list[Launch] = []
    checked = calls.checked_call(op, call)
    checked.layout.prepared.clear()
    with patch.object(Launch, "__call__", lambda self, *_: found.append(self)):
        __import__(f"kdaserve.ops.{op}.helion", fromlist=["run"]).run(checked)
    return found


def prefill(gate: str, states: bool = False, op: str = "chunk_kda") -> list[Launch]:
    call = {**prefill_inputs([70, 130], gate=gate, beta_is_raw=True, **SHAPE), "use_qk_l2norm_in_kernel": True}
    if states:
        call |= {"output_intermediate_states": True, "track_state": torch.zeros(2, 12, 128, 128), "track_chunk_idx": torch.tensor([-1, -1])}
        call["snapshots"] = Snapshots([0], [64], [3])
    return launches(op, call)


def chain(form: chunking.Chain, states: bool) -> Launch:
    chosen = chunking.fitting(form, 128, 2, states, SHARED)
    with patch.object(chunking, "chain", lambda *_: chosen):
        return prefill("bounded", states)[-1]


def variants() -> dict[str, Callable[[], Launch]]:
    """By name, in the form with vector loads."""
    found: dict[str, Callable[[], Launch]] = {}
    for pool in (torch.float32, torch.bfloat16):
        for batch in (1, 32):
            found[f"decode-{TYPES[pool]}-{batch}"] = lambda pool=pool, batch=batch: launches(
                "packed_decode_kda", decode_inputs(batch, pool_dtype=pool, **SHAPE)
            )[0]
    found["recurrent"] = lambda: prefill("bounded", op="recurrent_kda")[0]
    for name, (gate, i) in PREPARES.items():
        found[name] = lambda gate=gate, i=i: prefill(gate)[i]
    for form in chunking.CHAINS:
        found[f"chain-{form.slice}"] = lambda form=form: chain(form, False)
        found[f"chain-{form.slice}-states"] = lambda form=form: chain(form, True)
    return found


def build(launch: Launch, aligned: bool) -> dict[str, Any]:
    """What the assembler says of a generated kernel, and how often Triton would compile it for numbers from 0 to beyond 32 bits."""
    jit = launch.generated.jit(launch.asked, aligned)
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(jit.params, launch.asked.values, strict=True)):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[i,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[i,] = [["tt.divisibility", 16]]
        else:
            signature[name] = parameter.annotation_type or "fp32"
            if not parameter.do_not_specialize and not isinstance(value, float):
                attributes[i,] = [["tt.divisibility", 16]]
    return assemble(ASTSource(jit, signature, constants, attributes), **launch.asked.options) | {"compilations": compilations(launch, jit)}


def compilations(launch: Launch, jit: Any) -> int:
    types = create_function_from_signature(jit.signature, jit.params, make_backend(HOPPER))
    found = set()
    for number in (0, 1, 3, 16, 2**33):
        values = []
        for parameter, value in zip(jit.params, launch.asked.values, strict=True):
            fixed = parameter.is_constexpr or not isinstance(value, int)
            # A stride that is specialised is a multiple of 16: others take the form for any memory.
            values.append(value if fixed else number if parameter.do_not_specialize else 16 * number)
        found.add(str(types(*values)[1]))
    return len(found)


if __name__ == "__main__":
    chosen = {name: make() for name, make in variants().items() if not sys.argv[1:] or name in sys.argv[1:]}
    report = {name: build(launch, True) for name, launch in chosen.items()}
    report |= {f"{name}-any-memory": build(chosen[name], False) for name in ("decode-fp32-32", "chain-16") if name in chosen}
    print(json.dumps(report))
