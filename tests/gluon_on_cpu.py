"""Runs Gluon kernels for Hopper on a CPU, values only: no layouts, no races between the threads of a warp group.

What is asynchronous on the GPU is as late or as early here as the kernel allows. A product of `warpgroup_mma` is computed when it is waited for, and
reads shared memory then; a store by TMA reads it when `store_wait` says so. A copy to shared memory is there at once. Groups of warps take turns at
barriers, with `eager` the others first: then the producer overwrites a stage as soon as it may. A wrong phase, a missing arrival, or a wrong number
of bytes ends with everyone waiting, which is an error; so is an asynchronous read or write where threads have written, without a fence and a barrier
behind.

    (chain,) = gluon_on_cpu.load_modules("kdaserve.ops.chunk_kda.sm90", "chain")

The kernels of a module loaded so are launched as always, with tensors on the CPU.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import itertools
import math
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as real
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gluon_assembly import inline_asm_elementwise, scalar
from gluon_machine import Barrier, Descriptor, Group, Pointer, Product, Program, Shared

INTEGERS = {torch.bool, torch.int8, torch.int16, torch.int32, torch.int64}
PROGRAM: Program
"""The one that runs."""
EAGER = False


class Function:
    """What `gluon.jit` makes: called as a part of a kernel, or launched."""

    def __init__(self, function: Callable) -> None:
        functools.update_wrapper(self, function)
        self.function = _without_changes_in_place(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getitem__(self, grid: Sequence[int]) -> Callable:
        return functools.partial(self.launch, math.prod(grid))

    def launch(self, programs: int, *args: Any, num_warps: int = 4, **kwargs: Any) -> None:
        parameters = inspect.signature(self.function).parameters
        given = {name: value for name, value in kwargs.items() if name in parameters}
        bound = inspect.signature(self.function).bind(*args, **given).arguments
        values = {name: _argument(value, parameters[name].annotation) for name, value in bound.items()}
        global PROGRAM
        for i in range(programs):
            PROGRAM = Program(i, programs, num_warps, EAGER)
            self.function(**values)
            default = PROGRAM.groups[0]
            for product in default.products:
                product.compute()
            assert not default.stores, "a program ends while TMA still reads its shared memory"


class _Assignments(ast.NodeTransformer):
    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        value = ast.BinOp(ast.Name(ast.unparse(node.target), ast.Load()), node.op, node.value)
        return ast.fix_missing_locations(ast.copy_location(ast.Assign([node.target], value), node))


def _without_changes_in_place(function: Callable) -> Callable:
    """``x += y`` gives x another value in a kernel; of a tensor it would change that which other names stand for too."""
    lines, first = inspect.getsourcelines(function)
    tree = _Assignments().visit(ast.parse(textwrap.dedent("".join(lines))))
    ast.increment_lineno(tree, first - 1)
    tree.body[0].decorator_list = []
    found: dict[str, Any] = {}
    space = function.__globals__
    if space.get("tl") is tl:  # of a module that Triton's kernels share
        space = {**space, **_plain(space), "tl": _LANGUAGE}
    exec(compile(tree, inspect.getfile(function), "exec", dont_inherit=True), space, found)
    return found[function.__name__]


def _plain(space: dict[str, Any]) -> dict[str, Any]:
    """Constants as the numbers they are."""
    return {name: value.value for name, value in space.items() if isinstance(value, tl.constexpr)}


def _argument(value: Any, annotation: Any) -> Any:
    if isinstance(value, Tensor):
        return Pointer.to_tensor(value)
    if isinstance(value, TensorDescriptor):
        return Descriptor.of(value)
    if isinstance(annotation, torch.dtype) and value is not None:
        return torch.tensor(value, dtype=annotation)
    return value


def jit(function: Callable | None = None, **options: Any) -> Any:
    return Function if function is None else Function(function)


def constexpr_function(function: Callable) -> Callable:
    return function


# The language.


def alike(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Numbers take the type of the tensor beside them."""
    if not isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.tensor(x, dtype=y.dtype if y.dtype not in INTEGERS or isinstance(x, int) else torch.float32), y
    if not isinstance(y, Tensor) and isinstance(x, Tensor):
        return alike(y, x)[::-1]
    return scalar(x), scalar(y)


def integers(*bounds: Any) -> Iterator[Tensor]:
    for i in range(*(int(x) for x in bounds)):
        yield scalar(i)


def load(p: Pointer, mask: Any = None, other: Any = None, **hints: Any) -> Tensor:
    offset, m = p.where(mask)
    x = torch.full(offset.shape, math.nan if other is None and p.base.is_floating_point() else other or 0, dtype=p.base.dtype)
    if isinstance(other, Tensor):
        x = other.expand(offset.shape).clone()
    x[m] = p.base[offset[m]]
    return x


