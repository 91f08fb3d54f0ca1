"""How Triton and Gluon kernels are launched: nothing compiles again when lengths, strides or alignment change, and little time is spent on the host.

By default Triton compiles a kernel anew when an integer is 1 or becomes divisible by 16, and when a pointer is or is not aligned to 16 bytes. Here
no number is looked at. A kernel has two forms instead: one for memory that vector loads can read, and one for any memory. The form is the
constant `UNIT`, in elements: with 8, base pointers are aligned to 16 bytes and strides are passed divided by 8, so that the compiler sees from
``stride * UNIT`` what divides them; with 1, nothing is assumed but of memory that the library allocates itself.

Triton's own launch works out types and constants of all arguments each time, and encodes every tensor map again. On triton 3.6 with CUDA a kernel
that has run once is launched through its compiled form instead, with maps that are kept; elsewhere, in the interpreter, and while a profiler listens,
the usual way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from kdaserve.ops.jit import math

INTERPRETED = not isinstance(math.sigmoid, JITFunction)
"""Whether kernels run in Triton's interpreter: `TRITON_INTERPRET=1` was set when triton was imported."""
DIRECT = not INTERPRETED and triton.__version__.startswith("3.6.") and torch.version.hip is None
ONE_AT_A_TIME: contextlib.AbstractContextManager = threading.Lock() if INTERPRETED else contextlib.nullcontext()
"""The interpreter puts its own functions into `triton.language` while a kernel runs."""
UNIT = 8
"""Elements that strides are multiples of in the form with vector loads; 16 bytes of the narrowest dtype."""
MAPS = 64
"""Addresses for which a launch keeps the tensor map of a matrix."""


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """What a kernel sees through a tensor map: rows of contiguous numbers, copied a box at a time between memory and shared memory.

    Attributes:
        rows, columns: how many there are; what a box has outside of them is read as zero and not written.
        stride: elements from row to row, a multiple of 16 bytes, as the address is.
        box: rows and columns of a copy.
        layout: of a box in shared memory.
    """

    rows: int
    columns: int
    stride: int
    box: tuple[int, int]
    layout: Any


class Kernel:
    """A kernel in its two forms.

    Its parameters stand in this order: tensor maps, called `d_*`, which only Gluon has; pointers, called `p_*`; strides, which come divided by
    `UNIT`; other numbers; constants, the last one `UNIT`. An optional tensor is None.
    """

    def __init__(self, function: Callable, vectors: Sequence[str], own: Sequence[str], jit: Callable) -> None:
        parameters = inspect.signature(function).parameters.values()
        self.name = function.__name__
        self.constants = [p.name for p in parameters if "constexpr" in str(p.annotation)]
        self.maps = [p.name for p in parameters if p.name.startswith("d_")]
        self.pointers = [p.name for p in parameters if p.name.startswith("p_")]
        self.numbers = [p.name for p in parameters if p.name not in {*self.constants, *self.maps, *self.pointers}]
        order = [*self.maps, *self.pointers, *self.numbers, *self.constants]
        assert order == [p.name for p in parameters], f"order of the parameters of {self.name}"
        assert self.constants[-1] == "UNIT", f"last parameter of {self.name}"
        self.vectors = [order.index(name) for name in vectors]
        self._make = jit
        self.forms = {unit: self._jit(function, [*own, *vectors] if unit > 1 else own) for unit in (UNIT, 1)}
        self.compiled: dict[tuple, Any] = {}
        """By types, constants and form, what has been launched; None where Triton's own launch stays in use."""

    def _jit(self, function: Callable, aligned: Iterable[str]) -> Any:
        free = [name for name in self.pointers if name not in aligned]
        return self._make(function, do_not_specialize=self.numbers, do_not_specialize_on_alignment=free)


