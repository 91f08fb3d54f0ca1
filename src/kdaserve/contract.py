"""The contract of every op as one table: shapes, dtypes, devices, layouts.

The table drives the checks below, the documentation and the tests that break one argument at a time. What a check
finds depends on shapes, dtypes, strides and devices alone, so it is remembered: a repeated call costs microseconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from kdaserve import guards, memory
from kdaserve.errors import dtype_name, error

CHUNK = 64
"""Tokens in a chunk (C in the equations)."""
L2_EPS = 1e-6
"""Added to the sum of squares by the L2 norm of q and k."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Input and pool dtypes. float64 is for checking: only the backends `reference` and `torch` take it."""
PARAMETERS = (torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One tensor of a call.

    `shape` names a symbol or a product of symbols a dimension; ``>=T`` means at least T, ``N+1`` one more than N. A symbol
    is set by the first argument that carries it.
    """

    name: str
    shape: str
    dtypes: tuple[torch.dtype, ...]
    meaning: str
    optional: bool = False
    same_dtype_as: str | None = None
    last_dim_contiguous: bool = False
    slot_dense: bool = False
    """[HV, V, K] inside a slot is contiguous and slots do not overlap; the slot stride is free."""
    written: bool = False
    """Updated in place: lies on nothing else of the call, and autograd allows the update."""
    checked_with: tuple[str, ...] = ()
    """Arguments that share one message with this one, itself first."""
    size_error: str = "KDA104"

    @property
    def dims(self) -> tuple[str, ...]:
        """Symbols of `shape`, one a dimension."""
        return tuple(self.shape.split())

    @property
    def layout(self) -> str:
        """`shape` as people write it, such as ``[B, T, H, K]``."""
        return "[" + ", ".join(self.dims) + "]"


_POOL = Argument("initial_state", "slots HV V K", FLOATS, "the state pool, updated in place; the slot stride is free", slot_dense=True, written=True)
_A_LOG = Argument("A_log", "HV", PARAMETERS, "gate parameter; a = exp(A_log)", optional=True, size_error="KDA112")
_DT_BIAS = Argument("dt_bias", "HV*K", PARAMETERS, "gate bias, head-major", optional=True, size_error="KDA112")

PREFILL: tuple[Argument, ...] = (
    Argument("q", "B T H K", FLOATS, "queries", last_dim_contiguous=True),
    Argument("k", "B T H K", FLOATS, "keys", same_dtype_as="q", last_dim_contiguous=True),
    Argument("v", "B T HV V", FLOATS, "values", same_dtype_as="q", last_dim_contiguous=True),
    Argument("g", "B >=T HV K", FLOATS, "raw gate logit with `A_log`, else log decay a token (natural log, <= 0)", last_dim_contiguous=True),
    Argument("beta", "B >=T HV", FLOATS, "write strength in [0, 1]; its logit with `beta_is_raw`"),
    _POOL,
    Argument("cu_seqlens", "N+1", INDICES, "packed boundaries, from 0, never decreasing", optional=True, size_error="KDA116"),
    Argument("initial_state_indices", "N", INDICES, "slot of each sequence; negative = padding", size_error="KDA116"),
    _A_LOG,
    _DT_BIAS,
    Argument("track_state", "N HV V K", (torch.float32,), "receives the state at the start of a chunk", optional=True, slot_dense=True, written=True),
    Argument("track_chunk_idx", "N", INDICES, "chunk to track of each sequence; -1 = none", optional=True, size_error="KDA116"),
    Argument("out", "B T HV V", FLOATS, "where the output goes; may be `v` itself", optional=True, same_dtype_as="q", written=True),
)

DECODE: tuple[Argument, ...] = (
    Argument("mixed_qkv", "B W", FLOATS, "q | k | v after the short convolution, each head-major; W = 2*H*K + HV*V", last_dim_contiguous=True),
    _POOL,
    Argument("a", "B HV*K", FLOATS, "raw gate logits, head-major", last_dim_contiguous=True, checked_with=("a", "b")),
    Argument("b", "B HV", FLOATS, "raw beta logits", last_dim_contiguous=True, checked_with=("a", "b")),
    dataclasses.replace(_A_LOG, optional=False),
    _DT_BIAS,
    Argument("out", "B 1 HV V", FLOATS, "where the output goes", same_dtype_as="mixed_qkv", written=True),
    Argument("ssm_state_indices", "B", INDICES, "slot of each request; negative = padding", size_error="KDA116"),
)

TABLE: dict[str, tuple[Argument, ...]] = {"chunk_kda": PREFILL, "recurrent_kda": PREFILL, "packed_decode_kda": DECODE}
FLAGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("chunk_kda", "recurrent_kda"), ("use_qk_l2norm_in_kernel", "output_intermediate_states", "beta_is_raw")),
    "packed_decode_kda": ("use_qk_l2norm_in_kernel",),
}
_NAMES = {op: (tuple(a.name for a in table), (*FLAGS[op], "lower_bound", "scale", "check")) for op, table in TABLE.items()}
"""By op its tensors and its options: what a call must have in common with another one to need no checks of its own."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What the checks found out about calls with tensors of one layout and the same options; remembered.

    Attributes:
        sizes: by symbol.
        scale: factor of the output, its default filled in.
        device: of all tensors.
        dtypes: of the floating-point tensors given, by name.
        extents: bytes from the first to the end of the last element of every tensor given, by name.
        written: names of those that are updated in place.
        refusals: for `dispatch`, by backend and need of gradients.
        prepared: for backends, what they worked out from all this, by what else it depends on.
    """

    sizes: Mapping[str, int]
    scale: float
    device: torch.device
    dtypes: Mapping[str, torch.dtype]
    extents: Mapping[str, int]
    written: tuple[str, ...]
    refusals: dict[tuple[str, bool], dict[str, str] | None] = dataclasses.field(default_factory=dict)
    prepared: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def once(self, key: Any, work_out: Callable[[], Any]) -> Any:
        """What a backend has worked out under `key`, now or before."""
        found = self.prepared.get(key)
        if found is None:
            found = self.prepared[key] = work_out()
        return found


_remembered: dict[tuple, Layout] = {}
REMEMBERED_AT_MOST = 4096


@dataclasses.dataclass(slots=True, kw_only=True)
class CheckedCall:
    """What every op's record of a checked call has; the op adds its arguments.

    Attributes:
        op: name of the op.
        layout: what the checks found out.
        needs_grad: whether autograd records the call.
        use_qk_l2norm_in_kernel: whether q and k are normed inside.
    """

    op: str
    layout: Layout
    needs_grad: bool
    use_qk_l2norm_in_kernel: bool

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes by symbol."""
        return self.layout.sizes

    @property
    def scale(self) -> float:
        """Factor of the output, its default filled in."""
        return self.layout.scale

    @property
    def compute_dtype(self) -> torch.dtype:
        """float32, or float64 when a tensor of the call is (S12)."""
        return torch.float64 if torch.float64 in self.layout.dtypes.values() else torch.float32


def checked_layout(op: str, arguments: Mapping[str, Any]) -> Layout:
    """Checks all of a call that is neither an address nor a value in memory.

    Raises: KDA102 to KDA117, KDA121, KDA123 to KDA125.
    """
    tensors, options = _NAMES[op]
    key: tuple | None
    try:
        given = [arguments[name] for name in options]
        layouts = [None if (x := arguments[name]) is None else (type(x), x.shape, x.dtype, x.stride(), x.device) for name in tensors]
        key = (op, *layouts, *given, *map(type, given))  # types too: 1 equals True, and is refused
        layout = _remembered.get(key)
    except (AttributeError, TypeError, RuntimeError):  # not all are what they should be; which one is not, the checks will say
        key, layout = None, None
    if layout is None:
        layout = _layout(op, arguments)
        if len(_remembered) >= REMEMBERED_AT_MOST:
            _remembered.clear()
        if key:
            _remembered[key] = layout
    return layout


def _layout(op: str, arguments: Mapping[str, Any]) -> Layout:
    table = TABLE[op]
    for argument in table:
        _check_kind(op, argument, arguments, table[0].name)
    sizes = _bind_sizes(op, table, arguments)
    (decode_relations if table is DECODE else prefill_relations)(op, sizes)
    for flag in FLAGS[op]:
        check_flag(op, flag, arguments[flag])
    _check_gate(op, arguments["A_log"], arguments["dt_bias"], arguments["lower_bound"])
    _check_level(op, arguments["check"])
    given = [(a, arguments[a.name]) for a in table if arguments[a.name] is not None]
    return Layout(
        sizes=sizes,
        scale=_checked_scale(op, arguments["scale"], sizes["K"]),
        device=given[0][1].device,
        dtypes={a.name: x.dtype for a, x in given if x.is_floating_point()},
        extents={a.name: memory.extent(x) for a, x in given},
        written=tuple(a.name for a, _ in given if a.written),
    )


def _check_kind(op: str, argument: Argument, arguments: Mapping[str, Any], first: str) -> None:
    """Type, number of dimensions, dtype, device and strides of one argument."""
    value = arguments[argument.name]
    if value is None and argument.optional:
        return
    group = argument.checked_with or (argument.name,)
    for name in group:
        other = arguments[name]
        if not guards.is_tensor(other):
            raise error(
                "KDA108",
                op=op,
                argument=name,
                expected="a dense tensor" if name != argument.name else f"a dense tensor {argument.layout}",
                got=_type_name(other),
            )
    tensors = {name: arguments[name] for name in group}
    ndim = len(argument.dims)
    if any(t.ndim != ndim for t in tensors.values()):
        names = " and ".join(f"`{name}`" for name in group)
        what = f"{names} must be {'a ' if len(group) == 1 else ''}{ndim}D tensor{'s' if len(group) > 1 else ''}"
        got = ", ".join((f"{name}.ndim={t.ndim}" if len(group) > 1 else f"ndim={t.ndim}") for name, t in tensors.items())
        raise error("KDA103", op=op, what=what, got=got, shape=argument.layout)
    if value.dtype not in argument.dtypes:
        raise error("KDA105", op=op, argument=argument.name, got=dtype_name(value.dtype), expected=", ".join(dtype_name(d) for d in argument.dtypes))
    source = argument.same_dtype_as
    if source and value.dtype != arguments[source].dtype:
        raise error("KDA106", op=op, argument=argument.name, got=dtype_name(value.dtype), expected=dtype_name(arguments[source].dtype), source=source)
    if not guards.same_device(arguments[first], value):
        raise error("KDA107", op=op, argument=argument.name, got=value.device, expected=arguments[first].device, source=first)
    if argument.last_dim_contiguous and not all(guards.last_dim_contiguous(t) for t in tensors.values()):
        names = "/".join(f"`{name}`" for name in group)
        raise error("KDA109", op=op, arguments=names, got=", ".join(str(tuple(t.stride())) for t in tensors.values()))
    if argument.slot_dense and not guards.pool_is_dense(value):
        raise error("KDA123", op=op, argument=argument.name, shape=tuple(value.shape), got=tuple(value.stride()))
    if argument.written and not guards.elements_are_distinct(value):
        raise error("KDA121", op=op, written=argument.name, argument="itself")


def _bind_sizes(op: str, table: tuple[Argument, ...], arguments: Mapping[str, Any]) -> dict[str, int]:
    """Gives every symbol its size and holds the other arguments to it."""
    sizes: dict[str, int] = {}
    source: dict[str, str] = {}
    for argument in table:
        value = arguments[argument.name]
        if value is None:
            continue
        if argument.name == "cu_seqlens":
            _check_packed(op, sizes, value)
        elif "N" in argument.dims and "N" not in sizes:
            sizes["N"], source["N"] = sizes["B"], "q` without `cu_seqlens` or `plan"  # every batch row is a sequence
        for dim, (symbol, got) in enumerate(zip(argument.dims, value.shape, strict=True)):
            if symbol == "N+1":
                symbol, got = "N", got - 1
            if symbol.isidentifier() and symbol not in sizes:
                sizes[symbol], source[symbol] = got, argument.name
            elif symbol.startswith(">="):
                if got < sizes[symbol[2:]]:
                    raise error("KDA102", op=op, argument=argument.name, got=got, expected=sizes[symbol[2:]])
            else:
                expected = math.prod(int(s) if s.isdigit() else sizes[s] for s in symbol.split("*"))
                if got != expected:
                    by = " and ".join(dict.fromkeys(f"`{source[s]}`" for s in symbol.split("*") if s in source)) or "the contract"
                    details = {"dim": dim, "symbol": symbol, "source": by, "shape": list(value.shape), "layout": argument.layout}
                    raise error(argument.size_error, op=op, argument=argument.name, got=got, expected=expected, **details)
    return sizes


def _check_packed(op: str, sizes: dict[str, int], cu_seqlens: torch.Tensor) -> None:
    if sizes["B"] != 1:
        raise error("KDA115", op=op, problem=f"packed input has batch 1, q has batch {sizes['B']}")
    if cu_seqlens.numel() == 0:
        raise error("KDA115", op=op, problem="it is empty; with no sequence it holds the single entry 0")


def prefill_relations(op: str, sizes: dict[str, int]) -> None:
    """What the sizes of a prefill call must have to do with each other."""
    _check_head_dims(op, sizes)
    if not guards.heads_divide(sizes["H"], sizes["HV"]):
        raise error("KDA110", op=op, heads=sizes["H"], v_heads=sizes["HV"])


def decode_relations(op: str, sizes: dict[str, int]) -> None:
    """Like `prefill_relations`; the number of query heads follows from the packed width."""
    _check_head_dims(op, sizes)
    HV, K, V, W = (sizes[s] for s in ("HV", "K", "V", "W"))
    if not guards.packed_width_fits(W, HV, K, V):
        fitting = ", ".join(f"{2 * H * K + HV * V} (H={H})" for H in range(1, HV + 1) if HV % H == 0)
        raise error("KDA117", op=op, got=W, v_heads=HV, k_dim=K, v_dim=V, expected=fitting)
    sizes["H"] = (W - HV * V) // (2 * K)


def _check_head_dims(op: str, sizes: dict[str, int]) -> None:
    for symbol in ("K", "V"):
        if not guards.head_dim_supported(sizes[symbol]):
            raise error("KDA111", op=op, symbol=symbol, got=sizes[symbol])


def _check_gate(op: str, A_log: Any, dt_bias: Any, lower_bound: Any) -> None:
    """KDA113, KDA114: which gate formula is asked for."""
    if A_log is None:
        for name, value in (("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            if value is not None:
                raise error("KDA113", op=op, argument=name)
    if lower_bound is not None:
        check_number(op, "lower_bound", lower_bound)
        if not guards.lower_bound_is_negative(lower_bound):
            raise error("KDA114", op=op, got=_shown(lower_bound))


def _checked_scale(op: str, scale: Any, K: int) -> float:
    """The scale of a call, KDA124 when it is not finite."""
    if scale is None:
        return K**-0.5
    check_number(op, "scale", scale)
    if not guards.is_finite_number(scale):
        raise error("KDA124", op=op, got=_shown(scale))
    return float(scale)


def check_number(op: str, name: str, value: Any) -> None:
    """KDA108 unless `value` is a real number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise error("KDA108", op=op, argument=name, expected="a number", got=_type_name(value))


def check_flag(op: str, name: str, value: Any) -> None:
    """KDA108 unless `value` is a bool."""
    if not isinstance(value, bool):
        raise error("KDA108", op=op, argument=name, expected="True or False", got=_type_name(value))


CHECKS = ("shapes", "values")


def _check_level(op: str, check: Any) -> None:
    """KDA125 for an unknown level of checking."""
    if not guards.is_one_of(check, CHECKS):
        raise error("KDA125", op=op, option="check", got=repr(check), expected=", ".join(CHECKS))


def check_memory(op: str, layout: Layout, arguments: Mapping[str, Any]) -> None:
    """KDA108: all have memory; KDA121, KDA122: what is written lies on nothing else (`out` may be the very view `v`), and autograd allows it."""
    try:
        places = [(name, arguments[name].data_ptr(), extent) for name, extent in layout.extents.items()]
    except RuntimeError:  # asked of what only stands for a tensor
        places = None
    if places is None or (layout.device.type != "meta" and not all(place or not extent for _, place, extent in places)):
        name = next(name for name in layout.extents if not guards.has_storage(arguments[name]))
        got = f"{_type_name(arguments[name])} without memory"
        raise error("KDA108", op=op, argument=name, expected="a dense tensor with memory of its own", got=got)
    for name in layout.written:
        tensor = arguments[name]
        # A plain tensor can be updated; the guard takes longer.
        plain = not (tensor.requires_grad or tensor.is_inference()) and tensor._base is None
        if not plain and not guards.can_update_in_place(tensor):
            raise error("KDA122", op=op, argument=name)
        start = tensor.data_ptr()
        end = start + layout.extents[name]
        for other, place, extent in places:
            if place < end and start < place + extent and other != name:  # their ranges meet, which is rare; now look closely
                may_be_same = (name, other) in (("out", "v"), ("v", "out"))
                if not guards.out_does_not_overlap(tensor, arguments[other], may_be_same=may_be_same):
                    raise error("KDA121", op=op, written=name, argument=f"`{other}`")


Record = TypeVar("Record", bound=CheckedCall)


def checked_record(record: type[Record], op: str, arguments: Mapping[str, Any]) -> Record:
    """The record of a checked call.

    Raises: KDA102 to KDA117, KDA121 to KDA125.
    """
    layout = checked_layout(op, arguments)
    check_memory(op, layout, arguments)
    return record(
        op=op,
        layout=layout,
        needs_grad=torch.is_grad_enabled() and any(arguments[name].requires_grad for name in layout.dtypes),
        use_qk_l2norm_in_kernel=arguments["use_qk_l2norm_in_kernel"],
        **{name: arguments[name] for name in record.__slots__ if name in arguments},  # the fields that an op adds to those of CheckedCall
    )


def _shown(number: float) -> str:
    try:
        return f"{number:.6g}"
    except OverflowError:
        return "a number beyond those of float64"


def _type_name(value: Any) -> str:
    return "None" if value is None else type(value).__name__
