"""How the prefill kernels are configured, with the measurements behind it (NVIDIA H200, triton 3.6, K = V = 128, bf16)."""

from __future__ import annotations

import dataclasses

import torch

from kdaserve.ops.jit.launch import INTERPRETED


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """In what the matrix products are computed; sums are fp32 always.

    Attributes:
        dtype: of their operands, and of the tiles in the workspace.
        precision: of products of fp32 operands.
        merge, merge_precision: the same in the triangular inverse. Between normed keys its entries stay near 1, and fp16 has three bits more than
            bf16; between other keys they have no bound.
        parts: bf16 numbers that stand for a log decay in sums on the matrix units; 1 = none, fp32 itself.
    """

    dtype: torch.dtype
    precision: str
    merge: torch.dtype
    merge_precision: str
    parts: int


def operands(inputs: torch.dtype, normed: bool) -> Operands:
    """bf16 products for bf16 inputs; tf32 keeps the 11 bits of fp16 inputs and has the range that decay factors need; three tf32 make an fp32."""
    if INTERPRETED:  # it multiplies in numpy, which has no bf16
        return Operands(torch.float32, "ieee", torch.float32, "ieee", 1)
    if inputs == torch.bfloat16:
        return Operands(torch.bfloat16, "tf32", torch.float16 if normed else torch.float32, "tf32", 2)
    return Operands(torch.float32, "tf32" if inputs == torch.float16 else "tf32x3", torch.float32, "tf32x3", 3)


@dataclasses.dataclass(frozen=True, slots=True)
class Prepare:
    """A form of the prepare kernel.

    Attributes:
        slice: channels worked on together.
        warps: of a program.
        stages: slices in flight.
    """

    slice: int
    warps: int
    stages: int


PREPARE = Prepare(16, 2, 3)
"""8192 tokens of 64 heads take 0.495 ms; with slices of 32 0.577 ms, without slices in flight 0.644 ms. Four warps take twice as long: a tile of 32
rows is too small for them, and they repeat each other's work."""
PREPARE_WIDE = Prepare(64, 4, 1)
"""For the few chunks whose decay is too wide: few programs, so the time of one counts."""
