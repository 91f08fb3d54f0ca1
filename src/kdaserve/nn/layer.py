"""The KDA layer, with the parameter names of the public Kimi-Linear checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from kdaserve import guards
from kdaserve.errors import error
from kdaserve.nn.convolution import PackedInputs, convolve_token, load_states, store_states
from kdaserve.nn.norm import GatedRMSNorm
from kdaserve.ops.chunk_kda.api import chunk_kda
from kdaserve.ops.packed_decode_kda.api import packed_decode_kda
from kdaserve.plan import PrefillPlan, plan_prefill
from kdaserve.pool import StatePool
from kdaserve.snapshots import Snapshots

OP = "KimiDeltaAttention"


class LayerState(NamedTuple):
    """What one layer keeps of all slots; both tensors are updated in place.

    Attributes:
        recurrent: `[slots, HV, V, K]`.
        conv: `[slots, 2*H*K + HV*V, conv_size - 1]`, the last inputs of the short convolutions, channels q | k | v, oldest first.
    """

    recurrent: Tensor
    conv: Tensor

    @classmethod
    def of(cls, pool: StatePool, layer: int) -> LayerState:
        """The views of `pool` that layer number `layer` works on."""
        return cls(pool.recurrent(layer), pool.conv(layer))


class StateSizes(TypedDict):
    """What a `StatePool` must know of a layer."""

    v_heads: int
    k_dim: int
    v_dim: int
    conv_channels: int
    conv_width: int


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention: projections, short convolutions, the KDA kernels, gated norm, output projection.

    H = `num_heads` query and key heads, HV = `v_heads` value heads, K = V = `head_dim`. Parameters carry the names of the public Kimi-Linear
    checkpoints, so ``load_state_dict`` takes a layer of one (`A_log` may come as ``[1, 1, HV, 1]``). `A_log` and `dt_bias` stay in fp32
    whatever dtype the layer is moved to.

    Args:
        hidden_size: width of the input and output.
        num_heads: H.
        head_dim: K and V, a multiple of 16 up to 256; also the rank of the two low-rank gates.
        v_heads: HV, a multiple of H; default H.
        conv_size: taps of the short convolutions.
        lower_bound: None for the softplus gate of the Kimi-Linear checkpoints, a negative number for the bounded gate.
        norm_eps: of the output norm.

    Example:
        >>> layer = KimiDeltaAttention(64, num_heads=2, head_dim=16)
        >>> pool = StatePool(4, layers=1, **layer.state_sizes())
        >>> x, plan = torch.randn(1, 100, 64), plan_prefill(lengths=[30, 70])
        >>> y = layer.prefill(x, LayerState.of(pool, 0), torch.tensor([2, 0]), plan)
        >>> z = layer.decode(torch.randn(2, 64), LayerState.of(pool, 0), torch.tensor([2, 0]))
        >>> y.shape, z.shape
        (torch.Size([1, 100, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        v_heads: int | None = None,
        conv_size: int = 4,
        lower_bound: float | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        v_heads = num_heads if v_heads is None else v_heads
        if not guards.heads_divide(num_heads, v_heads):
            raise error("KDA110", op=OP, heads=num_heads, v_heads=v_heads)
        if not guards.head_dim_supported(head_dim):
            raise error("KDA111", op=OP, symbol="head_dim", got=head_dim)
        if not guards.lower_bound_is_negative(lower_bound):
            raise error("KDA114", op=OP, got=lower_bound)
        self.hidden_size, self.num_heads, self.head_dim, self.v_heads = hidden_size, num_heads, head_dim, v_heads
        self.conv_size, self.lower_bound = conv_size, lower_bound
        keys, values = num_heads * head_dim, self.v_heads * head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        def convolution(channels: int) -> nn.Conv1d:
            return nn.Conv1d(channels, channels, conv_size, groups=channels, bias=False)

        self.q_proj, self.k_proj, self.v_proj = linear(hidden_size, keys), linear(hidden_size, keys), linear(hidden_size, values)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = convolution(keys), convolution(keys), convolution(values)
        self.f_a_proj, self.f_b_proj = linear(hidden_size, head_dim), linear(head_dim, self.v_heads * head_dim)
        self.b_proj = linear(hidden_size, self.v_heads)
        self.A_log = nn.Parameter(torch.empty(self.v_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.v_heads * head_dim))
        self.g_a_proj, self.g_b_proj = linear(hidden_size, head_dim), linear(head_dim, values)
        self.o_norm = GatedRMSNorm(head_dim, norm_eps)
        self.o_proj = linear(values, hidden_size)
        self.reset_gate()
        self.register_load_state_dict_pre_hook(_flatten_gate)

    @torch.no_grad()
    def reset_gate(self) -> None:
        """Starts the gate so that channels forget over 10 to 1000 tokens, spread evenly on a log scale."""
        rate = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.A_log.zero_()
        if self.lower_bound is None:
            self.dt_bias.copy_(rate.expm1().log())  # the inverse of softplus
        else:
            self.dt_bias.copy_((rate / -self.lower_bound).clamp_max(0.99).logit())  # a bound above -0.1 allows no faster rate

    def state_sizes(self) -> StateSizes:
        """Keyword arguments for a `StatePool` that this layer can use."""
        return {
            "v_heads": self.v_heads,
            "k_dim": self.head_dim,
            "v_dim": self.head_dim,
            "conv_channels": sum(self.qkv_channels()),
            "conv_width": self.conv_size,
        }

    def prefill(
        self, x: Tensor, state: LayerState, slots: Tensor, plan: PrefillPlan, snapshots: Snapshots | None = None, backend: str = "auto"
    ) -> Tensor:
        """New tokens of packed sequences, each from and into its slot. Differentiable in `x` and the parameters, not through `state`.

        Args:
            x: `[1, T, hidden_size]` in the dtype of the layer; rows past the plan's tokens are padding, whatever they hold.
            state: of this layer, updated in place.
            slots: `[N]` int32 or int64, on the device of `x`. Negative = padding: from a zero state, stored nowhere.
            plan: from `plan_prefill` on the device of `x`; shared by all layers of a step.
            snapshots: states, recurrent and convolution, to save into further slots on the way.
            backend: as in `chunk_kda`.

        Returns:
            `[1, T, hidden_size]`, zero at padding rows.

        Raises:
            Whatever `chunk_kda` raises; then nothing has been written.
        """
        self._check_conv(state)
        covered = torch.arange(x.shape[1], device=x.device) < plan.cu_seqlens[-1]
        x = torch.where(covered[:, None], x, 0)
        inputs = PackedInputs(self.project_qkv(x[0]), load_states(state.conv, slots), plan)
        q, k, v = inputs.convolve(self.conv_taps()).to(x.dtype)[None].split(self.qkv_channels(), -1)
        o = chunk_kda(
            self.split_heads(q),
            self.split_heads(k),
            self.split_heads(v),
            self.split_heads(self.decay_logits(x)),
            self.b_proj(x),
            None,
            state.recurrent.detach(),
            slots,
            True,
            plan.cu_seqlens,
            self.A_log,
            self.dt_bias,
            self.lower_bound,
            beta_is_raw=True,
            snapshots=snapshots,
            plan=plan,
            backend=backend,
        )
        assert isinstance(o, Tensor)
        self._store_conv(state.conv, inputs, slots, plan, snapshots)
        return self.project_output(o, x)

    @torch.no_grad()
    def decode(self, x: Tensor, state: LayerState, slots: Tensor, backend: str = "auto") -> Tensor:
        """One token a request. Not differentiable.

        Args:
            x: `[B, hidden_size]` in the dtype of the layer.
            state: of this layer, updated in place.
            slots: `[B]` int32 or int64, on the device of `x`. Negative = padding: no state is touched.
            backend: as in `packed_decode_kda`.

        Returns:
            `[B, hidden_size]`, zero at padding rows.

        Raises:
            Whatever `packed_decode_kda` raises; then nothing has been written.
        """
        self._check_conv(state)
        x = torch.where((slots >= 0)[:, None], x, 0)
        qkv, conv = convolve_token(self.project_qkv(x), load_states(state.conv, slots), self.conv_taps())
        o = x.new_empty(len(x), 1, self.v_heads, self.head_dim)
        gates = self.A_log, self.dt_bias
        packed_decode_kda(
            qkv.to(x.dtype), self.decay_logits(x), self.b_proj(x), *gates, None, state.recurrent, o, slots, True, self.lower_bound, backend=backend
        )
        store_states(state.conv, slots, conv)
        return self.project_output(o[:, 0], x)

    def forward(self, x: Tensor, backend: str = "auto") -> Tensor:
        """Whole sequences from a zero state, for training.

        Args:
            x: `[B, T, hidden_size]` in the dtype of the layer.
            backend: as in `chunk_kda`.

        Returns:
            `[B, T, hidden_size]`.
        """
        B, T, _ = x.shape
        plan = plan_prefill(lengths=[T] * B, device=x.device)
        sizes = self.state_sizes()
        dtype = torch.promote_types(x.dtype, torch.float32)
        recurrent = x.new_zeros(1, self.v_heads, self.head_dim, self.head_dim, dtype=dtype)
        nothing = LayerState(recurrent, x.new_zeros(1, sizes["conv_channels"], self.conv_size - 1, dtype=dtype))
        nowhere = torch.full((B,), -1, dtype=torch.int32, device=x.device)  # a negative slot starts from zero and is stored nowhere
        return self.prefill(x.reshape(1, B * T, -1), nothing, nowhere, plan, backend=backend).view_as(x)

    def qkv_channels(self) -> tuple[int, int, int]:
        """Channels of q, k and v in `project_qkv` and in the convolution state."""
        keys = self.num_heads * self.head_dim
        return keys, keys, self.v_heads * self.head_dim

    def split_heads(self, x: Tensor) -> Tensor:
        """`[..., heads * head_dim]` to `[..., heads, head_dim]`."""
        return x.unflatten(-1, (-1, self.head_dim))

    def project_qkv(self, x: Tensor) -> Tensor:
        """`[..., hidden_size]` to q | k | v `[..., 2*H*K + HV*V]`, before the convolutions."""
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)

    def conv_taps(self) -> Tensor:
        """`[C, conv_size]`: the three depthwise convolutions as one."""
        return torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])[:, 0]

    def decay_logits(self, x: Tensor) -> Tensor:
        """`[..., HV*K]` raw gate logits."""
        return self.f_b_proj(self.f_a_proj(x))

    def project_output(self, o: Tensor, x: Tensor) -> Tensor:
        """`[..., HV, V]` heads, normed, gated by the layer's input, to `[..., hidden_size]`."""
        gate = self.split_heads(self.g_b_proj(self.g_a_proj(x)))
        return self.o_proj(self.o_norm(o, gate).flatten(-2))

    def _check_conv(self, state: LayerState) -> None:
        """KDA104 unless the convolution state fits the layer and the recurrent state: before the kernel writes the latter."""
        expected = (len(state.recurrent), sum(self.qkv_channels()), self.conv_size - 1)
        for dim, (symbol, got, wanted) in enumerate(zip(("slots", "channels", "conv_size - 1"), state.conv.shape, expected, strict=False)):
            if got != wanted:
                details = {"shape": list(state.conv.shape), "layout": "[slots, 2*H*K + HV*V, conv_size - 1]", "source": "the layer"}
                raise error("KDA104", op=OP, argument="state.conv", dim=dim, symbol=symbol, got=got, expected=wanted, **details)

    def _store_conv(self, conv: Tensor, inputs: PackedInputs, slots: Tensor, plan: PrefillPlan, snapshots: Snapshots | None) -> None:
        if not plan.lengths:
            return
        sequence, tokens = torch.arange(len(slots), device=slots.device), plan.cu_seqlens.diff()
        if snapshots is not None:
            sequence = torch.cat([sequence, snapshots.sequence.to(slots.device)])
            tokens = torch.cat([tokens, snapshots.tokens.to(slots.device)])
            slots = torch.cat([slots, snapshots.slot.to(slots.device)])
        used = slots >= 0  # what an unused entry of snapshots holds otherwise is not to be read
        store_states(conv, slots, inputs.states_after(torch.where(used, sequence, 0), torch.where(used, tokens, 0)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KimiDeltaAttention:
        """Moves and casts the layer; the gate's parameters are only moved, since the decay is never rounded below fp32 (S12)."""
        kept = [t for p in (self.A_log, self.dt_bias) for t in (p, p.grad) if t is not None]

        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            return t.to(moved.device) if moved.dtype != t.dtype and any(t is k for k in kept) else moved

        return super()._apply(move, recurse)


def _flatten_gate(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Checkpoints hold `A_log` as ``[1, 1, HV, 1]``."""
    name = prefix + "A_log"
    if name in state_dict:
        state_dict[name] = state_dict[name].flatten()
