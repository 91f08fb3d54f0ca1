"""`recurrent_kda`: the public function."""

from __future__ import annotations

from torch import Tensor

from kdaserve.ops import prefill
from kdaserve.plan import PrefillPlan
from kdaserve.snapshots import Snapshots


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_intermediate_states: bool = False,
    *,
    beta_is_raw: bool = False,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    snapshots: Snapshots | None = None,
    plan: PrefillPlan | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
    check: str = "shapes",
) -> Tensor | tuple[Tensor, Tensor]:
    """Few tokens a request (speculative decoding, short tails): the contract of `chunk_kda`, computed token by token.

    Takes the same arguments, means the same by them, raises the same errors and gives the same results up to rounding. Its time grows with the
    longest sequence; from some 24 tokens on `chunk_kda` is faster.

    Args, Returns, Raises, Unchecked, Source:
        See `chunk_kda`.

    Numerics:
        As `chunk_kda`; splitting a prompt at **any** token gives the same bits when the pool is fp32.

    Example:
        >>> import torch, kdaserve
        >>> x = lambda *shape: torch.randn(3, 4, *shape)
        >>> pool = torch.zeros(3, 2, 16, 16)
        >>> log_decay = -torch.rand(3, 4, 2, 16)
        >>> kdaserve.recurrent_kda(
        ...     x(2, 16), x(2, 16), x(2, 16), log_decay, x(2), None, pool, torch.tensor([0, 1, 2]), True, beta_is_raw=True).shape
        torch.Size([3, 4, 2, 16])
    """
    return prefill.run(prefill.checked_call("recurrent_kda", locals()), backend)  # locals() are the arguments by name
