"""What a backend that compiles tells `kdaserve.warmup`.

Beside ``run(call)`` the module of an op then has ``forms(call)``, the forms that calls like this one can need whatever their lengths, sizes and
memory, and ``compiled()``, the number of compiled forms of its kernels so far. A module without them has nothing to compile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """A call that needs another compiled form than others of its dtypes and options.

    Attributes:
        sequences: sequences of a prefill, requests of a decode.
        aligned: whether its tensors start at multiples of 16 bytes.
    """

    sequences: int
    aligned: bool


def in_any_memory(sequences: Iterable[int]) -> list[Form]:
    """Forms of so many sequences, each for aligned tensors and for others."""
    return [Form(n, aligned) for n in sequences for aligned in (True, False)]
