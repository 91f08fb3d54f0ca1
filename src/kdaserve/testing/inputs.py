"""Random inputs that look like a model's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

Gate = Literal["bounded", "softplus", "none"]


def prefill_inputs(
    lengths: Sequence[int] = (64,),
    *,
    heads: int = 2,
    v_heads: int | None = None,
    k_dim: int = 16,
    v_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype = torch.float32,
    gate: Gate = "bounded",
    beta_is_raw: bool = False,
    slots: int | None = None,
    state_scale: float = 0.3,
    batched: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of `chunk_kda` for sequences of these lengths, on random states in shuffled slots.

    Args:
        lengths: tokens of each sequence; packed, or with ``batched=True`` one batch row each (then all equal).
        gate: ``"bounded"`` and ``"softplus"`` give raw logits with parameters, ``"none"`` log decays.
        slots: size of the pool; default two more than there are sequences.
        state_scale: standard deviation of the states.
    """
    rand = _Random(device, seed)
    HV = v_heads or heads
    slots = len(lengths) + 2 if slots is None else slots
    B, T = (len(lengths), lengths[0]) if batched else (1, sum(lengths))
    if batched and set(lengths) != {T}:
        raise ValueError(f"batched sequences have one length, got {list(lengths)}")
    call: dict[str, Any] = {name: rand.normal(B, T, heads, k_dim).to(dtype) for name in ("q", "k")}
    call["v"] = rand.normal(B, T, HV, v_dim).to(dtype)
    call["g"] = rand.normal(B, T, HV, k_dim).to(dtype)
    call["beta"] = (rand.normal(B, T, HV) if beta_is_raw else rand.uniform(B, T, HV)).to(dtype)
    call["initial_state"] = (state_scale * rand.normal(slots, HV, v_dim, k_dim)).to(pool_dtype)
    call["initial_state_indices"] = rand.permutation(slots)[: len(lengths)].int()
    call["use_qk_l2norm_in_kernel"] = True
    call["cu_seqlens"] = None if batched else torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    if gate == "none":
        call["g"] = -call["g"].abs()
    else:
        call |= rand.gate_parameters(HV, k_dim)
        call["lower_bound"] = -5.0 if gate == "bounded" else None
    call["beta_is_raw"] = beta_is_raw
    return call


def decode_inputs(
    batch: int = 2,
    *,
    heads: int = 2,
    v_heads: int | None = None,
    k_dim: int = 16,
    v_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype = torch.float32,
    lower_bound: float | None = -5.0,
    slots: int | None = None,
    state_scale: float = 0.3,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of `packed_decode_kda` for `batch` requests on random states in shuffled slots.

    Args:
        lower_bound: of the bounded gate, or None for the softplus gate.
        slots: size of the pool; default two more than there are requests.
        state_scale: standard deviation of the states.
    """
    rand = _Random(device, seed)
    HV = v_heads or heads
    slots = batch + 2 if slots is None else slots
    return {
        "mixed_qkv": rand.normal(batch, 2 * heads * k_dim + HV * v_dim).to(dtype),
        "a": rand.normal(batch, HV * k_dim).to(dtype),
        "b": rand.normal(batch, HV).to(dtype),
        **rand.gate_parameters(HV, k_dim),
        "scale": k_dim**-0.5,
        "initial_state": (state_scale * rand.normal(slots, HV, v_dim, k_dim)).to(pool_dtype),
        "out": torch.full((batch, 1, HV, v_dim), torch.nan, dtype=dtype, device=device),
        "ssm_state_indices": rand.permutation(slots)[:batch].int(),
        "use_qk_l2norm_in_kernel": True,
        "lower_bound": lower_bound,
    }


class _Random:
    """One seeded stream of numbers on one device."""

    def __init__(self, device: torch.device | str, seed: int) -> None:
        self._kw: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(seed), "device": device}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, **self._kw)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, **self._kw)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, **self._kw)

    def gate_parameters(self, HV: int, K: int) -> dict[str, Tensor]:
        return {"A_log": self.uniform(HV), "dt_bias": self.uniform(HV * K)}
