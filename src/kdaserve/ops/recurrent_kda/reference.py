"""The judge is one for both prefill ops."""

from kdaserve.ops.chunk_kda.reference import run

__all__ = ["run"]
