"""How Helion kernels are generated and launched: sizes never specialise a kernel, and little time is spent on the host.

Left to itself Helion binds a kernel to the first arguments it sees: a dimension of one element becomes a constant, and every call is looked up by the
shapes and strides of all arguments. Here a kernel is generated once for dtypes, constants and configuration, from stand-ins whose dimensions all have
several elements, so that every size and stride stays a number that the kernel is told. What Helion generates, a Triton kernel and a function that
works out its grid and arguments, is asked once a layout; after that a call is a single launch.

Triton would in turn compile a kernel anew when a number is 1 or becomes divisible by 16. A generated kernel has two forms instead: one for tensors
whose addresses and strides vector loads can use, and one for any memory, where nothing is assumed but of memory that the library allocates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import helion
import torch
import triton
import triton.language as tl
from torch import Tensor

from kdaserve.errors import dtype_name, error
from kdaserve.memory import extent
from kdaserve.ops.helion import source, tuned
from kdaserve.ops.jit.launch import DIRECT, INTERPRETED, ONE_AT_A_TIME, profiled, quiet, strides

ALIGNED = 16
"""What strides, in elements, and addresses, in bytes, are multiples of in the form with vector loads."""
SIZES = (2, 3, 5, 7)
"""Dimensions of a stand-in."""
GENERATING = threading.Lock()
OBSERVERS: list[Callable[[Launch, Sequence[Tensor | None], Sequence[float]], None]] = []
"""Told of every launch: itself, its tensors and its numbers."""


class Whole(int):
    """A number that calls of one layout do not share; `Real` likewise."""


class Real(float):
    """See `Whole`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """What a kernel is generated for beside the dtypes of its arguments.

    Attributes:
        constants: by name, those of the kernel in their order.
        config: fields of a `helion.Config`, where none is kept in a file (`tuned`).
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

    def __init__(self, function: Callable, vectors: Sequence[str], own: Sequence[str], fixed: Mapping[str, Any]) -> None:
        parameters = inspect.signature(function).parameters
        self.name, self.vectors, self.own, self.fixed = function.__name__, tuple(vectors), tuple(own), fixed
        self.constants = [name for name, p in parameters.items() if "constexpr" in str(p.annotation)]
        self.arguments = [name for name in parameters if name not in self.constants]
        assert [*parameters] == [*self.arguments, *self.constants], f"order of the parameters of {self.name}"
        self._function = function
        self._generated: dict[tuple, Generated] = {}
        self.compiled: dict[tuple, Any] = {}
        """By what was generated, form and device, what has been launched; None where Triton's own launch stays in use."""

    def helion(self, precision: str, **settings: Any) -> Any:
        """The kernel as Helion knows it; `settings` are Helion's."""
        settings |= {"static_shapes": False, "index_dtype": torch.int64, "ref_mode": helion.RefMode.OFF}
        return helion.kernel(self._function, dot_precision=precision, **settings)

    def generate(self, arguments: Mapping[str, Any], variant: Variant) -> Generated:
        """The Triton kernel for such arguments, whatever their sizes."""
        assert [*variant.constants] == self.constants, f"constants of {self.name}"
        device = next(x.device for x in arguments.values() if isinstance(x, Tensor))
        dtypes = tuple(map(_dtype, arguments.values()))
        key = device, dtypes, tuple(variant.constants.values()), repr(sorted(variant.config.items())), variant.precision
        with GENERATING:
            if key not in self._generated:
                with _plain_surroundings():
                    self._generated[key] = Generated(self, key, arguments, variant)
        return self._generated[key]

    def strides(self, name: str, x: Tensor) -> tuple[int, ...]:
        """Those of an argument, of which those that `constant_strides` names are the same for all layouts."""
        found = strides(x, x.ndim)
        return (*found[:-1], 1) if x.ndim == 1 or name in (*self.own, *self.vectors) else found

    def constant_strides(self, name: str, dims: int) -> list[str]:
        """The strides of a tensor that are constants of the generated kernel, as Helion names them."""
        return [f"{name}_stride_{dims - 1}"] if dims == 1 or name in (*self.own, *self.vectors) else []


def kernel(*vectors: str, own: Sequence[str] = (), **fixed: Any) -> Callable[[Callable], Kernel]:
    """Decorator that makes a `Kernel`.

    Args:
        vectors: the tensors that are read or written several elements at once.
        own: flat tensors that the library allocates, which start at multiples of 16 bytes.
        fixed: fields of a `helion.Config` that tuning must leave alone.
    """
    return lambda function: Kernel(function, vectors, own, fixed)


