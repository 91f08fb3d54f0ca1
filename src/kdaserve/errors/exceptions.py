"""The exception classes, and the one way to make one: `error(code, ...)`."""

from __future__ import annotations

from kdaserve.errors.catalogue import CATALOGUE


class KdaError(Exception):
    """Base of all errors of this library.

    Attributes:
        code: stable code such as ``"KDA102"``; `kdaserve.explain(code)` tells what it means.
        details: what was filled into the message, by name (strings and numbers).
    """

    def __init__(self, code: str, details: dict[str, object]) -> None:
        entry = CATALOGUE[code]
        self.code = code
        self.details = details
        message, fix = entry.message.format(**details), entry.fix.format(**details)
        super().__init__(f"[{code}] {message} Fix: {fix} (kdaserve explain {code})")

    def __reduce__(self) -> tuple[type[KdaError], tuple[str, dict[str, object]]]:
        return type(self), (self.code, self.details)


class ContractError(KdaError, ValueError):
    """The call does not fit the contract (KDA1xx)."""


class ContractTypeError(KdaError, TypeError):
    """An argument has the wrong Python type (KDA1xx)."""


class PoolError(KdaError, RuntimeError):
    """A state pool cannot do what was asked (KDA1xx)."""


class BackendError(KdaError, RuntimeError):
    """The backend cannot run, or does not take this call (KDA2xx)."""


class ValuesError(KdaError, ValueError):
    """The values inside a tensor are wrong (KDA3xx)."""


class TuningError(KdaError, ValueError):
    """Tuned configurations cannot be used (KDA4xx)."""


class InternalError(KdaError, RuntimeError):
    """A fault of this library (KDA5xx)."""


_CLASSES = {c.__name__: c for c in (ContractError, ContractTypeError, PoolError, BackendError, ValuesError, TuningError, InternalError)}


def error(code: str, /, **details: object) -> KdaError:
    """The exception for `code`, ready to be raised; `details` fill the templates of its catalogue entry."""
    return _CLASSES[CATALOGUE[code].raises](code, details)


def dtype_name(dtype: object) -> str:
    """A ``torch.dtype`` as people write it, such as ``float32``; for messages."""
    return str(dtype).removeprefix("torch.")
