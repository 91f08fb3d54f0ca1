"""How the prefill kernels are configured. The rules are those of the `triton` backend, whose kernels these are; measurements stand there."""

from __future__ import annotations

import dataclasses

import torch

from kdaserve.ops.jit.launch import INTERPRETED


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """In what the matrix products are computed; sums are fp32 always.

    Attributes:
        dtype: of their operands, and of the tiles in the workspace.
        merge: the same in the triangular inverse.
        prepare, chain: how the two kernels multiply fp32 operands, where they have some.
        parts: bf16 numbers that stand for a log decay in sums; 1 = none, fp32 itself.
    """

    dtype: torch.dtype
    merge: torch.dtype
    prepare: str
    chain: str
    parts: int


def operands(inputs: torch.dtype, normed: bool) -> Operands:
    """bf16 products for bf16 inputs; tf32 keeps the 11 bits of fp16 inputs and has the range that decay factors need; three tf32 make an fp32.

    The entries of the inverse between normed keys stay near 1, where fp16 has three bits more than bf16; between other keys they have no bound.
    """
    if INTERPRETED:  # it multiplies in numpy, which has no bf16
        return Operands(torch.float32, torch.float32, "ieee", "ieee", 1)
    if inputs == torch.bfloat16:
        return Operands(torch.bfloat16, torch.float16 if normed else torch.float32, "tf32x3", "tf32", 2)
    return Operands(torch.float32, torch.float32, "tf32x3", "tf32" if inputs == torch.float16 else "tf32x3", 3)


@dataclasses.dataclass(frozen=True, slots=True)
class Prepare:
    """A form of the prepare kernel: channels worked on together, warps of a program, slices in flight."""

    slice: int
    warps: int
    stages: int


PREPARE = Prepare(16, 2, 3)
PREPARE_WIDE = Prepare(32, 4, 1)
"""For the few chunks whose decay is too wide: few programs, so the time of one counts."""