class Generated:
    """A Triton kernel that Helion generated, and Helion's host code for it."""

    def __init__(self, kernel: Kernel, key: tuple, arguments: Mapping[str, Any], variant: Variant) -> None:
        self.kernel, self.key, self.variant = kernel, key, variant
        device, dtypes = key[:2]
        self.identity = tuned.identity(kernel.name, device, dtypes, variant.constants)
        kept = tuned.find(self.identity)
        self.config = config = dict(variant.config if kept is None else kept)
        stand_ins = [_stand_in(x, i) for i, x in enumerate(arguments.values())]

        def code() -> str:
            bound = kernel.helion(variant.precision).bind((*stand_ins, *variant.constants.values()))
            return bound.to_triton_code(helion.Config(**config))

        facts = self.identity, device.type, sorted(config.items()), variant.precision
        try:
            self._host = source.load(kernel.name, facts, code)
        except helion.exc.InvalidConfig as cause:
            if kept is None:
                raise
            raise error("KDA401", path=tuned.path(), problem=f"the config of {kernel.name} does not fit: {cause}") from cause
        self._jits: dict[bool, Any] = {}
        if INTERPRETED:  # it has no libdevice
            self._host.__globals__["libdevice"] = tl.math

    def ask(self, arguments: Sequence[Any]) -> Asked:
        """What Helion's host code launches for `arguments`."""
        found = []

        def launcher(jit: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
            found.append(Asked(jit, math.prod(grid), values, options))

        self._host(*arguments, *self.variant.constants.values(), _launcher=launcher)
        (asked,) = found
        return asked

    def jit(self, asked: Asked, aligned: bool) -> Any:
        """The generated kernel in the form for aligned tensors, or that for any."""
        if INTERPRETED:
            return asked.jit
        if aligned not in self._jits:
            values = dict(zip(asked.jit.arg_names, asked.values, strict=True))
            function = asked.jit.fn
            tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
            constant = [stride for name, x in tensors.items() for stride in self.kernel.constant_strides(name, x.ndim)]
            constant += [name for name, kind in function.__annotations__.items() if "constexpr" in str(kind)]
            whole = [name for name, value in values.items() if isinstance(value, int) and name not in constant]
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

    def __init__(
        self, kernel: Kernel, tensors: Mapping[str, Tensor | None], numbers: Mapping[str, float], later: Sequence[str], variant: Variant
    ) -> None:
        """`tensors` by parameter, `numbers` likewise; those named in `later` come with each call."""
        views = {name: x if x is None else x.as_strided(x.shape, kernel.strides(name, x)) for name, x in tensors.items()}
        given = {name: (Whole if isinstance(x, int) else Real)(x) if name in later else x for name, x in numbers.items()}
        arguments = {name: views[name] if name in views else given[name] for name in kernel.arguments}
        self.generated = kernel.generate(arguments, variant)
        asked = self.generated.ask(tuple(arguments.values()))
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
        rows += [int(numbers.get(f"{name}_stride", 0)) for name in kernel.vectors]
        self._aligned = all(stride % ALIGNED == 0 for stride in rows)
        self._vectors = [i for i, name in enumerate(views) if name in kernel.vectors]
        device = next(x.device for x in tensors.values() if x is not None)
        self._device = device.index if device.type == "cuda" else None
        self._keys = {aligned: (self.generated.key, aligned) for aligned in (True, False)}
        self._compiled: dict[bool, Any] = {}
        # A launch outlives the call it was made for, and must keep none of its memory.
        self.views = {name: _without_memory(x) for name, x in views.items()}
        self.arguments = {name: _without_memory(x) for name, x in arguments.items()}
        self.asked = dataclasses.replace(asked, values=tuple(map(_without_memory, asked.values)))
        self.later = tuple(later)

    def __call__(self, tensors: Sequence[Tensor | None], *numbers: float) -> None:
        """`tensors` in the order of the layout's, and the numbers that come later."""
        if self._device is not None and self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self(tensors, *numbers)
        for observer in OBSERVERS:
            observer(self, tensors, numbers)
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        aligned = self._aligned and not any(pointers[i] % ALIGNED for i in self._vectors)
        compiled = self._compiled.get(aligned) or self._find(aligned)
        if not self.asked.programs:
            return None
        if compiled is None or profiled():
            return self._launch(tensors, numbers, aligned)
        stream = triton.runtime.driver.active.get_current_stream(self._device)
        values = self._pick((*pointers, *numbers, *self._fixed))
        compiled.run(self.asked.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)
        return None

    def _find(self, aligned: bool) -> Any:
        """The compiled form, if some layout with these dtypes and constants has launched it before."""
        compiled = self._compiled[aligned] = self.generated.kernel.compiled.get(self._keys[aligned])
        return compiled

    def _launch(self, tensors: Sequence[Tensor | None], numbers: Sequence[float], aligned: bool) -> None:
        jit = self.generated.jit(self.asked, aligned)
        with ONE_AT_A_TIME, quiet():
            compiled = jit[(self.asked.programs,)](*self._pick((*tensors, *numbers, *self._fixed)), **self.asked.options)
        self.generated.kernel.compiled[self._keys[aligned]] = compiled if DIRECT else None


def flat(pool: Tensor | None) -> Tensor | None:
    """A view of all elements from the first slot's first to the last slot's last, for kernels that work out 64-bit offsets themselves."""
    return None if pool is None else pool.as_strided((extent(pool) // pool.element_size() if pool.numel() else 0,), (1,))


def _without_memory(x: Any) -> Any:
    """A tensor of the same layout that has no elements; anything else as it is."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _dtype(x: Any) -> str | None:
    """The dtype of an argument."""
    return dtype_name(x.dtype) if isinstance(x, Tensor) else None if x is None else "float" if isinstance(x, float) else "int"


def _stand_in(x: Any, i: int) -> Any:
    """An argument to generate from: no dimension has one element, no number is 0 or 1."""
    if isinstance(x, Tensor):
        return torch.empty(SIZES[: x.ndim], dtype=x.dtype, device=x.device)
    return None if x is None else 0.5 + i if isinstance(x, float) else 11 + i


@contextlib.contextmanager
def _plain_surroundings() -> Iterator[None]:
    """Helion traces kernels by running them; modes and defaults of the caller's PyTorch must not show in the code."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        with contextlib.nullcontext() if device.type == "cpu" else torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
