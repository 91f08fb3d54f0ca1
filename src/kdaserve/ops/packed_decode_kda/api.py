"""`packed_decode_kda`: the public function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kdaserve import contract, dispatch, values

OP = "packed_decode_kda"


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
        initial_state: `[slots, HV, V, K]`, the pool, **updated in place**; fp32, bf16 or fp16, slot stride free.
        out: `[B, 1, HV, V]`, dtype of `mixed_qkv`, **written**; zeros where the index is negative.
        ssm_state_indices: `[B]` int32 or int64, pool row of each request, no row twice; negative = padding: no state is touched.
        use_qk_l2norm_in_kernel, lower_bound: as in `chunk_kda`.
        backend, check: as in `chunk_kda`.

    Returns:
        ``(out, initial_state)``, the objects that came in.

    Raises:
        ContractError, ContractTypeError: KDA103 to KDA117, KDA121 to KDA125, before anything is written.
        BackendError: KDA201 to KDA204.
        ValuesError: KDA301, KDA302 for indices on the CPU always; KDA304 with ``check="values"``.

    Unchecked:
        On a GPU and without ``check="values"``: the range of indices, a slot named twice, finite values.

    Numerics:
        Gate, beta and state arithmetic are fp32; the decay is never rounded to the input dtype. What else is in the batch does not change a
        request's bits.

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
    dispatch.execute(checked_call(locals()), backend)
    return out, initial_state


@dataclasses.dataclass(slots=True, kw_only=True)
class DecodeCall:
    """A checked decode call; the fields are the arguments of `packed_decode_kda` with defaults filled in."""

    op: str
    mixed_qkv: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor | None
    scale: float
    initial_state: Tensor
    out: Tensor
    ssm_state_indices: Tensor
    use_qk_l2norm_in_kernel: bool
    lower_bound: float | None
    sizes: contract.Sizes
    beta_is_raw: bool = True

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the call by name."""
        named = {a.name: getattr(self, a.name) for a in contract.DECODE}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k `[B, H, K]` and v `[B, HV, V]`, views of `mixed_qkv`."""
        H, HV, K, V = (self.sizes[s] for s in ("H", "HV", "K", "V"))
        q, k, v = self.mixed_qkv.split([H * K, H * K, HV * V], -1)
        return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))


def checked_call(arguments: Mapping[str, Any]) -> DecodeCall:
    """The checked record of a call given by all its arguments; raises before anything is written (S19)."""
    sizes = contract.check_tensors(OP, contract.DECODE, arguments, contract.decode_relations)
    contract.check_flag(OP, "use_qk_l2norm_in_kernel", arguments["use_qk_l2norm_in_kernel"])
    contract.check_gate(OP, arguments["A_log"], arguments["dt_bias"], arguments["lower_bound"])
    contract.check_level(OP, arguments["check"])
    contract.check_in_place(OP, initial_state=arguments["initial_state"], out=arguments["out"])
    contract.check_apart(OP, "out", arguments["out"], **{name: arguments[name] for name in ("mixed_qkv", "a", "b", "initial_state")})
    fields = {f.name for f in dataclasses.fields(DecodeCall)} - {"op", "sizes", "scale", "beta_is_raw"}
    call = DecodeCall(
        op=OP,
        sizes=sizes,
        scale=contract.check_scale(OP, arguments["scale"], sizes["K"]),
        **{name: arguments[name] for name in fields},
    )
    values.check_decode_indices(call, sync=arguments["check"] == "values")
    if arguments["check"] == "values":
        values.check_decode_data(call)
    return call
