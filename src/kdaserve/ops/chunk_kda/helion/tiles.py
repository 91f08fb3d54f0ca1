"""What a prefill computes on tiles: plain functions, which Helion traces into the kernels that call them.

A chunk of 64 tokens is two halves of 32. Sums of log decays are products with matrices of 0 and 1, on the matrix units: nothing cancels in them.
"""

from __future__ import annotations

import helion.language as hl
import torch
from torch import Tensor

from kdaserve.contract import CHUNK
from kdaserve.ops.helion.math import log2_decay, product, sigmoid
from kdaserve.ops.jit.chunking import NEAR

HALF = CHUNK // 2
LEVELS = HALF.bit_length() - 1


def first_unit(start: Tensor, n: Tensor) -> Tensor:
    """The unit of the first chunk of sequence n, which starts at token `start` (see `space`)."""
    return (start >> (CHUNK.bit_length() - 1)) + n


def token_decay(x: Tensor, there: Tensor, a: Tensor | float, lower_bound: float, gate: str) -> Tensor:
    """Log decay of the tokens that are there, in base 2. No result sees the bound of -1e6; sums need it to stay finite."""
    g = log2_decay(x, a, lower_bound, gate)
    if gate != "bounded":
        g = torch.where(g < -1e6, -1e6, g)
    return torch.where(there, g, 0.0)


def write_strengths(beta: Tensor, i_b: int | Tensor, t: Tensor, i_h: Tensor, there: Tensor, raw: bool) -> Tensor:
    """Beta of the tokens that are there."""
    x = hl.load(beta, [i_b, t, i_h], extra_mask=there).to(torch.float32)
    return torch.where(there, sigmoid(x), 0.0) if raw else x


