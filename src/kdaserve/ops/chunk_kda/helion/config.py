"""How the prefill kernels are configured. The rules are those of the `triton` backend, whose kernels these are; measurements stand there."""

from __future__ import annotations

import dataclasses
import functools

import torch

from kdaserve.contract import CHUNK
from kdaserve.ops.jit.launch import INTERPRETED, padded


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


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """A form of the chain kernel: rows of V of a program, whether the state is the left operand, chunks in flight, warps."""

    slice: int
    transposed: bool
    stages: int
    warps: int = 4


CHAINS = (Chain(16, False, 3), Chain(32, False, 3), Chain(64, True, 3))
ALONE = Chain(16, True, 1)
"""For operands in fp32, and where shared memory does not hold two chunks in any form: with a left operand of 16 rows Triton uses no asynchronous
products, which may not see a chunk that came through registers (docs/facts.md). There is one such form, so the company of a sequence shows in no bit
(S10)."""


def chain(pairs: int, K: int, V: int, products: Operands, saves: bool, processors: int, shared: int) -> Chain:
    """The smallest slice whose programs, one for each of `pairs` sequences and heads and slice, still run side by side; else the largest.

    Args:
        pairs: sequences times heads; saves: whether states are handed out on the way; processors: multiprocessors; shared: bytes of shared memory
            a program may use.
    """
    BK, element = padded(K), products.dtype.itemsize
    on_gpu_in_fp32 = products.dtype == torch.float32 and not INTERPRETED
    if on_gpu_in_fp32 or any(fitting(form, BK, element, True, shared).stages < 2 for form in CHAINS):
        return ALONE
    forms = [form for form in CHAINS if form.slice <= padded(V)]
    form = next((f for f in forms if pairs * -(-V // f.slice) <= processors), forms[-1])
    return fitting(form, BK, element, saves, shared)


def fitting(form: Chain, BK: int, element: int, saves: bool, shared: int) -> Chain:
    """`form` with as many chunks in flight as `shared` bytes hold, but one at least."""
    while form.stages > 1 and shared_bytes(form, BK, element, saves) > shared:
        form = dataclasses.replace(form, stages=form.stages - 1)
    return form


def shared_bytes(form: Chain, BK: int, element: int, saves: bool) -> int:
    """Bytes of shared memory of a program, as Triton 3.6 lays it out for Hopper, or a little more.

    Chunks in flight, but for one decay; state and v' on their way into a product; a tile that changes its layout on the way to memory.
    """
    flight = form.stages * CHUNK * (3 * BK + 2 * CHUNK) * element + (form.stages - 1) * 4 * BK
    if form.transposed:
        state = form.slice * BK * 4
        return flight + (state if element == 4 else 0) + (state if saves else 2048)
    return flight + form.slice * (BK + 3 * CHUNK) * element + form.slice * CHUNK * element


@functools.cache
def processor(device: torch.device) -> tuple[int, int]:
    """Multiprocessors of a device and bytes of shared memory a program may use."""
    if device.type == "cpu":
        return 1, 2**20
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
