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
    ValuesError,
    error,
)


def explain(code: str) -> Entry:
    """The catalogue entry of an error code.

    Args:
        code: a code such as ``"KDA102"``; case does not matter.

    Raises:
        ContractError: KDA131 when there is no such code.
    """
    found = CATALOGUE.get(str(code).upper())
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
    "ValuesError",
    "error",
    "explain",
]
