"""Compiles kernels for Hopper on any machine and prints, as JSON, what the assembler says of each; `test_triton_compile.py` runs it.

Compiling needs a process in which triton does not interpret.
"""

from __future__ import annotations

import collections
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from kdaserve.ops.chunk_kda.triton import TL, config
from kdaserve.ops.chunk_kda.triton.chain import chain_kernel
from kdaserve.ops.chunk_kda.triton.prepare import prepare_kernel
from kdaserve.ops.jit import chunking
from kdaserve.ops.jit.launch import UNIT, Kernel
from kdaserve.ops.packed_decode_kda.triton import TILES, packed_decode_kda_kernel
from kdaserve.ops.recurrent_kda.triton import PADDING, ROWS, recurrent_kda_kernel

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024
"""Bytes of shared memory that a program may use there."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INTEGERS = ("index", "cu", "cu_seqlens", "chunk_offsets", "track_chunk", "sequence", "tokens", "slot")
HEADS = {"H": 12, "HV": 12, "K": 128, "V": 128, "BK": 128}
STATES = ("p_h", "p_chunk_offsets", "p_track", "p_track_chunk", "p_sequence", "p_tokens", "p_slot")


def build(kernel: Kernel, *, absent: tuple[str, ...] = (), pool: str = "fp32", unit: int = UNIT, warps: int = 1, **constants: Any) -> dict[str, Any]:
    """`assemble` of a kernel at bf16 inputs; `absent` names the tensors that are not given, `constants` are the kernel's and Triton's."""
    form = kernel.forms[unit]
    options = {name: constants.pop(name) for name in [*constants] if name not in kernel.constants}
    values = {**dict.fromkeys(absent), **constants, "UNIT": unit}
    types = {f"p_{name}": "i32" for name in INTEGERS} | {f"p_{name}": "fp32" for name in ("A_log", "dt_bias", "track", "header")} | {"p_pool": pool}
    types |= {"p_tiles": str(constants.get("OP"))}
    signature, aligned = {}, {}
    for i, parameter in enumerate(form.params):
        name = parameter.name
        if name in values:
            signature[name] = "constexpr"
        elif name in kernel.pointers:
            signature[name] = "*" + types.get(name, "bf16")
            if not parameter.do_not_specialize_on_alignment:
                aligned[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = parameter.annotation_type
    names = [parameter.name for parameter in form.params]
    return assemble(ASTSource(form, signature, {(names.index(name),): value for name, value in values.items()}, aligned), num_warps=warps, **options)


def assemble(source: ASTSource, **options: Any) -> dict[str, Any]:
    """What the assembler says of a kernel: registers, bytes of stack and of shared memory, instructions; operands that come late."""
    compiled = triton.compile(source, target=HOPPER, options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True)
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    assert found, usage
    counts = collections.Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", sass))
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": compiled.metadata.shared,
        "instructions": counts,
        "late_fences": late_fences(compiled.asm["ttgir"]),
    }


def late_fences(ttgir: str) -> list[str]:
    """Operands of asynchronous products that threads write to shared memory, with a barrier between the writing and the fence that makes it visible.

    Such a barrier orders nothing for the products, and Triton 3.6 puts no second one behind the fence.
    """
    found: list[str] = []
    open_operands: list[str] = []
    for line in ttgir.splitlines() if "warp_group_dot" in ttgir else ():
        allocated = re.match(r"\s*(%\S+) = ttg\.local_alloc %", line)
        if allocated:
            open_operands.append(allocated[1])
        elif "fence_async_shared" in line:
            open_operands = []
        elif re.search(r"ttg\.(convert_layout|async_wait|local_load)|tt\.reduce|scf\.if|gpu\.barrier", line):
            found += open_operands
            open_operands = []
    return found


def decode(pool: str, rows: int, warps: int = 1, gate: str = "bounded", unit: int = UNIT) -> dict[str, Any]:
    return build(packed_decode_kda_kernel, pool=pool, unit=unit, warps=warps, **HEADS, BV=rows, GATE=gate, L2NORM=True)


def recurrent(pool: str, gate: str = "bounded", states: bool = False, unit: int = UNIT) -> dict[str, Any]:
    constants = {**HEADS, "BV": ROWS, "PADDING": PADDING, "GATE": gate, "L2NORM": True, "BETA_RAW": True}
    return build(recurrent_kda_kernel, absent=() if states else STATES, pool=pool, unit=unit, **constants)


def prepare(wide: str, unit: int = UNIT) -> dict[str, Any]:
    operands = config.operands(torch.bfloat16, True)
    form = config.PREPARE_WIDE if wide == "only" else config.PREPARE
    constants = {
        "K": 128, "V": 128, "BK": 128, "BV": 128, "BS": form.slice, "GATE": "bounded" if wide == "never" else "softplus",
        "L2NORM": True, "BETA_RAW": True, "WIDE": wide, "PARTS": operands.parts, "OP": TL[operands.dtype], "PRECISION": operands.precision,
        "MERGE": TL[operands.merge], "MERGE_PRECISION": operands.merge_precision, "num_stages": form.stages,
    }  # fmt: skip
    return build(prepare_kernel, unit=unit, warps=form.warps, **constants)


def chain(form: chunking.Chain, saves: bool = False, unit: int = UNIT, dim: int = 128, inputs: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """With the bytes of shared memory that `config` thinks it takes, and the stages that it lets run; `inputs` are those whose products it does."""
    operands = config.operands(inputs, True)
    chosen = chunking.fitting(form, dim, operands.dtype.itemsize, saves, SHARED)
    constants = {
        "K": dim, "V": dim, "BK": dim, "BV": chosen.slice, "TRANSPOSED": chosen.transposed, "STAGES": chosen.stages,
        "OP": TL[operands.dtype], "PRECISION": operands.precision,
    }  # fmt: skip
    built = build(chain_kernel, absent=() if saves else STATES, unit=unit, warps=chunking.CHAIN_WARPS, **constants)
    return built if chosen.stages == 1 else {**built, "expected_shared": chunking.shared_bytes(chosen, dim, operands.dtype.itemsize, saves)}


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"decode-fp32-{fp32.rows}": functools.partial(decode, "fp32", fp32.rows, fp32.warps) for _, fp32, _ in TILES},
    **{f"decode-bf16-{short.rows}": functools.partial(decode, "bf16", short.rows, short.warps) for _, _, short in TILES},
    "decode-fp32-softplus": functools.partial(decode, "fp32", 8, gate="softplus"),
    "decode-fp32-any-memory": functools.partial(decode, "fp32", 8, unit=1),
    "recurrent-fp32": functools.partial(recurrent, "fp32"),
    "recurrent-bf16": functools.partial(recurrent, "bf16"),
    "recurrent-fp32-softplus-states": functools.partial(recurrent, "fp32", "softplus", True),
    "recurrent-fp32-any-memory": functools.partial(recurrent, "fp32", unit=1),
    **{f"prepare-{wide}": functools.partial(prepare, wide) for wide in ("never", "marked", "only")},
    "prepare-never-any-memory": functools.partial(prepare, "never", unit=1),
    **{f"chain-{form.slice}": functools.partial(chain, form) for form in chunking.CHAINS},
    **{f"chain-{form.slice}-states": functools.partial(chain, form, True) for form in chunking.CHAINS},
    "chain-alone-256-channels": functools.partial(chain, chunking.ALONE, dim=256),
    "chain-alone-tf32": functools.partial(chain, chunking.ALONE, inputs=torch.float16),
    "chain-alone-three-tf32": functools.partial(chain, chunking.ALONE, inputs=torch.float32),
    "chain-16-any-memory": functools.partial(chain, chunking.CHAINS[0], unit=1),
    "chain-16-states-any-memory": functools.partial(chain, chunking.CHAINS[0], True, unit=1),
    "chain-64-any-memory": functools.partial(chain, chunking.CHAINS[-1], unit=1),
}

KERNELS = (packed_decode_kda_kernel, recurrent_kda_kernel, prepare_kernel, chain_kernel)


def compilations(kernel: Kernel, unit: int) -> int:
    """How often Triton would compile one form for numbers from 0 to beyond 32 bits and, with `unit` 1, for memory aligned and not."""
    form = kernel.forms[unit]
    types = create_function_from_signature(form.signature, form.params, make_backend(HOPPER))
    constants = [16] * (len(kernel.constants) - 1) + [unit]
    found = set()
    for number in (0, 1, 3, 8, 16, 2**33):
        for offset in (0,) if unit > 1 else (0, 1):
            pointers = [torch.zeros(16)[offset if p.do_not_specialize_on_alignment else 0 :] for p in form.params if p.name in kernel.pointers]
            numbers = [float(number) if p.annotation_type == "fp32" else number for p in form.params if p.name in kernel.numbers]
            found.add(str(types(*pointers, *numbers, *constants)[1]))
    return len(found)


if __name__ == "__main__":
    variants = {name: VARIANTS[name]() for name in sys.argv[1:] or VARIANTS}
    counts = {f"{kernel.name}, UNIT {unit}": compilations(kernel, unit) for kernel in KERNELS for unit in kernel.forms}
    print(json.dumps({"variants": variants, "compilations": counts}))
