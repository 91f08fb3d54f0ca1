"""Comparison of tensors, with a message that says where they differ most."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``||actual - expected|| / ||expected||`` in float64; the numerator alone when `expected` is zero; NaN when either holds one."""
    a, e = actual.detach().double(), expected.detach().to(actual.device).double()
    norm = e.norm().item()
    return (a - e).norm().item() / (norm if norm > 0 else 1.0)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    """Fails unless the shapes are equal and the relative error is at most `tolerance`; names the worst element."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    deviation = relative_error(actual, expected)
    assert deviation <= tolerance, f"{what}: relative error {deviation:.3e} > {tolerance:.1e}; {_worst(actual, expected)}"


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Fails unless shape, dtype and every bit are equal (a NaN equals itself); names the first element that differs."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    differs = _bits(actual) != _bits(expected)
    if differs.any():
        index = tuple(differs.nonzero()[0].tolist())
        detail = f"first at {list(index)}: {actual[index].item()!r}, expected {expected[index].item()!r}"
        raise AssertionError(f"{what}: {int(differs.sum())} of {differs.numel()} elements differ; {detail}")


def _bits(x: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().cpu().contiguous().view(integers[x.element_size()])


def _worst(actual: Tensor, expected: Tensor) -> str:
    gap = (actual.detach().double() - expected.detach().to(actual.device).double()).abs()
    if not gap.numel():
        return "no element"
    index = tuple(int(i) for i in torch.unravel_index(gap.nan_to_num(torch.inf).argmax(), gap.shape))
    return f"worst at {list(index)}: {actual[index].item():.6g}, expected {expected[index].item():.6g}"
