"""Inline assembly for `gluon_on_cpu`: a line at a time on 32-bit registers, which are int32 tensors here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def scalar(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.bool if isinstance(value, bool) else torch.int32 if isinstance(value, int) else torch.float32)


def _float(function: Callable) -> Callable:
    return lambda *args: function(*(x.view(torch.float32) for x in args)).float().view(torch.int32)


def _pair(dtype: torch.dtype) -> Callable:
    def packed(high: Tensor, low: Tensor) -> Tensor:
        return torch.stack([x.view(torch.float32).to(dtype) for x in (low, high)], -1).view(torch.int32).squeeze(-1)

    return packed


INSTRUCTIONS: dict[str, Callable] = {
    "mov.b32": lambda x: x,
    "and.b32": torch.bitwise_and,
    "or.b32": torch.bitwise_or,
    "xor.b32": torch.bitwise_xor,
    "shl.b32": torch.bitwise_left_shift,
    "add.f32": _float(torch.add),
    "sub.f32": _float(torch.sub),
    "mul.f32": _float(torch.mul),
    "fma.f32": _float(lambda x, y, z: x.double() * y + z),
    "neg.f32": _float(torch.neg),
    "max.f32": _float(torch.maximum),
    "min.f32": _float(torch.minimum),
    "ex2.f32": _float(torch.exp2),
    "lg2.f32": _float(torch.log2),
    "rcp.f32": _float(torch.reciprocal),
    "rsqrt.f32": _float(torch.rsqrt),
    "cvt.bf16x2.f32": _pair(torch.bfloat16),
    "cvt.f16x2.f32": _pair(torch.float16),
}
"""Without what says how to round."""


def inline_asm_elementwise(asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    args = torch.broadcast_tensors(*map(scalar, args)) if args else ()
    shape = args[0].shape if args else ()
    outputs = sum(c.strip().startswith("=") for c in constraints.split(","))
    registers: dict[str, Tensor] = {}
    for x in args:
        words = x.reshape(-1, pack).contiguous()
        if x.element_size() < 8:
            words = words.view(torch.int32)
        for word in words.unbind(-1):
            registers[f"${outputs + len(registers)}"] = word.contiguous()
    like = next(iter(registers.values()), torch.zeros(1, dtype=torch.int32))

    def value(name: str) -> Tensor:
        if name in registers:
            return registers[name]
        bits = 0 if name.startswith("$") else int(name, 0) & 0xFFFFFFFF
        return torch.full_like(like, bits - (bits >> 31 << 32), dtype=torch.int32)

    for line in asm.replace("{", "").replace("}", "").split(";"):
        words = line.split("//")[0].split(None, 1)
        if not words or words[0].split(".")[0] in ("", "prefetch", "griddepcontrol"):
            continue
        operation = re.sub(r"\.(rn|approx|ftz|sat)\b", "", words[0])
        target, *sources = (name.strip() for name in words[1].split(","))
        registers[target] = INSTRUCTIONS[operation](*map(value, sources))
        if ".ftz" in words[0]:
            registers[target][registers[target].view(torch.float32).abs() < torch.finfo(torch.float32).tiny] = 0
    types_of, found, used = dtype if isinstance(dtype, (tuple, list)) else [dtype], [], 0
    for each in types_of:
        count = pack * each.itemsize // 4
        words = torch.stack([value(f"${used + i}") for i in range(count)], -1)
        found.append(words.view(each).reshape(shape))
        used += count
    return tuple(found) if isinstance(dtype, (tuple, list)) else found[0]
