"""Slots for the state of requests: recurrent and short-convolution state of all layers of a model."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from kdaserve import contract, guards
from kdaserve.errors import dtype_name, error


class StatePool:
    """A fixed number of slots; a slot holds the whole state of one request.

    Memory is slot-major: all layers of a slot lie together, so that zeroing, copying or moving a request is one contiguous copy. What a layer
    sees, `recurrent(layer)`, is therefore a view with a slot stride, which every kernel of this library reads and writes in place.

    Args:
        slots: number of requests (and saved prefixes) that fit.
        layers: KDA layers of the model.
        v_heads, k_dim, v_dim: HV, K and V of a layer.
        conv_channels: channels of a layer's short convolutions together (q, k and v: ``2*H*K + HV*V``); 0 for none.
        conv_width: taps of the short convolution; its state is the last ``conv_width - 1`` inputs.
        dtype: fp32, bf16, fp16 (or fp64) of the recurrent state. The convolution state is kept in `conv_dtype`.
        conv_dtype: default fp32.
        device: where the pool lives.

    Raises:
        ContractError: KDA129 for sizes or dtypes that make no pool.

    Example:
        >>> pool = StatePool(4, layers=2, v_heads=2, k_dim=64, v_dim=64)
        >>> slot = pool.allocate()
        >>> pool.recurrent(0).shape, pool.free_slots
        (torch.Size([4, 2, 64, 64]), 3)
    """

    def __init__(
        self,
        slots: int,
        layers: int,
        *,
        v_heads: int,
        k_dim: int,
        v_dim: int,
        conv_channels: int = 0,
        conv_width: int = 4,
        dtype: torch.dtype = torch.float32,
        conv_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("slots", slots), ("layers", layers), ("v_heads", v_heads), ("conv_width", conv_width)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise error("KDA129", argument=name, got=repr(value), expected="a whole number >= 1")
        if isinstance(conv_channels, bool) or not isinstance(conv_channels, int) or conv_channels < 0:
            raise error("KDA129", argument="conv_channels", got=repr(conv_channels), expected="a whole number >= 0")
        for name, value in (("k_dim", k_dim), ("v_dim", v_dim)):
            if not guards.head_dim_supported(value):
                raise error("KDA129", argument=name, got=repr(value), expected="a multiple of 16 up to 256")
        for name, kind in (("dtype", dtype), ("conv_dtype", conv_dtype)):
            if kind not in contract.FLOATS:
                raise error("KDA129", argument=name, got=dtype_name(kind), expected="one of " + ", ".join(dtype_name(d) for d in contract.FLOATS))
        with torch.inference_mode(False):  # a pool made in inference mode serves outside of it too
            self._recurrent = torch.zeros(slots, layers, v_heads, v_dim, k_dim, dtype=dtype, device=device)
            self._conv = torch.zeros(slots, layers, conv_channels, conv_width - 1, dtype=conv_dtype, device=device)
        self._free = list(range(slots))
        self._allocated: set[int] = set()

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self._recurrent.shape[0]

    @property
    def free_slots(self) -> int:
        """Number of slots that can still be allocated."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all state."""
        return self._recurrent.nbytes + self._conv.nbytes

    def recurrent(self, layer: int) -> Tensor:
        """`[slots, HV, V, K]` view for a layer's kernels; the ``initial_state`` of `chunk_kda` and `packed_decode_kda`."""
        return self._recurrent[:, self._checked(layer)]

    def conv(self, layer: int) -> Tensor:
        """`[slots, conv_channels, conv_width - 1]` view for a layer's short convolution, oldest input first."""
        return self._conv[:, self._checked(layer)]

    def allocate(self) -> int:
        """The lowest free slot, zeroed in all layers.

        Raises:
            PoolError: KDA127 when none is free.
        """
        slot = self._lowest_free()
        self._recurrent[slot] = 0
        self._conv[slot] = 0
        return self._take(slot)

    def free(self, slot: int) -> None:
        """Gives a slot back; what it held is gone for its next owner.

        Raises:
            PoolError: KDA128 when it is not allocated.
        """
        self._must_own("free", slot)
        self._allocated.remove(slot)
        heapq.heappush(self._free, slot)

    def copy(self, source: int, target: int) -> None:
        """Copies the state of all layers from one allocated slot to another.

        Raises:
            PoolError: KDA128 when one of them is not allocated.
        """
        self._must_own("copy", source)
        self._must_own("copy", target)
        self._copy(source, target)

    def fork(self, slot: int) -> int:
        """A new slot with a copy of the state of `slot`, made at once (a state is small; nothing is copied on write).

        Raises:
            PoolError: KDA127 when no slot is free, KDA128 when `slot` is not allocated. Then no slot is taken.
        """
        self._must_own("fork", slot)
        child = self._lowest_free()
        self._copy(slot, child)
        return self._take(child)

    def _copy(self, source: int, target: int) -> None:
        self._recurrent[target] = self._recurrent[source]
        self._conv[target] = self._conv[source]

    def _lowest_free(self) -> int:
        if not self._free:
            raise error("KDA127", total=self.slots)
        return self._free[0]

    def _take(self, lowest: int) -> int:
        """Hands out the lowest free slot, after all that can fail has been done to it."""
        heapq.heappop(self._free)
        self._allocated.add(lowest)
        return lowest

    def _must_own(self, operation: str, slot: int) -> None:
        if not guards.slot_is_held(slot, self._allocated):
            raise error("KDA128", operation=operation, slot=repr(slot))

    def _checked(self, layer: int) -> int:
        layers = self._recurrent.shape[1]
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
            raise error("KDA129", argument="layer", got=repr(layer), expected=f"a layer from 0 to {layers - 1}")
        return layer

    def __repr__(self) -> str:
        where = f"{self._recurrent.dtype}, {self._recurrent.device}"
        return f"StatePool({self.slots} slots, {self.free_slots} free, {self.nbytes / 2**20:.1f} MiB, {where})"
