"""Inputs, comparison, saved calls and their verification: for the project's tests and benchmarks, and for yours."""

from kdaserve.testing.compare import assert_close, assert_same_bits, relative_error
from kdaserve.testing.inputs import decode_inputs, prefill_inputs
from kdaserve.testing.saved import load_call, save_call
from kdaserve.testing.verify import Verified, verify_call

__all__ = [
    "Verified",
    "assert_close",
    "assert_same_bits",
    "decode_inputs",
    "load_call",
    "prefill_inputs",
    "relative_error",
    "save_call",
    "verify_call",
]
