"""Compiles the Gluon kernels for Hopper on any machine and prints, as JSON, what the assembler says; `test_sm90_compile.py` runs it.

Compiling needs a process in which triton does not interpret.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import create_function_from_signature

from kdaserve.ops.chunk_kda.sm90 import REGISTERS
from kdaserve.ops.chunk_kda.sm90.chain import LINE, chain_kernel
from kdaserve.ops.chunk_kda.sm90.layouts import TILE
from kdaserve.ops.chunk_kda.sm90.prepare import prepare_kernel
from kdaserve.ops.jit.launch import UNIT, Kernel
from sm90 import HOPPER, INTEGERS, STATES, TOOLS

MAPS = {"d_tiles": ("bf16", [256, 64], TILE.value), "d_decay": ("fp32", [1, 128], LINE)}
MAPS |= {f"d_{name}": (None, [64, 64], TILE.value) for name in "vokqg"}
"""Dtype, None for that of the inputs, box and layout."""
CHAIN: dict[str, Any] = {"SOON": True}
PREPARE: dict[str, Any] = {"GATE": "bounded", "L2NORM": True, "BETA_RAW": True, "WIDE": False, "maxnreg": REGISTERS}
READERS = {chain_kernel: "cp.async.bulk.tensor.2d.global.shared", prepare_kernel: "wgmma.mma_async"}
"""The instruction that reads, past the caches of the threads, what they have written to shared memory."""


def build(kernel: Kernel, absent: tuple[str, ...] = (), inputs: str = "bf16", pool: str = "fp32", unit: int = UNIT, **constants: Any) -> dict:
    """Registers, bytes of stack and of shared memory, products, loads, stores and copies by TMA, what the assembler warns of."""
    form = kernel.forms[unit]
    options = {name: constants.pop(name) for name in [*constants] if name not in kernel.constants}
    values = {**dict.fromkeys(absent), **constants, "UNIT": unit}
    types = {f"p_{name}": "i32" for name in (*INTEGERS, "order")} | {f"p_{name}": "fp32" for name in ("A_log", "dt_bias", "track", "decay")}
    types |= {"p_pool": pool, "p_tiles": "bf16"}
    signature, aligned = {}, {}
    for i, parameter in enumerate(form.params):
        name = parameter.name
        if name in values:
            signature[name] = "constexpr"
        elif name in kernel.maps:
            dtype, box, layout = MAPS[name]
            signature[name] = f"tensordesc<{dtype or inputs}{box},{layout!r}>"
        elif name in kernel.pointers:
            signature[name] = "*" + types.get(name, inputs)
            if not parameter.do_not_specialize_on_alignment:
                aligned[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = parameter.annotation_type
    names = [parameter.name for parameter in form.params]
    source = GluonASTSource(form, signature, {(names.index(name),): value for name, value in values.items()}, aligned)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": 4, **options})
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(compiled.asm["ptx"])
        said = subprocess.run([TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", ptx, "-o", cubin], capture_output=True, text=True, check=True)
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True)
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    assert found, usage
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": compiled.metadata.shared,
        "scratch": compiled.metadata.global_scratch_size + compiled.metadata.profile_scratch_size,
        "products": len(re.findall(r"\bHGMMA\.", sass)),
        "stores": collections.Counter(re.findall(r"\bSTG\.[A-Z0-9.]+", sass)),
        "loads": collections.Counter(re.findall(r"\bLDG\.[A-Z0-9.]+", sass)),
        "copies": len(re.findall(r"\bUTMALDG\.", sass)),
        "fenced": fenced(compiled.asm["ptx"], READERS[kernel]),
        "reused": reused(compiled.asm["ttgir"]),
        "warnings": [line for line in (said.stdout + said.stderr).splitlines() if "wgmma" in line.lower()],
    }


def reused(ttgir: str) -> list[str]:
    """Allocations of shared memory that lie, before or after, where a barrier does."""
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        context = ir.context()
        ir.load_dialects(context)
        nvidia.load_dialects(context)
        module = ir.parse_mlir_module(file.name, context)
        module.context = context
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, HOPPER.arch, 80)
    manager.run(module, "reused")
    found = re.findall(r"ttg\.local_alloc.*?allocation\.offset = (\d+).*?memdesc<((?:\d+x)+)[a-z]+(\d+),", str(module))
    places = [(int(first), int(first) + math.prod(map(int, shape[:-1].split("x"))) * int(bits) // 8, bits == "64") for first, shape, bits in found]
    barriers = [place for place in places if place[2]]
    assert barriers, "a kernel without barriers"
    return [str((a, b)) for a in barriers for b in places if a is not b and a[0] < b[1] and b[0] < a[1]]


def fenced(ptx: str, reader: str) -> bool:
    """Whether on every way from a writing to shared memory to a reader, of whatever part, there is a fence, and a barrier behind it."""
    lines = ptx.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"(\$\w+):", line))}
    ways, seen = [(0, "seen by all")], set()
    while ways:
        i, state = ways.pop()
        while i < len(lines) and (i, state) not in seen:
            seen.add((i, state))
            line = lines[i].split("//")[0]
            if reader in line and state != "seen by all":
                return False
            if re.search(r"\b(st\.shared|stmatrix)", line):
                state = "written"
            elif "fence.proxy.async" in line and state == "written":
                state = "fenced"
            elif re.search(r"\bbar(rier)?\.sync", line) and state == "fenced":
                state = "seen by all"
            jump = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)
            if jump:
                ways.append((labels[jump[1]], state))
            if (jump or re.search(r"\bret;", line)) and "@" not in line:
                break
            i += 1
    return True


def compilations(kernel: Kernel, unit: int) -> int:
    """As in `sm90`, and for matrices of any size."""
    form = kernel.forms[unit]
    types = create_function_from_signature(form.signature, form.params, make_backend(HOPPER))
    constants = [1] * (len(kernel.constants) - 1) + [unit]
    found = set()
    for number in (0, 1, 3, 8, 16, 2**33):
        for offset in (0,) if unit > 1 else (0, 1):
            shape, base = max(number, 1), torch.zeros(64, dtype=torch.bfloat16)
            maps = [TensorDescriptor(base, [shape, shape], [8 * shape, 1], *MAPS[name][1:]) for name in kernel.maps]
            pointers = [torch.zeros(16)[offset if p.do_not_specialize_on_alignment else 0 :] for p in form.params if p.name in kernel.pointers]
            numbers = [float(number) if p.annotation_type == "fp32" else number for p in form.params if p.name in kernel.numbers]
            found.add(str(types(*maps, *pointers, *numbers, *constants)[1]))
    return len(found)


VARIANTS: dict[str, dict[str, Any]] = {
    "chain": {**CHAIN, "absent": (*STATES, "p_order")},
    "chain-order": {**CHAIN, "absent": STATES},
    "chain-16-bits": {**CHAIN, "absent": (*STATES, "p_order"), "inputs": "fp16", "pool": "bf16"},
    "chain-any-memory": {**CHAIN, "absent": (*STATES, "p_order"), "unit": 1},
    "chain-h-track": {**CHAIN, "absent": ("p_sequence", "p_tokens", "p_slot")},
    "chain-states": {**CHAIN, "SOON": False},
    "prepare": {**PREPARE, "absent": ("p_order",)},
    "prepare-order": PREPARE,
    "prepare-batch": {**PREPARE, "absent": ("p_cu", "p_order")},
    "prepare-fp16": {**PREPARE, "absent": ("p_order",), "inputs": "fp16"},
    "prepare-wide": {**PREPARE, "absent": ("p_order",), "WIDE": True},
    "prepare-softplus": {**PREPARE, "absent": ("p_order",), "GATE": "softplus", "WIDE": True},
    "prepare-no-gate": {**PREPARE, "absent": ("p_A_log", "p_dt_bias", "p_order"), "GATE": "none", "WIDE": True},
}
KERNELS = {"chain": chain_kernel, "prepare": prepare_kernel}

if __name__ == "__main__":
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        names = sys.argv[1:] or [*VARIANTS]
        built = dict(zip(names, pool.map(lambda name: build(KERNELS[name.split("-")[0]], **VARIANTS[name]), names), strict=True))
    counts = {f"{kernel.name}, UNIT {unit}": compilations(kernel, unit) for kernel in KERNELS.values() for unit in kernel.forms}
    print(json.dumps({"variants": built, "compilations": counts}))
