"""`packed_decode_kda`: the public function."""

from __future__ import annotations

from torch import Tensor

from kdaserve import dispatch
from kdaserve.ops import decode


def packed_decode_kda(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    scale: float | None,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    lower_bound: float | None = None,
    *,
    backend: str = "auto",
    check: str = "shapes",
) -> tuple[Tensor, Tensor]:
    """Decode: one token a request, straight from the fused projection; state slots updated in place.

    B is the number of requests. The number of query heads H follows from the width of `mixed_qkv`; it divides HV.

    Args:
        mixed_qkv: `[B, 2*H*K + HV*V]`, q | k | v after the short convolution; bf16, fp16 or fp32, last dimension contiguous, row stride free.
        a: `[B, HV*K]` raw gate logits; b: `[B, HV]` raw beta logits. Last dimension contiguous, row stride free.
        A_log, dt_bias: `[HV]` and `[HV*K]` fp32 gate parameters; `dt_bias` may be None for no bias.
        scale: factor of the output; None means ``K ** -0.5``.
        initial_state: `[slots, HV, V, K]`, the pool, **updated in place**; fp32, bf16 or fp16 (fp64 on `torch` and `reference`), slot stride free.
            Serve under ``torch.inference_mode()``: while autograd records, its graph grows with every call.
        out: `[B, 1, HV, V]`, dtype of `mixed_qkv`, **written**; zeros where the index is negative.
        ssm_state_indices: `[B]` int32 or int64, slot of each request, no slot twice; negative = padding: no state is touched.
        use_qk_l2norm_in_kernel, lower_bound: as in `chunk_kda`.
        backend, check: as in `chunk_kda`.

    Returns:
        ``(out, initial_state)``, the objects that came in.

    Raises:
        ContractError, ContractTypeError: KDA103 to KDA112, KDA114, KDA116, KDA117, KDA121 to KDA125, before anything is written.
        BackendError: KDA201 to KDA204.
        ValuesError: KDA301, KDA302 for indices on the CPU always; KDA304 with ``check="values"``.
        InternalError: KDA501, a fault of this library.

    Unchecked:
        On a GPU and without ``check="values"``: the range of indices, a slot named twice, finite values.

    Numerics:
        Gate, beta and state arithmetic are fp32; the decay is never rounded to the input dtype. What else is in the batch does not change a
        request's bits (on `torch`: on a CPU). Over thousands of tokens a weak decay does not drift.

    Source:
        Kimi Linear, arXiv 2510.26692.

    Example:
        >>> import torch, kdaserve
        >>> B, H, D = 3, 2, 64
        >>> pool, out = torch.zeros(8, H, D, D), torch.empty(B, 1, H, D)
        >>> _ = kdaserve.packed_decode_kda(
        ...     torch.randn(B, 3 * H * D), torch.randn(B, H * D), torch.randn(B, H), torch.zeros(H), None, None, pool, out,
        ...     torch.tensor([5, -1, 2]), use_qk_l2norm_in_kernel=True)
        >>> pool[5].any().item(), out[1].any().item()
        (True, False)
    """
    dispatch.execute(decode.checked_call(locals()), backend)  # locals() are the arguments by name
    return out, initial_state
