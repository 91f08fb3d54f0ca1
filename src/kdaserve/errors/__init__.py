"""Errors with stable codes, all described in one catalogue."""

from kdaserve.errors.catalogue import CATALOGUE
from kdaserve.errors.entry import PRELUDE, Entry
from kdaserve.errors.exceptions import (
    BackendError,
    ContractError,
    ContractTypeError,
    InternalError,
    KdaError,
    PoolError,
    TuningError,
    ValuesError,
    dtype_name,
    error,
)


def explain(code: str) -> Entry:
    """The catalogue entry of an error code.

    Args:
        code: a code such as ``"KDA102"``; ``"kda102"``, ``"102"`` and ``"[KDA102]"`` mean the same.

    Raises:
        ContractError: KDA131 when there is no such code.
    """
    plain = str(code).strip(" []").upper()
    found = CATALOGUE.get(plain if plain.startswith("KDA") else f"KDA{plain}")
    if found is None:
        raise error("KDA131", got=repr(code), known=", ".join(CATALOGUE))
    return found


__all__ = [
    "CATALOGUE",
    "PRELUDE",
    "BackendError",
    "ContractError",
    "ContractTypeError",
    "Entry",
    "InternalError",
    "KdaError",
    "PoolError",
    "TuningError",
    "ValuesError",
    "dtype_name",
    "error",
    "explain",
]