def split(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """`x` as operands of `sums`, bf16 numbers that add up to it; itself where the products take fp32 (parts = 1)."""
    found = []
    for _ in range(parts - 1):
        found.append(x.to(torch.bfloat16))
        x = x - found[-1].to(torch.float32)
    return (*found, x if parts == 1 else x.to(torch.bfloat16))


def decays(
    g: Tensor, dt_bias: Tensor | None, i_b: int | Tensor, t: Tensor, i_h: Tensor, o_k: Tensor, there: Tensor, K: int,
    a: Tensor, lower_bound: float, gate: str, parts: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Log decays of the tokens t that are there, in channels o_k, as operands of `sums`."""
    x = hl.load(g, [i_b, t, i_h, o_k], extra_mask=there).to(torch.float32)
    if dt_bias is not None:
        x = x + hl.load(dt_bias, [i_h * K + o_k], extra_mask=o_k < K)[None, :]
    return split(token_decay(x, there, a, lower_bound, gate), parts)


def sums(pick: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    """E5: for each row the sum over the tokens that `pick` picks."""
    pick = pick.to(parts[0].dtype)
    total = product(pick, parts[0])
    for part in parts[1:]:
        total = product(pick, part, total)
    return total


def picks() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For `sums` within a half: from its middle to the token, up to the token, after it, all."""
    row, col = hl.arange(HALF)[:, None], hl.arange(HALF)[None, :]
    late = col >= HALF // 2
    around = torch.where(late & (col <= row), 1.0, 0.0) - torch.where(~late & (col > row), 1.0, 0.0)
    return around, torch.where(col <= row, 1.0, 0.0), torch.where(col > row, 1.0, 0.0), torch.where(col >= 0 * row, 1.0, 0.0)


def meet(k: Tensor, q: Tensor, e: Tensor, A: Tensor, qk: Tensor, op: torch.dtype) -> tuple[Tensor, Tensor]:
    """E6 and the q.k of E10 inside a half, whose pairs meet at its middle; e is the log decay from there to the token."""
    factor = torch.exp2(e)
    cols = (k * torch.exp2(-e)).to(op).T
    return product((k * factor).to(op), cols, A), product((q * factor).to(op), cols, qk)


def meet_by_levels(k: Tensor, q: Tensor, parts: tuple[Tensor, ...], A: Tensor, qk: Tensor, op: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same for any decay: neighbouring segments of 1, 2, 4, 8 and 16 tokens meet where they touch, all factors <= 1."""
    row, col = hl.arange(HALF)[:, None], hl.arange(HALF)[None, :]
    A = A + torch.where(row == col, (k * k).sum(1)[:, None], 0.0)
    qk = qk + torch.where(row == col, (q * k).sum(1)[:, None], 0.0)
    for level in range(LEVELS):
        second = ((row >> level) & 1) == 1
        pick = ((row >> level) == (col >> level)) & ((second & (col <= row)) | (~second & (col > row)))
        factor = torch.exp2(sums(torch.where(pick, 1.0, 0.0), parts))
        rows = (k * factor).to(op)
        cols = rows.T
        touch = (((row >> level) ^ (col >> level)) == 1) & (row > col)
        A = A + torch.where(touch, product(rows, cols), 0.0)
        qk = qk + torch.where(touch, product((q * factor).to(op), cols), 0.0)
    return A, qk


def last_repeated(A11: Tensor, A21: Tensor, A22: Tensor, normed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """In each quarter of a chunk, of each row the last token that it repeats, -1 if that is none or in the other quarter. A comes without beta."""
    row, col = hl.arange(HALF)[:, None], hl.arange(HALF)[None, :]

    def squares(A: Tensor) -> Tensor:
        return hl.full([HALF], 1.0, dtype=torch.float32) if normed else torch.where(row == col, A, 0.0).sum(1)

    def last(A: Tensor, square: Tensor, earlier: Tensor) -> Tensor:
        least = NEAR * square[:, None]
        return torch.amax(torch.where(earlier & (least < A), col, -1).to(torch.int32), 1)

    square1, square2 = squares(A11), squares(A22)
    last22 = last(A22, square2, row > col)
    return last(A11, square1, row > col), torch.where(last22 < 0, last(A21, square2, col < HALF), -1), last22


def repetitions(*last: Tensor) -> tuple[Tensor, ...]:
    """The quarters of N, which picks for each token the last one that it repeats."""
    return tuple(torch.where(hl.arange(HALF)[None, :] == x[:, None], 1.0, 0.0) for x in last)


def differences(X: tuple[Tensor, ...], N: tuple[Tensor, ...], parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """X (I - N), both lower triangular, in quarters."""

    def picked(X: Tensor, N: Tensor) -> Tensor:
        return sums(N.T, split(X.T, parts)).T

    (X11, X21, X22), (N11, N21, N22) = X, N
    return X11 - picked(X11, N11), X21 - picked(X21, N11) - picked(X22, N21), X22 - picked(X22, N22)


def key_differences(k1: Tensor, k2: Tensor, N: tuple[Tensor, ...], parts: int) -> tuple[Tensor, Tensor]:
    """(I - N)^T k of the two halves."""
    N11, N21, N22 = N
    parts1, parts2 = split(k1, parts), split(k2, parts)
    return k1 - sums(N11.T, parts1) - sums(N21.T, parts2), k2 - sums(N22.T, parts2)


def inverse(A: Tensor, merge: torch.dtype) -> Tensor:
    """E7 of a half, A without a diagonal: from blocks of 2 to the whole by halves, [[M1, 0], [-M2 A21 M1, M2]]."""
    row, col = hl.arange(HALF)[:, None], hl.arange(HALF)[None, :]
    M = torch.where(row == col, 1.0, torch.where((row ^ col) == 1, -A, 0.0))
    for level in range(1, LEVELS):
        A21 = torch.where(((row >> level) ^ (col >> level)) == 1, A, 0.0).to(merge)
        half = M.to(merge)
        M = M - product(product(half, A21).to(merge), half)
    return M


def across(x: Tensor, transposed: bool) -> Tensor:
    """Numbers of the channels of K, as they lie across a state."""
    return x[None, :] if transposed else x[:, None]


def turned(x: Tensor, transposed: bool) -> Tensor:
    """A tile [rows, V], or its transpose, from the other."""
    return x.T if transposed else x


def read(rows: Tensor, state: Tensor, transposed: bool) -> Tensor:
    """What rows `[C, K]` read from a state."""
    return product(state, rows.T) if transposed else product(rows, state)


def through_chunk(
    S: Tensor, state: Tensor, r: Tensor, qd: Tensor, ke: Tensor, qk: Tensor, M: Tensor, decay: Tensor, transposed: bool, op: torch.dtype
):
    """E9 to E11 of one chunk: the new state and the output. r is v - (k exp G) S, `state` the state as an operand, and beta is in M.

    v' enters its products as two bf16 numbers. With equal keys its rows are differences that add up again in E10 and E11, and so would the
    rounding of one: 2.6e-2 of the output.
    """
    o = read(qd, state, transposed)
    S = S * decay
    r = product(r, M.T) if transposed else product(M, r)  # E9
    high = r.to(op)
    for part in (high, (r - high.to(torch.float32)).to(op)) if op == torch.bfloat16 else (high,):
        o = product(part, qk.T, o) if transposed else product(qk, part, o)  # E10
        S = product(part, ke, S) if transposed else product(ke.T, part, S)  # E11
    return S, o
