"""Calls as data: an op by its name and its arguments by theirs, for tools that log, save, explain or verify calls."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from kdaserve import dispatch, guards
from kdaserve.errors import error
from kdaserve.ops import decode, prefill
from kdaserve.ops.chunk_kda.api import chunk_kda
from kdaserve.ops.packed_decode_kda.api import packed_decode_kda
from kdaserve.ops.recurrent_kda.api import recurrent_kda

OPS: dict[str, Callable[..., Any]] = {"chunk_kda": chunk_kda, "recurrent_kda": recurrent_kda, "packed_decode_kda": packed_decode_kda}


def checked_call(op: str, arguments: Mapping[str, Any]) -> prefill.PrefillCall | decode.DecodeCall:
    """The checked record of a call.

    Args:
        op: a name in `OPS`.
        arguments: its keyword arguments; defaults are filled in.

    Raises:
        Whatever the call itself would raise, TypeError for unknown or missing arguments included; KDA125 for an unknown op.
    """
    check_op("checked_call", op)
    bound = inspect.signature(OPS[op]).bind(**arguments)
    bound.apply_defaults()
    return decode.checked_call(bound.arguments) if op == "packed_decode_kda" else prefill.checked_call(op, bound.arguments)


def check_op(function: str, op: str) -> None:
    """KDA125 unless `op` is the name of an op."""
    if not guards.is_one_of(op, OPS):
        raise error("KDA125", op=function, option="op", got=repr(op), expected=", ".join(OPS))


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What a call would run on.

    Attributes:
        backend: the name of the chosen backend.
        reasons: for every backend, why it was chosen or passed over.
    """

    backend: str
    reasons: dict[str, str]


def explain_choice(op: str, arguments: Mapping[str, Any]) -> Choice:
    """Which backend a call would run on, and why not the others. Runs nothing.

    Args:
        op: ``"chunk_kda"``, ``"recurrent_kda"`` or ``"packed_decode_kda"``.
        arguments: keyword arguments of that op, ``backend`` included if it is not ``"auto"``.

    Raises:
        The errors that the call itself would raise, and KDA125 for an unknown op.

    Example:
        >>> from kdaserve.testing import prefill_inputs
        >>> explain_choice("chunk_kda", prefill_inputs([64])).backend
        'torch'
    """
    call = checked_call(op, arguments)
    name = arguments.get("backend", "auto")
    chosen = dispatch.choose(call, name).name
    if name == "auto":
        return Choice(chosen, dispatch.reasons(call, chosen))
    return Choice(chosen, {b.name: "asked for by name" if b.name == chosen else f"{chosen} was asked for by name" for b in dispatch.BACKENDS})
