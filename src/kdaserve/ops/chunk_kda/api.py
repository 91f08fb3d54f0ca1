"""`chunk_kda`: the public function."""

from __future__ import annotations

from torch import Tensor

from kdaserve.ops import prefill
from kdaserve.plan import PrefillPlan
from kdaserve.snapshots import Snapshots


def chunk_kda(
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
    """Prefill: runs new tokens of several sequences through KDA, from and into the slots of a state pool.

    Sequences come packed (``B = 1``, boundaries in `cu_seqlens`) or batched (``cu_seqlens=None``, every batch row a sequence of T tokens).
    N is the number of sequences, HV a multiple of H, K and V multiples of 16 up to 256. All floating inputs are bf16, fp16 or fp32 (fp64 on
    `torch` and `reference`).

    Args:
        q, k: `[B, T, H, K]`, one dtype; K contiguous, other strides free.
        v: `[B, T, HV, V]`, dtype of q; V contiguous.
        g: `[B, >=T, HV, K]`; K contiguous. Raw gate logit when `A_log` is given, otherwise log decay a token: natural log, <= 0, not cumulative.
            Rows past T are ignored.
        beta: `[B, >=T, HV]`, any strides. Write strength in [0, 1]; its logit with ``beta_is_raw=True``.
        scale: factor of the output; default ``K ** -0.5``.
        initial_state: `[slots, HV, V, K]`, the pool: read at the first token, **updated in place** after the last. fp32, bf16 or fp16 (fp64 on
            `torch` and `reference`); inside a slot contiguous, slot stride free. Required. While autograd records, the pool becomes part of the
            graph, which grows with every call: serve under ``torch.inference_mode()``, train on ``pool.clone()``.
        initial_state_indices: `[N]` int32 or int64, slot of each sequence; no slot twice. Negative = padding: the sequence runs from a zero
            state and stores none. Required.
        use_qk_l2norm_in_kernel: divide q and k by their Euclidean norm (1e-6 added to the sum of squares).
        cu_seqlens: `[N+1]` int32 or int64, from 0, never decreasing; empty sequences are allowed anywhere. Rows at or past the last entry are
            padding: their output is zero, whatever they hold.
        A_log, dt_bias: `[HV]` and `[HV*K]` fp32, gate parameters; `dt_bias` may be None.
        lower_bound: None for the softplus gate ``-exp(A_log) * softplus(g + dt_bias)``; a negative number for the bounded gate
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``. Needs `A_log`.
        output_intermediate_states: also return the state at the start of every chunk of 64 tokens.
        beta_is_raw: `beta` is a logit, its sigmoid is taken in fp32.
        track_state, track_chunk_idx: `[N, HV, V, K]` fp32, **written in place**, and `[N]`: row n receives the state at the start of chunk
            ``track_chunk_idx[n]`` of sequence n; rows with -1 stay as they are.
        chunk_indices, chunk_offsets: accepted because engines pass them, not used.
        snapshots: states to save into further slots on the way; see `Snapshots`.
        plan: from `plan_prefill`, made once a step and shared by all layers; spares reading `cu_seqlens`. With it `cu_seqlens` may be None.
        out: `[B, T, HV, V]`, dtype of q: where the output goes. May be `v` itself; must not overlap another input.
        backend: ``"auto"`` or a name from `kdaserve.backends()`; a named backend never falls back.
        check: ``"shapes"``, or ``"values"`` to check also what tensors hold (syncs; for debugging).

    Returns:
        ``o`` `[B, T, HV, V]` in the dtype of q, or ``(o, h)`` with ``h`` `[B, NT, HV, V, K]` in the dtype of k (packed: the chunks of all
        sequences in order).

    Raises:
        ContractError, ContractTypeError: KDA101 to KDA116, KDA118, KDA120 to KDA125, before anything is written.
        BackendError: KDA201 to KDA204.
        ValuesError: KDA301 to KDA308, for indices on the CPU always, for all else with ``check="values"``.
        InternalError: KDA501, a fault of this library.

    Unchecked:
        On a GPU and without ``check="values"``: the range of indices, a slot named twice, the order of `cu_seqlens`, a plan that
        contradicts `cu_seqlens`, finite values. Never: whether a slot still belongs to the request.

    Numerics:
        Gate, decay, beta and state are fp32 (fp64 when an input is). Splitting a prompt at a multiple of 64 tokens and carrying the state in an
        fp32 pool gives the same bits as one call, as does packing with other sequences in any order; on `torch` this holds on a CPU (a GPU's
        matrix library picks its algorithm by size: equal within rounding). A NaN or infinity spreads over the whole chunk of 64 tokens, of that
        sequence and head alone. Autocast has no effect inside.

    Source:
        Kimi Linear, arXiv 2510.26692.

    Example:
        >>> import torch, kdaserve
        >>> x = lambda *shape: torch.randn(1, 100, *shape)
        >>> pool = torch.zeros(8, 4, 64, 64)
        >>> o = kdaserve.chunk_kda(
        ...     x(2, 64), x(2, 64), x(4, 64), x(4, 64), x(4), None, pool, torch.tensor([3, 5]), True,
        ...     torch.tensor([0, 30, 100]), torch.zeros(4), beta_is_raw=True)
        >>> o.shape, pool[3].any().item(), pool[0].any().item()
        (torch.Size([1, 100, 4, 64]), True, False)
    """
    return prefill.run(prefill.checked_call("chunk_kda", locals()), backend)  # locals() are the arguments by name
