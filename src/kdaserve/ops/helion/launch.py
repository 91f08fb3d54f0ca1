"""How Helion kernels are generated and launched: sizes never specialise a kernel, and little time is spent on the host.

Left to itself Helion binds a kernel to the first arguments it sees: a dimension of one element becomes a constant, and every call is looked up by
the shapes and strides of all arguments. Here a kernel is generated once for dtypes, constants and configuration, from stand-ins whose
dimensions all have several elements, so that every size and stride stays a number that the kernel is told. What Helion generates, a Triton kernel and a
function that works out its grid and arguments, is asked once a layout; after that a call is a single launch.

Triton would in turn compile a kernel anew when a number is 1 or becomes divisible by 16. A generated kernel has two forms instead: one for tensors
whose addresses and strides vector loads can use, and one for any memory, where nothing is assumed but of memory that the library allocates.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import helion
import torch
import triton
import triton.language as tl
from torch import Tensor

from kdaserve.memory import extent
from kdaserve.ops.jit.launch import DIRECT, INTERPRETED, ONE_AT_A_TIME, profiled, quiet, strides

ALIGNED = 16
"""What strides, in elements, and addresses, in bytes, are multiples of in the form with vector loads."""
SIZES = (2, 3, 5, 7)
"""Dimensions of a stand-in."""


class Whole(int):
    """A number that calls of one layout do not share; `Real` likewise."""


class Real(float):
    """See `Whole`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """What a kernel is generated for beside the dtypes of its arguments.

    Attributes:
        constants: by name, those of the kernel in their order.
        config: fields of a `helion.Config`.
        precision: of products of fp32 operands, as Helion's `dot_precision` names it.
    """

    constants: Mapping[str, Any]
    config: Mapping[str, Any]
    precision: str = "ieee"


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A launch as Helion's host code asks for it."""

    jit: Any
    programs: int
    values: tuple[Any, ...]
    options: dict[str, Any]


class Kernel:
    """A Helion kernel and all that has been generated from it.

    Its parameters are tensors and numbers, then constants, which are annotated `hl.constexpr`. An optional tensor is None. The number `x_stride` is
    that of the rows of a tensor `x` that comes flat. The last dimension of `vectors`, `own` and of all one-dimensional tensors is contiguous.
    """

    def __init__(self, function: Callable, vectors: Sequence[str], own: Sequence[str]) -> None:
        parameters = inspect.signature(function).parameters
        self.name, self.vectors, self.own = function.__name__, tuple(vectors), tuple(own)
        self.constants = [name for name, p in parameters.items() if "constexpr" in str(p.annotation)]
        self.arguments = [name for name in parameters if name not in self.constants]
        assert [*parameters] == [*self.arguments, *self.constants], f"order of the parameters of {self.name}"
        self._function = function
        self._helion: dict[str, Any] = {}
        self._generated: dict[tuple, Generated] = {}
        self.compiled: dict[tuple, Any] = {}
        """By what was generated, form and device, what has been launched; None where Triton's own launch stays in use."""

    def helion(self, precision: str) -> Any:
        """The kernel as Helion knows it."""
        if precision not in self._helion:
            settings = {"static_shapes": False, "index_dtype": torch.int64, "ref_mode": helion.RefMode.OFF}
            self._helion[precision] = helion.kernel(self._function, dot_precision=precision, **settings)
        return self._helion[precision]

    def generate(self, arguments: Mapping[str, Any], variant: Variant) -> Generated:
        """The Triton kernel for such arguments, whatever their sizes."""
        assert [*variant.constants] == self.constants, f"constants of {self.name}"
        dtypes = tuple(x.dtype if isinstance(x, Tensor) else isinstance(x, float) for x in arguments.values())
        key = dtypes, tuple(variant.constants.values()), repr(sorted(variant.config.items())), variant.precision
        if key not in self._generated:
            stand_ins = [self._stand_in(name, x, i) for i, (name, x) in enumerate(arguments.items())]
            self._generated[key] = Generated(self, key, stand_ins, variant)
        return self._generated[key]

    def strides(self, name: str, x: Tensor) -> tuple[int, ...]:
        """Those of an argument, of which those that `constant_strides` names are the same for all layouts."""
        found = strides(x, x.ndim)
        return (*found[:-1], 1) if x.ndim == 1 or name in (*self.own, *self.vectors) else found

    def constant_strides(self, name: str, dims: int) -> list[str]:
        """The strides of a tensor that are constants of the generated kernel, as Helion names them."""
        dense = range(dims) if name in self.own else range(dims - 1, dims) if dims == 1 or name in self.vectors else ()
        return [f"{name}_stride_{dim}" for dim in dense]

    def _stand_in(self, name: str, x: Any, i: int) -> Any:
        """An argument to generate from: no dimension has one element, no number is 0 or 1."""
        if isinstance(x, Tensor):
            return torch.empty((2, *x.shape[1:]) if name in self.own else SIZES[: x.ndim], dtype=x.dtype, device=x.device)
        return None if x is None else 0.5 + i if isinstance(x, float) else 11 + i


def kernel(*vectors: str, own: Sequence[str] = ()) -> Callable[[Callable], Kernel]:
    """Decorator that makes a `Kernel`.

    Args:
        vectors: the tensors that are read or written several elements at once.
        own: tensors that the library allocates: they start at multiples of 16 bytes, and their shape follows from the constants but for the first
            dimension.
    """
    return lambda function: Kernel(function, vectors, own)