def store(p: Pointer, value: Any, mask: Any = None, **hints: Any) -> None:
    value = scalar(value)
    offset, m = p.where(mask, value.shape)
    p.base[offset[m]] = value.expand(offset.shape)[m].to(p.base.dtype)


def where(condition: Any, x: Any, y: Any) -> Tensor:
    return torch.where(scalar(condition), *alike(x, y))


def reduce_by(name: str) -> Callable:
    def reduced(x: Tensor, axis: int | None = None, keep_dims: bool = False) -> Tensor:
        x = x.flatten() if axis is None else x
        value = getattr(torch, name)(x, dim=axis or 0, keepdim=keep_dims)
        return (value if isinstance(value, Tensor) else value.values).to(x.dtype)

    return reduced


def associative_scan(x: Tensor, axis: int, combine: Callable, reverse: bool = False) -> Tensor:
    rows = [*x.unbind(axis)]
    found = [*itertools.accumulate(rows[::-1] if reverse else rows, combine)]
    return torch.stack(found[::-1] if reverse else found, axis)


def fma(x: Any, y: Any, z: Any) -> Tensor:
    return (scalar(x).double() * y + z).float()


def mma_v2(a: Tensor, b: Tensor, acc: Tensor, input_precision: Any = None) -> Tensor:
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    return acc + a.float() @ b.float()


def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any, value: Tensor | None = None) -> Shared:
    shared = Shared(torch.full([*shape], math.nan if dtype.is_floating_point else -1, dtype=dtype), layout=layout)
    PROGRAM.memory.append(shared)
    if value is not None:
        shared.store(value)
    return shared


def thread_barrier() -> None:
    for shared in PROGRAM.memory:
        if shared.written == "fenced":
            shared.written = ""


def fence_async_shared(cluster: bool = False) -> None:
    for shared in PROGRAM.memory:
        if shared.written:
            shared.written = "fenced"


def warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False, precision: Any = None) -> Any:
    product = Product(a, b, acc, use_acc)
    if not is_async:
        product.compute()
        return product.value
    PROGRAM.turn.products.append(product)
    return product


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    flying = PROGRAM.turn.products
    while len(flying) > num_outstanding:
        flying.pop(0).compute()
    values = [x.value if isinstance(x, Product) else x for x in deps]
    assert all(x is not None for x in values), "a product is used that is still in flight"
    return values[0] if len(values) == 1 else tuple(values)


def warp_specialize(functions: Sequence[tuple], warps: Sequence[int], registers: Sequence[int]) -> Any:
    (first, first_args), *workers = functions
    program = PROGRAM
    default = program.turn
    threads = []
    for i, (function, args) in enumerate(workers):
        group = Group(getattr(function, "__name__", f"worker {i}"))
        program.groups.append(group)
        threads.append(threading.Thread(target=_work, args=(program, group, function, args), daemon=True))
    for thread in threads:
        thread.start()
    try:
        result = first(*first_args)
        program.give_way(lambda: all(g.done for g in program.groups if g is not default), "the end of the others")
    except BaseException as failure:
        program.fail(failure)
        raise
    for thread in threads:
        thread.join()
    program.groups = [default]
    return result


def _work(program: Program, group: Group, function: Callable, args: tuple) -> None:
    with program.changed:
        while program.turn is not group and program.failure is None:
            program.changed.wait()
    try:
        if program.failure is None:
            function(*args)
            left = [*group.stores, *group.products]
            assert left == [], f"{group.name} ends with copies or products in flight"
            program.end(group)
    except BaseException as failure:  # the default group raises it
        program.fail(failure)


# Barriers and copies.


def barrier_init(bar: Shared, count: int) -> None:
    PROGRAM.barriers[bar.x.data_ptr()] = Barrier(count)


def _change(bar: Shared, pred: Any, **change: int) -> None:
    if bool(pred):
        PROGRAM.barriers[bar.x.data_ptr()].change(**change)
        PROGRAM.give_way()


def barrier_expect(bar: Shared, size: int, pred: Any = True) -> None:
    _change(bar, pred, arrivals=1, size=size)


def barrier_arrive(bar: Shared, *, count: int = 1, pred: Any = True) -> None:
    _change(bar, pred, arrivals=count)


def barrier_wait(bar: Shared, phase: Any, pred: Any = True, deps: Sequence[Any] = ()) -> None:
    if bool(pred):
        found, wanted = PROGRAM.barriers[bar.x.data_ptr()], int(phase)
        place = [i for i, shared in enumerate(PROGRAM.memory) if shared is bar.owner]
        PROGRAM.give_way(lambda: found.phase != wanted, f"phase {wanted} of barrier {place} {bar.x.storage_offset()}")