def kernel(*vectors: str, own: Sequence[str] = (), jit: Callable = triton.jit) -> Callable[[Callable], Kernel]:
    """Decorator that makes a `Kernel`.

    Args:
        vectors: the pointers that are read or written several elements at once.
        own: those of them to tensors that start at multiples of 16 bytes always, as what the library allocates does.
        jit: of the language that the kernel is written in.
    """
    return lambda function: Kernel(function, vectors, own, jit)


class Launch:
    """A kernel with all that follows from the layout of a call's tensors; called with the tensors and what else changes."""

    def __init__(
        self,
        kernel: Kernel,
        programs: int,
        tensors: Sequence[Tensor | None],
        strides: Sequence[int],
        numbers: Sequence[int],
        *,
        maps: Sequence[Matrix] = (),
        overlapping: bool = True,
        **constants: Any,
    ):
        """`tensors` as in the calls; `strides` in elements; `numbers` come before those of the calls; `maps` are those of the first tensors.

        `constants` are the kernel's but `UNIT`, and Triton's options. With the option `launch_pdl` the kernel may start before the one before it in
        the stream has ended, unless not `overlapping`: a matter of a launch, not of what is compiled, and Triton's own launch always lets it.
        """
        assert len(maps) == len(kernel.maps), f"tensor maps of {kernel.name}"
        assert len(tensors) == len(kernel.maps) + len(kernel.pointers), f"tensors of {kernel.name}"
        self._kernel, self._programs = kernel, programs
        self._unit = UNIT if all(stride % UNIT == 0 for stride in strides) else 1
        self._numbers = {unit: (*[stride // unit for stride in strides], *numbers) for unit in (UNIT, 1)}
        self._options = {name: constants.pop(name) for name in [*constants] if name not in kernel.constants}
        assert [*constants, "UNIT"] == kernel.constants, f"constants of {kernel.name}"
        self._constants = tuple(constants.values())
        device = next(x.device for x in tensors if x is not None)
        self._device = device.index if device.type == "cuda" else None
        dtypes = tuple(None if x is None else x.dtype for x in tensors)
        self._keys = {unit: (device, dtypes, *self._constants, unit, *self._options.values()) for unit in (UNIT, 1)}
        self._starts: dict[int, _Start] = {}
        self._maps, self._overlapping = maps, overlapping
        self._encoded: list[dict[int, tuple]] = [{} for _ in maps]
        """By address, what stands for a tensor map among the arguments."""

    def __call__(self, tensors: Sequence[Tensor | None], *numbers: float) -> None:
        """`tensors` by tensor map and by pointer, of the layout this was made for; `numbers` are the kernel's last ones."""
        if self._device is not None and self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self(tensors, *numbers)
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        unit = self._unit
        for i in self._kernel.vectors:
            if (addresses[i] or 0) & 15:
                unit = 1
        start = self._starts.get(unit) or self._find(unit)
        if start is None or profiled():
            return self._launch(tensors, (*self._numbers[unit], *numbers, *self._constants, unit), unit)
        if self._encoded:
            addresses = self._mapped(start, addresses)
        stream = start.stream(self._device)
        start.function(self._programs, 1, 1, stream, *start.settings, *addresses, *self._numbers[unit], *numbers, *self._constants, unit)
        return None

    def _find(self, unit: int) -> _Start | None:
        """The compiled form, if some layout with these dtypes and constants has launched it before."""
        compiled = self._kernel.compiled.get(self._keys[unit])
        if compiled is None or compiled.run.global_scratch_size or compiled.run.profile_scratch_size:
            return None
        start = self._starts[unit] = _Start.of(compiled, self._overlapping)
        return start

    def _mapped(self, start: _Start, addresses: list) -> list:
        """`addresses`, the first ones as tensor maps."""
        found: list = []
        for i, (encoded, address) in enumerate(zip(self._encoded, addresses, strict=False)):
            found += encoded.get(address) or self._encode(start, i, address)
        return found + addresses[len(self._encoded) :]

    def _encode(self, start: _Start, i: int, address: int) -> tuple:
        """A tensor map, followed by shape and strides, which the compiled form takes and does not read."""
        matrix, encoded = self._maps[i], self._encoded[i]
        if len(encoded) >= MAPS:
            encoded.clear()
        shape, strides = (matrix.rows, matrix.columns), (matrix.stride, 1)
        made = triton.runtime.driver.active.utils.fill_tma_descriptor(address, *start.maps[i], shape, strides, 0)
        found = encoded[address] = (made, *shape, *strides)
        return found

    def _launch(self, tensors: Sequence[Tensor | None], arguments: tuple, unit: int) -> None:
        described = [_descriptor(x, matrix) for x, matrix in zip(tensors, self._maps, strict=False)]
        with ONE_AT_A_TIME, quiet():
            compiled = self._kernel.forms[unit][(self._programs,)](*described, *tensors[len(described) :], *arguments, **self._options)
        self._kernel.compiled[self._keys[unit]] = compiled if DIRECT else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Start:
    """What starts a compiled kernel on triton 3.6, past what it does in Python at every launch.

    Attributes:
        stream: gives the current stream of a device.
        function: takes the grid, the stream, `settings`, and the arguments.
        maps: of each tensor map, what its encoding takes besides address, shape and strides: swizzle, size and type of an element, box.
    """

    stream: Callable
    function: Callable
    settings: tuple
    maps: tuple[tuple, ...]

    @classmethod
    def of(cls, compiled: Any, overlapping: bool) -> _Start:
        """Of a kernel that needs no memory of its own."""
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        run = compiled.run
        maps = getattr(compiled.metadata, "tensordesc_meta", None) or ()
        # With tensor maps, Triton wraps the function in one that encodes them.
        function = inspect.getclosurevars(run.launch).nonlocals["launcher"] if maps else run.launch
        settings = (
            compiled.function,
            run.launch_cooperative_grid,
            run.launch_pdl and overlapping,
            None,
            None,
            compiled.packed_metadata,
            None,
            None,
            None,
        )
        stream = triton.runtime.driver.active.get_current_stream
        return cls(
            stream, function, settings, tuple((m["swizzle"], m["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[m["elem_type"]], m["block_size"]) for m in maps)
        )


def _descriptor(tensor: Tensor | None, matrix: Matrix) -> Any:
    """For Triton's own launch."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(tensor, [matrix.rows, matrix.columns], [matrix.stride, 1], [*matrix.box], matrix.layout)


def quiet() -> contextlib.AbstractContextManager:
    """The interpreter computes in numpy, which warns of what a GPU does without a word: infinities where a kernel masks them."""
    if not INTERPRETED:
        return contextlib.nullcontext()
    import numpy as np

    return np.errstate(over="ignore", invalid="ignore")


def profiled() -> bool:
    """Whether a profiler wants to hear of launches."""
    hooks = triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)


def strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """The first `dims` strides, zero where a dimension has a single element and its stride is anything, and where there is no tensor."""
    if tensor is None:
        return (0,) * dims
    return tuple(0 if n == 1 else s for n, s in zip(tensor.shape[:dims], tensor.stride()[:dims], strict=True))


class Gated(Protocol):
    """The fields of a call that choose its gate."""

    lower_bound: float | None

    @property
    def A_log(self) -> Tensor | None:
        """Gate parameter, None when g is the log decay already."""


def gate_name(call: Gated) -> str:
    """The gate of a call, as `log2_decay` names it."""
    if call.A_log is None:
        return "none"
    return "softplus" if call.lower_bound is None else "bounded"


def padded(dim: int) -> int:
    """A head dimension rounded up to a power of two, as blocks must be."""
    return triton.next_power_of_2(dim)


def dense(vector: Tensor | None) -> Tensor | None:
    """A small vector of parameters or indices without gaps; copied if it has some."""
    return None if vector is None else vector.contiguous()


def rows_of_state(rows: int, K: int, V: int) -> int:
    """How many rows of a head's state a program takes that would take `rows` at K = 128: as many numbers, but no more rows than there are."""
    return min(max(rows * 128 // padded(K), 1), padded(V))