class Generated:
    """A Triton kernel that Helion generated, and Helion's host code for it."""

    def __init__(self, kernel: Kernel, key: tuple, stand_ins: Sequence[Any], variant: Variant) -> None:
        self.kernel, self.key = kernel, key
        self._constants = tuple(variant.constants.values())
        self.bound = kernel.helion(variant.precision).bind((*stand_ins, *self._constants))
        self._host = self.bound.compile_config(helion.Config(**variant.config), allow_print=False)
        self._jits: dict[bool, Any] = {}
        if INTERPRETED:  # it has no libdevice
            self._host.__globals__["libdevice"] = tl.math

    def ask(self, arguments: Sequence[Any]) -> Asked:
        """What Helion's host code launches for `arguments`."""
        found = []

        def launcher(jit: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
            found.append(Asked(jit, math.prod(grid), values, options))

        self._host(*arguments, *self._constants, _launcher=launcher)
        (asked,) = found
        return asked

    def jit(self, asked: Asked, aligned: bool) -> Any:
        """The generated kernel in the form for aligned tensors, or that for any."""
        if INTERPRETED:
            return asked.jit
        if aligned not in self._jits:
            values = dict(zip(asked.jit.arg_names, asked.values, strict=True))
            function = asked.jit.fn
            blocks = [name for name, kind in function.__annotations__.items() if "constexpr" in str(kind)]
            tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
            constant = [stride for name, x in tensors.items() for stride in self.kernel.constant_strides(name, x.ndim)]
            whole = [name for name, value in values.items() if isinstance(value, int) and name not in (*constant, *blocks)]
            vectors = self.kernel.vectors if aligned else ()
            function.__annotations__ |= dict.fromkeys(whole, tl.int64) | dict.fromkeys(constant, tl.constexpr)
            self._jits[aligned] = triton.jit(
                function,
                do_not_specialize=[name for name in whole if name.partition("_stride")[0] not in vectors],
                do_not_specialize_on_alignment=[name for name in tensors if name not in (*self.kernel.own, *vectors)],
            )
        return self._jits[aligned]


class Launch:
    """A kernel with all that follows from the layout of a call's tensors; called with the tensors and what else changes."""

    def __init__(self, kernel: Kernel, tensors: Mapping[str, Tensor | None], numbers: Mapping[str, float], later: Sequence[str], variant: Variant) -> None:
        """`tensors` by parameter, `numbers` likewise; those named in `later` come with each call."""
        views = {name: x if x is None else x.as_strided(x.shape, kernel.strides(name, x)) for name, x in tensors.items()}
        given = {name: (Whole if isinstance(x, int) else Real)(x) if name in later else x for name, x in numbers.items()}
        arguments = {name: views[name] if name in views else given[name] for name in kernel.arguments}
        self._generated = kernel.generate(arguments, variant)
        self._asked = asked = self._generated.ask(tuple(arguments.values()))
        pool = [*views.values(), *(given[name] for name in later)]
        places = []
        for value in asked.values:
            place = next((i for i, x in enumerate(pool) if x is value and x is not None), None)
            if place is None:
                pool.append(value)
            places.append(len(pool) - 1 if place is None else place)
        self._fixed = pool[len(views) + len(later) :]
        self._pick = operator.itemgetter(*places)
        assert all(len(views) + i in places for i, name in enumerate(later) if name in asked.jit.arg_names), f"numbers of {kernel.name}"
        rows = [stride for name in kernel.vectors if (x := views.get(name)) is not None for stride in x.stride()[:-1]]
        rows += [numbers.get(f"{name}_stride", 0) for name in kernel.vectors]
        self._aligned = all(stride % ALIGNED == 0 for stride in rows)
        self._vectors = [i for i, name in enumerate(views) if name in kernel.vectors]
        device = next(x.device for x in tensors.values() if x is not None)
        self._device = device.index if device.type == "cuda" else None
        self._keys = {aligned: (device, self._generated.key, aligned) for aligned in (True, False)}
        self._compiled: dict[bool, Any] = {}

    def __call__(self, tensors: Sequence[Tensor | None], *numbers: float) -> None:
        """`tensors` in the order of the layout's, and the numbers that come later."""
        if self._device is not None and self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self(tensors, *numbers)
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        aligned = self._aligned and not any(pointers[i] % ALIGNED for i in self._vectors)
        compiled = self._compiled.get(aligned) or self._find(aligned)
        if not self._asked.programs:
            return None
        if compiled is None or profiled():
            return self._launch(tensors, numbers, aligned)
        stream = triton.runtime.driver.active.get_current_stream(self._device)
        values = self._pick((*pointers, *numbers, *self._fixed))
        compiled.run(self._asked.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)
        return None

    def _find(self, aligned: bool) -> Any:
        """The compiled form, if some layout with these dtypes and constants has launched it before."""
        compiled = self._compiled[aligned] = self._generated.kernel.compiled.get(self._keys[aligned])
        return compiled

    def _launch(self, tensors: Sequence[Tensor | None], numbers: Sequence[float], aligned: bool) -> None:
        jit = self._generated.jit(self._asked, aligned)
        with ONE_AT_A_TIME, quiet():
            compiled = jit[(self._asked.programs,)](*self._pick((*tensors, *numbers, *self._fixed)), **self._asked.options)
        self._generated.kernel.compiled[self._keys[aligned]] = compiled if DIRECT else None


def flat(pool: Tensor | None) -> Tensor | None:
    """A view of all elements from the first slot's first to the last slot's last, for kernels that work out 64-bit offsets themselves."""
    return None if pool is None else pool.as_strided((max(extent(pool) // pool.element_size(), 1),), (1,))
