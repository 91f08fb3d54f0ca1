"""Where tensors lie in memory."""

from __future__ import annotations

import math

import torch


def same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The two are the very same elements of the same memory, in the same shape."""
    return a is b or all(x == y for x, y in ((a.data_ptr(), b.data_ptr()), (a.shape, b.shape), (a.stride(), b.stride()), (a.dtype, b.dtype)))


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the two share a byte; column views of one buffer share none."""
    distance = b.data_ptr() - a.data_ptr()
    lower, gap = (a, distance) if distance >= 0 else (b, -distance)
    if gap >= extent(lower):  # nearly always; the check runs in every decode step, so this comes first
        return False
    if "meta" in (a.device.type, b.device.type) or a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    # Views of one buffer interleave: with a row pitch common to both, they are apart when their columns are.
    for pitch in {t.stride(d) * t.element_size() for t in (a, b) for d in range(t.ndim) if t.shape[d] > 1} - {0}:
        width_a, width_b, column = _columns(a, pitch), _columns(b, pitch), distance % pitch
        if width_a and width_b and width_a <= column and column + width_b <= pitch:
            return False
    return True


def extent(tensor: torch.Tensor, below: float = math.inf) -> int:
    """Bytes from the first element to the end of the last, over dimensions with a stride of less than `below` bytes."""
    size = tensor.element_size()
    if below == math.inf and tensor.is_contiguous():
        return tensor.numel() * size
    return size + sum((n - 1) * s * size for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s * size < below)


def _columns(tensor: torch.Tensor, pitch: int) -> int:
    """Bytes that `tensor` takes of each row of `pitch` bytes; 0 when it does not lie in such rows."""
    strides = [s * tensor.element_size() for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    width = extent(tensor, below=pitch)
    return width if width <= pitch and all(s < pitch or s % pitch == 0 for s in strides) else 0
