"""The KDA layer of public checkpoints on this library's kernels."""

from kdaserve.nn.layer import KimiDeltaAttention, LayerState
from kdaserve.nn.norm import GatedRMSNorm, RMSNorm

__all__ = ["GatedRMSNorm", "KimiDeltaAttention", "LayerState", "RMSNorm"]
