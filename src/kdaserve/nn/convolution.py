"""The short convolution of a KDA layer, over packed sequences and over one token a request.

A causal depthwise convolution of W taps needs, of every sequence, the W - 1 inputs before its first new token. They live in a pool
`[slots, C, W-1]`, oldest input first, beside the recurrent state. Nothing here waits for the device, so all of it can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdaserve.ops.gate import silu
from kdaserve.plan import PrefillPlan


class PackedInputs:
    """The inputs of a packed step with those that came before: rows to gather windows from.

    Args:
        x: `[T, C]` new inputs of all sequences; rows past the plan's tokens are padding, they must be finite.
        states: `[N, C, W-1]`, the inputs before each sequence.
        plan: where the sequences lie.
    """

    def __init__(self, x: Tensor, states: Tensor, plan: PrefillPlan) -> None:
        self._sequences, _, self._past = states.shape
        dtype = torch.promote_types(x.dtype, states.dtype)
        self._rows = torch.cat([states.mT.flatten(0, 1).to(dtype), x.to(dtype)])
        self._starts = plan.cu_seqlens.long()
        self._tokens = torch.arange(len(x), device=x.device)

    def convolve(self, weight: Tensor) -> Tensor:
        """SiLU of the convolution with `weight` `[C, W]`, last tap = newest input: `[T, C]`, fp32 or wider."""
        # Gathering with explicit rows gives every token the same sums in the same order whatever else is packed (S10).
        sequence = torch.searchsorted(self._starts[1:], self._tokens, right=True).clamp_max(self._sequences - 1)
        before = self._rows_before(sequence, self._tokens - self._starts[sequence])
        taps = [self._rows.index_select(0, rows) for rows in before.unbind(1)]
        return _weighted_sum([*taps, self._rows[self._sequences * self._past :]], weight)

    def states_after(self, sequence: Tensor, tokens: Tensor) -> Tensor:
        """The last W - 1 inputs of sequence `sequence[m]` after its first `tokens[m]` tokens: `[M, C, W-1]`."""
        return self._rows[self._rows_before(sequence.long(), tokens.long())].mT

    def _rows_before(self, sequence: Tensor, tokens: Tensor) -> Tensor:
        """`[M, W-1]`: rows of the inputs before token number `tokens[m]` of sequence `sequence[m]`."""
        back = tokens[:, None] + torch.arange(-self._past, 0, device=tokens.device)
        new = self._sequences * self._past + self._starts[sequence][:, None] + back
        old = sequence[:, None] * self._past + self._past + back
        return torch.where(back >= 0, new, old).clamp_min(0)  # below 0 only for padding in a step of no sequence


def convolve_token(x: Tensor, states: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """One token of every request.

    Args:
        x: `[B, C]`; states: `[B, C, W-1]`; weight: `[C, W]`.

    Returns:
        SiLU of the convolution `[B, C]`, fp32 or wider, and the new states `[B, C, W-1]`.
    """
    window = torch.cat([states, x.to(states.dtype)[:, :, None]], -1)
    return _weighted_sum([*states.unbind(-1), x], weight), window[..., 1:]


def load_states(pool: Tensor, slots: Tensor) -> Tensor:
    """`pool[slots]`, zero where the slot is negative. A slot past the end is left to the kernel that follows, which names it."""
    rows = pool.index_select(0, slots.long().clamp(0, len(pool) - 1))
    return torch.where((slots >= 0)[:, None, None], rows, 0)


@torch.no_grad()
def store_states(pool: Tensor, slots: Tensor, states: Tensor) -> None:
    """``pool[slots] = states`` where the slot is not negative."""
    if not len(slots):
        return
    # Leaving out the padding would need its number on the host. Instead padding repeats the first real write, or rewrites row 0 with itself.
    real, everyone = slots >= 0, torch.arange(len(slots), device=slots.device)
    source = torch.where(real, everyone, real.int().argmax())
    rows = slots[source].long().clamp_min(0)
    states = torch.where(real.any(), states[source].to(pool.dtype), pool[rows])
    pool.index_copy_(0, rows, states)


def _weighted_sum(inputs: list[Tensor], weight: Tensor) -> Tensor:
    """SiLU of ``sum_w inputs[w] * weight[:, w]``, oldest first; products and sums are separate operations, so that bits do not depend on shapes."""
    dtype = torch.promote_types(torch.promote_types(inputs[0].dtype, inputs[-1].dtype), torch.float32)
    total = inputs[0].to(dtype) * weight[:, 0].to(dtype)
    for w in range(1, len(inputs)):
        total = total + inputs[w].to(dtype) * weight[:, w].to(dtype)
    return silu(total)