def copy_in(d: Descriptor, corner: Sequence[Any], bar: Shared, result: Shared, pred: Any = True) -> None:
    if bool(pred):
        result.free()
        d.copy(corner, result.x, out=False)
        _change(bar, True, size=-result.x.numel() * result.x.element_size())


def copy_out(d: Descriptor, corner: Sequence[Any], source: Shared) -> None:
    source.read()
    corner = [int(c) for c in corner]
    PROGRAM.turn.stores.append(lambda: d.copy(corner, source.x, out=True))


def store_wait(pendings: int) -> None:
    stores = PROGRAM.turn.stores
    while len(stores) > pendings:
        stores.pop(0)()


LANGUAGE: dict[str, Any] = {
    **{name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8")},
    **{name: getattr(torch, name) for name in ("abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "zeros_like")},
    **{name: getattr(real, name) for name in dir(real) if name.endswith("Layout")},
    **{name: reduce_by(name) for name in ("sum", "max", "min")},
    "int1": torch.bool,
    "constexpr": tl.constexpr,
    "program_id": lambda axis: scalar(PROGRAM.i),
    "num_programs": lambda axis: scalar(PROGRAM.programs),
    "num_warps": lambda: PROGRAM.warps,
    "arange": lambda start, end, layout=None: torch.arange(start, end, dtype=torch.int32),
    "zeros": lambda shape, dtype, layout=None: torch.zeros([*shape], dtype=dtype),
    "full": lambda shape, value, dtype, layout=None: torch.full([*shape], value, dtype=dtype),
    "to_tensor": scalar,
    "load": load,
    "store": store,
    "where": where,
    "minimum": lambda x, y: torch.minimum(*alike(x, y)),
    "maximum": lambda x, y: torch.maximum(*alike(x, y)),
    "fma": fma,
    "associative_scan": associative_scan,
    "reshape": lambda x, *shape: x.reshape(*shape),
    "permute": lambda x, *order: x.permute(*order),
    "join": lambda x, y: torch.stack([x, y], -1),
    "split": lambda x: x.unbind(-1),
    "expand_dims": lambda x, axis: x.unsqueeze(axis),
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "static_range": range,
    "thread_barrier": thread_barrier,
    "allocate_shared_memory": allocate,
    "warp_specialize": warp_specialize,
    "inline_asm_elementwise": inline_asm_elementwise,
}
HOPPER: dict[str, Any] = {
    "fence_async_shared": fence_async_shared,
    "mma_v2": mma_v2,
    "mbarrier": types.SimpleNamespace(
        MBarrierLayout=lambda: None, init=barrier_init, expect=barrier_expect, arrive=barrier_arrive, wait=barrier_wait, invalidate=lambda bar: None
    ),
    "tma": types.SimpleNamespace(async_copy_global_to_shared=copy_in, async_copy_shared_to_global=copy_out, store_wait=store_wait),
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_init": lambda x: x,
    "warpgroup_mma_wait": warpgroup_mma_wait,
}


def _module(name: str, contents: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(contents)
    return module


_LANGUAGE = _module("language", LANGUAGE)
_GLUON = _module("gluon", {"jit": jit, "constexpr_function": constexpr_function, "language": _LANGUAGE})
MODULES = {
    "triton.experimental": _module("experimental", {"gluon": _GLUON}),
    "triton.experimental.gluon": _GLUON,
    "triton.experimental.gluon.language": _LANGUAGE,
    "triton.experimental.gluon.language.nvidia.hopper": _module("hopper", HOPPER),
    "triton.language.extra.cuda": _module("cuda", {"gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None}),
}


def load_modules(package: str, *names: str) -> list[types.ModuleType]:
    """Copies of modules of a package, "" for itself, imported with this in Gluon's place. Others of it that they import are copied as well."""
    parent, _, last = package.rpartition(".")
    holder = importlib.import_module(parent)
    with mock.patch.dict(sys.modules, MODULES), mock.patch.object(holder, last, None, create=True):
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            del sys.modules[name]
        found = [importlib.import_module(f"{package}.{name}".rstrip(".")) for name in names]
        copies = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
        others = {name: module for name, module in sys.modules.items() if name not in MODULES and not f"{name}.".startswith(f"{package}.")}
    sys.modules.update(others)  # or who imports one of them later has another than those that did now
    for module in copies:
        space = vars(module)
        if any(value is _LANGUAGE for value in space.values()):  # constants are plain numbers there, and loop variables tensors
            space.update(_plain(space), range=integers)
    return found


@contextlib.contextmanager
def eager(value: bool = True) -> Iterator[None]:
    """Whether at every barrier the other groups of warps go first."""
    global EAGER
    before, EAGER = EAGER, value
    try:
        yield
    finally:
        EAGER = before
