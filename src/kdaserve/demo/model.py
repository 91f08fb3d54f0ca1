"""A byte-level language model of four KDA layers, small enough to ship."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import resources

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdaserve.nn import KimiDeltaAttention, LayerState, RMSNorm
from kdaserve.ops.gate import silu
from kdaserve.plan import PrefillPlan, plan_prefill
from kdaserve.pool import StatePool
from kdaserve.snapshots import Snapshots

WEIGHTS = "model.safetensors"
START = b"\n"
"""Every text starts with this byte, so that an empty prompt has a token too."""


class MLP(nn.Module):
    """SwiGLU: `[..., size]` to the same shape."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: what its two residual branches are made of."""

    def __init__(self, size: int, heads: int, inner: int, lower_bound: float | None) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(size), RMSNorm(size)
        self.attention = KimiDeltaAttention(size, heads, size // heads, lower_bound=lower_bound)
        self.mlp = MLP(size, inner)


class ByteLM(nn.Module):
    """Bytes in, logits of the next byte out. Layers alternate between the bounded and the softplus gate.

    Args:
        layers, size, heads, inner: number of layers, width, heads of a layer, width inside the MLP.
        dropout: of both residual branches and the embedding, while training.
    """

    def __init__(self, layers: int = 4, size: int = 256, heads: int = 2, inner: int = 512, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, size)  # also the output head
        self.blocks = nn.ModuleList(Block(size, heads, inner, -5.0 if i % 2 == 0 else None) for i in range(layers))
        self.norm = RMSNorm(size)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def state_pool(self, slots: int) -> StatePool:
        """A pool of `slots` slots for all layers, on the device of the model, fp32."""
        block = self.blocks[0]
        assert isinstance(block, Block)
        return StatePool(slots, len(self.blocks), **block.attention.state_sizes(), device=self.embedding.weight.device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Training: `[B, T]` bytes as int64, each row from a zero state, to logits `[B, T, 256]`."""
        return self.logits(self.run_layers(tokens, lambda _, layer, x: layer(x)))

    def prefill(
        self, tokens: Tensor, pool: StatePool, slots: Tensor, plan: PrefillPlan, snapshots: Snapshots | None = None, backend: str = "auto"
    ) -> Tensor:
        """New tokens of packed sequences: `[1, T]` int64 to final hidden rows `[1, T, size]`; see `KimiDeltaAttention.prefill`."""

        def attend(i: int, layer: KimiDeltaAttention, x: Tensor) -> Tensor:
            return layer.prefill(x, LayerState.of(pool, i), slots, plan, snapshots, backend)

        return self.run_layers(tokens, attend)

    def decode(self, tokens: Tensor, pool: StatePool, slots: Tensor, backend: str = "auto") -> Tensor:
        """One token a request: `[B]` int64 to final hidden rows `[B, size]`; see `KimiDeltaAttention.decode`."""

        def attend(i: int, layer: KimiDeltaAttention, x: Tensor) -> Tensor:
            return layer.decode(x, LayerState.of(pool, i), slots, backend)

        return self.run_layers(tokens, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., size]` final hidden rows to `[..., 256]`."""
        return F.linear(hidden, self.embedding.weight)

    def run_layers(self, tokens: Tensor, attend: Callable[[int, KimiDeltaAttention, Tensor], Tensor]) -> Tensor:
        """`[...]` int64 bytes to final hidden rows `[..., size]`; ``attend(i, layer, x)`` runs the attention of layer i."""
        x = self.dropout(self.embedding(tokens) * self.embedding.embedding_dim**0.5)
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x = x + self.dropout(attend(i, block.attention, block.attention_norm(x)))
            x = x + self.dropout(block.mlp(block.mlp_norm(x)))
        return self.norm(x)


def load_model() -> ByteLM:
    """The trained model that comes with the package, in fp32 on the CPU, ready to serve."""
    from safetensors.torch import load

    model = ByteLM()
    model.load_state_dict(load(resources.files("kdaserve.demo").joinpath(WEIGHTS).read_bytes()))
    return model.eval().requires_grad_(False)


@torch.no_grad()
def bits_per_byte(model: ByteLM, pieces: Sequence[bytes], backend: str = "auto") -> float:
    """Mean cost of the bytes of `pieces`, each predicted from its own beginning only, an empty state first."""
    device = model.embedding.weight.device
    targets = torch.tensor(list(b"".join(pieces)), device=device)
    tokens = torch.tensor(list(b"".join(START + piece[:-1] for piece in pieces)), device=device)
    plan = plan_prefill(lengths=[len(piece) for piece in pieces], device=device)
    nowhere = torch.full((len(pieces),), -1, device=device)
    hidden = model.prefill(tokens[None], model.state_pool(1), nowhere, plan, backend=backend)
    return F.cross_entropy(model.logits(hidden[0]), targets).item() / math.log(2)
