"""How a prefill by `prepare` and `chain` is cut: room for chunks, decay that is not wide, keys that repeat, the measured forms of the chain."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable

import torch

from kdaserve.contract import CHUNK
from kdaserve.ops.forms import Form, in_any_memory
from kdaserve.ops.jit.launch import INTERPRETED, padded
from kdaserve.ops.jit.prefill import snapshots_of
from kdaserve.ops.prefill import PrefillCall

WIDEST = 124.0
"""The log2 decay between a token and the middle of its half up to which factors are formed there: they hold 2 ** 124 times a normed key."""
LEAST_BOUND = -WIDEST / (CHUNK // 4 * math.log2(math.e))
"""The bounded gate cannot decay the 16 tokens to the middle of a half by more than that, down to this `lower_bound`."""
NEAR = 0.95
"""A token repeats an earlier one if the product of their keys, decay included, is more than this share of the token's own square."""
OFTEN = 8
"""Keys of a chunk repeat often if one token in so many repeats an earlier one; `prepare` then writes the chunk in another basis."""


def bounded(call: PrefillCall) -> bool:
    """Whether no gate input can decay a half of a chunk by more than factors are formed for."""
    return call.lower_bound is not None and call.lower_bound >= LEAST_BOUND


def units(call: PrefillCall) -> int:
    """How many chunks the workspace has room for: sequence n owns the units from cu_seqlens[n] // 64 + n on."""
    B, T, N = (call.sizes[s] for s in ("B", "T", "N"))
    return T // CHUNK + N if call.cu_seqlens is not None else B * -(-T // CHUNK)


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """A form of the chain kernel.

    Attributes:
        slice: rows of V of a program.
        transposed: the state is the left operand, in registers.
        stages: chunks in flight.
    """

    slice: int
    transposed: bool
    stages: int


CHAIN_WARPS = 4
CHAINS = (Chain(16, False, 3), Chain(32, False, 3), Chain(64, True, 3))
"""Milliseconds for 8192 tokens of 12 and of 64 heads: slice 16 0.166 and 0.634, slice 32 0.190 and 0.376, slice 64 transposed 0.275 and 0.295
(not transposed, 2 stages: 0.325 and 0.373; slice 16 transposed: 0.236 and 0.92)."""


ALONE = Chain(16, True, 1)
"""For operands in fp32, and where shared memory does not hold two chunks in any form.

A chunk then comes through registers, and the asynchronous matrix instructions of Hopper may not see all of it (docs/facts.md); with a left operand of
16 rows Triton does not use them. There is one such form, so the company of a sequence shows in no bit (S10). It is slow: its warps repeat each other.
"""


def chain(pairs: int, K: int, V: int, dtype: torch.dtype, saves: bool, processors: int, shared: int) -> Chain:
    """The smallest slice whose programs, one for each of `pairs` sequences and heads and slice, still run side by side; else the largest.

    Args:
        pairs: sequences times heads; dtype: of the operands of products; saves: whether states are handed out on the way; processors:
            multiprocessors; shared: bytes of shared memory a program may use.
    """
    BK, element = padded(K), dtype.itemsize
    on_gpu_in_fp32 = dtype == torch.float32 and not INTERPRETED
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


def chain_of(call: PrefillCall, sequences: int, dtype: torch.dtype) -> Chain:
    """The form of the chain for so many sequences like those of `call`, with products of operands in `dtype`."""
    HV, K, V = (call.sizes[s] for s in ("HV", "K", "V"))
    saves = call.output_intermediate_states or call.track_state is not None or snapshots_of(call) is not None
    return chain(sequences * HV, K, V, dtype, saves, *processor(call.q.device))


def chain_forms(call: PrefillCall, dtype: torch.dtype) -> list[Form]:
    """The forms of the chain that sequences like those of `call` can need, with products of operands in `dtype`."""
    return forms_by_sequences(call, lambda sequences: chain_of(call, sequences, dtype))


def forms_by_sequences(call: PrefillCall, form: Callable[[int], Hashable]) -> list[Form]:
    """The fewest sequences like those of `call` for each value of `form`, in any memory: what `kdaserve.ops.forms` asks for."""
    # With more pairs of sequence and head than processors nothing changes any more.
    most = max(processor(call.q.device)[0] // call.sizes["HV"] + 1, 2)
    return in_any_memory({form(n): n for n in range(most, 0, -1)}.values())
