"""The parts of a Hopper GPU that `gluon_on_cpu` runs kernels on: groups of warps, barriers, both kinds of memory, products in flight, tensor maps."""

from __future__ import annotations

import dataclasses
import math
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class DeadlockError(RuntimeError):
    """All groups of warps wait."""


class Group:
    """Warps that run the same code."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for = ""
        self.done = False


class Program:
    """One of `programs` while it runs."""

    def __init__(self, i: int, programs: int, warps: int, eager: bool) -> None:
        self.i, self.programs, self.warps, self.eager = i, programs, warps, eager
        self.groups = [Group("default")]
        self.turn = self.groups[0]
        self.failure: BaseException | None = None
        self.changed = threading.Condition()
        self.memory: list[Shared] = []
        self.barriers: dict[int, Barrier] = {}

    def give_way(self, ready: Callable[[], bool] = lambda: True, waits_for: str = "") -> None:
        """The group whose turn it is goes on once it is `ready`; until then, or where others go first, others do."""
        group = self.turn
        group.ready, group.waits_for = ready, waits_for
        with self.changed:
            self._pass_on(group)
            while self.turn is not group and self.failure is None:
                self.changed.wait()
        if self.failure is not None:
            raise self.failure

    def end(self, group: Group) -> None:
        group.done = True
        with self.changed:
            self._pass_on(group)

    def fail(self, failure: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()

    def _pass_on(self, group: Group) -> None:
        i = self.groups.index(group)
        others = self.groups[i + 1 :] + self.groups[:i]
        waiting = [g for g in ([*others, group] if self.eager else [group, *others]) if not g.done]
        following = next((g for g in waiting if g.ready()), None)
        if following is None:
            self.failure = DeadlockError("; ".join(f"{g.name} waits for {g.waits_for}" for g in waiting))
        else:
            self.turn = following
        self.changed.notify_all()


class Barrier:
    """An mbarrier."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0

    def change(self, arrivals: int = 0, size: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += size
        assert self.pending >= 0, "more arrivals at a barrier than it counts"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


@dataclasses.dataclass
class Shared:
    """A part of shared memory. `written` of the whole allocation says how far ordinary stores are from being seen by asynchronous reads."""

    x: Tensor
    whole: Shared | None = None
    layout: Any = None
    written: str = ""

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def shape(self) -> list[int]:
        return [*self.x.shape]

    @property
    def owner(self) -> Shared:
        return self.whole or self

    def load(self, layout: Any = None) -> Tensor:
        return self.x.clone()

    def store(self, value: Tensor) -> None:
        assert (value.shape, value.dtype) == (self.x.shape, self.x.dtype), (value.shape, self.x.shape, value.dtype, self.x.dtype)
        self.x.copy_(value)
        self.owner.written = "written"

    def _part(self, x: Tensor, layout: Any = None) -> Shared:
        return Shared(x, self.owner, layout or self.layout)

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < len(self.x), "outside of shared memory"
        return self._part(self.x[int(i)])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        return self._part(self.x.narrow(dim, int(start), length))

    def permute(self, order: Sequence[int]) -> Shared:
        return self._part(self.x.permute(*order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self._part(self.x.view(*shape))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        flat = self.x.reshape(-1).view(dtype)
        assert flat.data_ptr() == self.x.data_ptr(), "of contiguous memory"
        return self._part(flat[: math.prod(shape)].view(*shape), layout)

    def _keep_alive(self) -> None:
        pass

    def read(self) -> Tensor:
        """By the matrix units or TMA."""
        self.free()
        return self.x

    def free(self) -> None:
        """For asynchronous copies."""
        assert not self.owner.written, f"read or written past the threads, which have {self.owner.written} to it, with no barrier behind a fence"


class Product:
    """A matrix product in flight."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: Any) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, bool(use_acc)
        self.value: Tensor | None = None

    def compute(self) -> None:
        a = self.a.read() if isinstance(self.a, Shared) else self.a
        assert a.dtype == self.b.dtype, (a.dtype, self.b.dtype)
        value = a.float() @ self.b.read().float()
        if self.use_acc:
            before = self.acc.value if isinstance(self.acc, Product) else self.acc
            assert before is not None
            value = before + value
        self.value = value


class Pointer:
    """A pointer, or a block of them, into the storage of a tensor."""

    def __init__(self, base: Tensor, offset: Any) -> None:
        self.base, self.offset = base, offset

    @classmethod
    def to_tensor(cls, x: Tensor) -> Pointer:
        return cls(x.new_empty(0).set_(x.untyped_storage()), torch.tensor(x.storage_offset()))

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.base.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.base, self.offset + torch.as_tensor(offset).long())

    __radd__ = __add__

    def __sub__(self, offset: Any) -> Pointer:
        return self + -torch.as_tensor(offset).long()

    def to(self, dtype: torch.dtype) -> Tensor:
        """For what is brought to a cache."""
        return self.where(None)[0].to(dtype)

    def where(self, mask: Any, *shapes: Any) -> tuple[Tensor, Tensor]:
        """Offsets and mask in full; what is not masked must lie within the storage."""
        m = torch.as_tensor(True if mask is None else mask)
        shape = torch.broadcast_shapes(self.offset.shape, m.shape, *shapes)
        offset, m = self.offset.expand(shape), m.expand(shape)
        assert bool(((offset >= 0) & (offset < len(self.base)))[m].all()), "outside of a tensor"
        return offset, m


@dataclasses.dataclass
class Descriptor:
    """A tensor map."""

    x: Tensor
    block: list[int]
    layout: Any

    @classmethod
    def of(cls, d: TensorDescriptor) -> Descriptor:
        return cls(d.base.as_strided(d.shape, d.strides), d.block_shape, d.layout)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def copy(self, corner: Sequence[Any], box: Tensor, out: bool) -> None:
        """Between a box of the tensor and shared memory; what lies outside is read as zero, and not written."""
        assert [*box.shape] == [*self.block], (box.shape, self.block)
        spans = [(max(int(c), 0), min(int(c) + n, size)) for c, n, size in zip(corner, self.block, self.x.shape, strict=True)]
        if not out:
            box.zero_()
        if any(a >= b for a, b in spans):
            return
        there = self.x[tuple(slice(a, b) for a, b in spans)]
        here = box[tuple(slice(a - int(c), b - int(c)) for (a, b), c in zip(spans, corner, strict=True))]
        there.copy_(here) if out else here.copy_(there)
