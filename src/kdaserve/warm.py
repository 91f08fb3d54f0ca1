"""Compiling ahead of time all that the calls of a model can need, by tiny calls on scratch tensors."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kdaserve import calls, contract, dispatch, guards
from kdaserve.errors import dtype_name, error
from kdaserve.ops.forms import Form
from kdaserve.snapshots import Snapshots

LAYOUTS = ("packed", "batched")
"""How a prefill is given several sequences: by `cu_seqlens`, or as rows of a batch."""
FLAGS = ("A_log", "dt_bias", "use_qk_l2norm_in_kernel", "beta_is_raw", "output_intermediate_states", "track_state", "snapshots")


@dataclasses.dataclass(frozen=True)
class WarmupReport:
    """What `warmup` did.

    Attributes:
        backends: by op, the backend that runs it.
        compiled: kernels in the forms that were compiled now, or found in the compiler's cache on disk.
        seconds: how long it took.
    """

    backends: dict[str, str]
    compiled: int
    seconds: float


def warmup(
    *,
    heads: int,
    v_heads: int | None = None,
    k_dim: int = 128,
    v_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    g_dtype: torch.dtype | None = None,
    beta_dtype: torch.dtype | None = None,
    pool_dtype: torch.dtype = torch.float32,
    A_log: bool = True,
    dt_bias: bool = True,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    beta_is_raw: bool = True,
    output_intermediate_states: bool = False,
    track_state: bool = False,
    snapshots: bool = False,
    layouts: Sequence[str] = LAYOUTS,
    index_dtypes: Sequence[torch.dtype] = contract.INDICES,
    ops: Sequence[str] = tuple(calls.OPS),
    device: torch.device | str = "cuda",
    backend: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> WarmupReport:
    """Compiles everything that the calls of a model can need, so that no request waits for a compiler.

    Call it once for each kind of KDA layer (all layers of most models are of one kind) and each GPU of the process, before requests come and
    before graphs are captured. Afterwards no length, number of sequences, batch size, stride or alignment makes a call compile, as long as the
    call agrees with what was given here. It allocates some tens of MiB, and frees them. A backend that compiles nothing has nothing to do.

    Args:
        heads, v_heads: H and HV, those of this rank; `v_heads` defaults to `heads`.
        k_dim, v_dim: K and V.
        dtype: of q, k, v, `mixed_qkv` and `out`.
        g_dtype, beta_dtype: of the gate (`g`, and `a` of decode) and of beta (`beta`, and `b` of decode); default `dtype`.
        pool_dtype: of `initial_state`.
        A_log, dt_bias: whether calls pass them. Without `A_log` the `g` of a prefill is the log decay; a decode has `A_log` always.
        lower_bound, use_qk_l2norm_in_kernel, beta_is_raw: as calls pass them. The beta of a decode is raw always.
        output_intermediate_states, track_state, snapshots: whether prefills may ask for these; they may then also not.
        layouts: ``"packed"`` if prefills come with `cu_seqlens` or a plan, ``"batched"`` if without; default both.
        index_dtypes: that `cu_seqlens`, the slots and `track_chunk_idx` may have, each its own. The three tensors of a `Snapshots` have one
            together: int64 when made from lists. A plan's `cu_seqlens` is int32.
        ops: those that the model calls.
        device: where the model runs.
        backend: as calls pass it.
        progress: called with the number of finished steps and of all steps, first with 0.

    Returns:
        The backend of each op, how many kernels were compiled and how long it took. Triton keeps compiled kernels on disk, by default below
        ``~/.triton``: a second process takes seconds.

    Raises:
        ContractError, ContractTypeError: KDA105, KDA108, KDA110, KDA111, KDA113, KDA114, KDA125.
        BackendError: KDA201 to KDA204.
        InternalError: KDA501, a fault of this library.

    Unchecked:
        Whether the calls of the model are what is said here. One that is not is right all the same, and compiles when it first comes.

    Example:
        >>> warmup(heads=12, lower_bound=-5.0, device="cpu").backends["chunk_kda"]
        'torch'
    """
    start = time.perf_counter()
    _check(locals())
    model = _Model(
        H=heads,
        HV=heads if v_heads is None else v_heads,
        K=k_dim,
        V=v_dim,
        dtype=dtype,
        g_dtype=g_dtype or dtype,
        beta_dtype=beta_dtype or dtype,
        pool_dtype=pool_dtype,
        gate={"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound},
        options={"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "beta_is_raw": beta_is_raw},
        saves=_Saves(output_intermediate_states, track_state, snapshots),
        layouts=tuple(dict.fromkeys(layouts)),
        index_dtypes=tuple(dict.fromkeys(index_dtypes)),
        device=torch.device(device),
    )
    compiling: dict[str, Any] = {}
    backends = {}
    steps: list[tuple[str, _Kind, Form, str]] = []
    with torch.inference_mode():
        for op in dict.fromkeys(ops):
            for kind in model.kinds(op):
                call = calls.checked_call(op, model.arguments(op, kind, Form(1, True)))
                chosen = dispatch.choose(call, backend)
                backends[op] = chosen.name
                implementation = chosen.implementation(op)
                if hasattr(implementation, "forms"):
                    compiling[implementation.__name__] = implementation
                    steps += [(op, kind, form, chosen.name) for form in implementation.forms(call)]
        before = sum(implementation.compiled() for implementation in compiling.values())
        for done, (op, kind, form, name) in enumerate(steps):
            if progress is not None:
                progress(done, len(steps))
            calls.OPS[op](**model.arguments(op, kind, form), backend=name)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
    if progress is not None:
        progress(len(steps), len(steps))
    compiled = sum(implementation.compiled() for implementation in compiling.values()) - before
    return WarmupReport(backends, compiled, time.perf_counter() - start)


@dataclasses.dataclass(frozen=True)
class _Saves:
    """Which states prefills may ask for."""

    h: bool
    track: bool
    snapshots: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kind:
    """What sets a call of a model apart for any backend: which optional tensors it has, and in which dtypes. None = not given.

    Attributes:
        index: dtype of the slots.
        cu_seqlens, track, snapshots: dtypes of `cu_seqlens`, `track_chunk_idx` and the tensors of `Snapshots`.
        h: whether the call asks for the states at all chunks.
    """

    index: torch.dtype
    cu_seqlens: torch.dtype | None = None
    h: bool = False
    track: torch.dtype | None = None
    snapshots: torch.dtype | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Model:
    """The layer whose calls are warmed up."""

    H: int
    HV: int
    K: int
    V: int
    dtype: torch.dtype
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    pool_dtype: torch.dtype
    gate: dict[str, Any]
    options: dict[str, bool]
    saves: _Saves
    layouts: tuple[str, ...]
    index_dtypes: tuple[torch.dtype, ...]
    device: torch.device

    def kinds(self, op: str) -> Iterator[_Kind]:
        """The kinds of calls of an op."""
        dtypes = self.index_dtypes
        if op == "packed_decode_kda":
            yield from (_Kind(index=dtype) for dtype in dtypes)
            return
        bounds = [dtype for layout in self.layouts for dtype in (dtypes if layout == "packed" else (None,))]
        h = (False, True) if self.saves.h else (False,)
        track = (None, *dtypes) if self.saves.track else (None,)
        snapshots = (None, *dtypes) if self.saves.snapshots else (None,)
        for index, cu_seqlens, h_, track_, snapshots_ in itertools.product(dtypes, bounds, h, track, snapshots):
            yield _Kind(index=index, cu_seqlens=cu_seqlens, h=h_, track=track_, snapshots=snapshots_)

    def arguments(self, op: str, kind: _Kind, form: Form) -> dict[str, Any]:
        """A call of a kind and form on zeros: one token a sequence if batched, one in all if packed; no slot is read or written."""
        if op == "packed_decode_kda":
            return self._decode(kind, form)
        packed, N = kind.cu_seqlens is not None, form.sequences
        rows = (1, 1) if packed else (N, 1)
        H, HV, K, V = self.H, self.HV, self.K, self.V
        gate = self._gate() if self.gate["A_log"] else {"lower_bound": self.gate["lower_bound"]}
        return {
            "q": self._zeros(*rows, H, K, dtype=self.dtype, aligned=form.aligned),
            "k": self._zeros(*rows, H, K, dtype=self.dtype, aligned=form.aligned),
            "v": self._zeros(*rows, HV, V, dtype=self.dtype, aligned=form.aligned),
            "g": self._zeros(*rows, HV, K, dtype=self.g_dtype, aligned=form.aligned),
            "beta": self._zeros(*rows, HV, dtype=self.beta_dtype),
            "initial_state": self._zeros(1, HV, V, K, dtype=self.pool_dtype, aligned=form.aligned),
            "initial_state_indices": self._padding(N, kind.index),
            "cu_seqlens": None if kind.cu_seqlens is None else self._zeros(N + 1, dtype=kind.cu_seqlens).index_fill_(0, self._last(N), 1),
            "output_intermediate_states": kind.h,
            "track_state": None if kind.track is None else self._zeros(N, HV, V, K, dtype=torch.float32),
            "track_chunk_idx": None if kind.track is None else self._padding(N, kind.track),
            "snapshots": None if kind.snapshots is None else Snapshots(*(self._padding(1, kind.snapshots, value) for value in (0, 0, -1))),
            **gate,
            **self.options,
        }

    def _decode(self, kind: _Kind, form: Form) -> dict[str, Any]:
        H, HV, K, V, B = self.H, self.HV, self.K, self.V, form.sequences
        return {
            "mixed_qkv": self._zeros(B, 2 * H * K + HV * V, dtype=self.dtype, aligned=form.aligned),
            "a": self._zeros(B, HV * K, dtype=self.g_dtype, aligned=form.aligned),
            "b": self._zeros(B, HV, dtype=self.beta_dtype),
            "scale": None,
            "initial_state": self._zeros(1, HV, V, K, dtype=self.pool_dtype),
            "out": self._zeros(B, 1, HV, V, dtype=self.dtype),
            "ssm_state_indices": self._padding(B, kind.index),
            "use_qk_l2norm_in_kernel": self.options["use_qk_l2norm_in_kernel"],
            **self._gate(),
        }

    def _gate(self) -> dict[str, Any]:
        bias = self._zeros(self.HV * self.K, dtype=torch.float32) if self.gate["dt_bias"] else None
        return {"A_log": self._zeros(self.HV, dtype=torch.float32), "dt_bias": bias, "lower_bound": self.gate["lower_bound"]}

    def _zeros(self, *shape: int, dtype: torch.dtype, aligned: bool = True) -> Tensor:
        """Zeros, which start one element past a multiple of 16 bytes unless `aligned`."""
        count = math.prod(shape)
        return torch.zeros(count + 1, dtype=dtype, device=self.device)[0 if aligned else 1 :][:count].view(shape)

    def _padding(self, count: int, dtype: torch.dtype, value: int = -1) -> Tensor:
        return torch.full((count,), value, dtype=dtype, device=self.device)

    def _last(self, N: int) -> Tensor:
        return torch.tensor([N], device=self.device)


def _check(given: dict[str, Any]) -> None:
    """What the calls themselves would not find, or only after tensors of that size were made."""
    for name in ("heads", "v_heads"):
        value = given[name]
        if value is None and name == "v_heads":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise error("KDA108", op="warmup", argument=name, expected="a whole number", got=type(value).__name__)
        if value < 1:
            raise error("KDA125", op="warmup", option=name, got=value, expected="whole numbers from 1")
    if given["v_heads"] is not None and not guards.heads_divide(given["heads"], given["v_heads"]):
        raise error("KDA110", op="warmup", heads=given["heads"], v_heads=given["v_heads"])
    for name, symbol in (("k_dim", "K"), ("v_dim", "V")):
        if not guards.head_dim_supported(given[name]):
            raise error("KDA111", op="warmup", symbol=symbol, got=given[name])
    for name in ("dtype", "g_dtype", "beta_dtype", "pool_dtype"):
        if not (given[name] is None and name in ("g_dtype", "beta_dtype")):
            _check_dtype(name, given[name], contract.FLOATS)
    for flag in FLAGS:
        contract.check_flag("warmup", flag, given[flag])
    lists: dict[str, tuple] = {"layouts": LAYOUTS, "ops": tuple(calls.OPS), "index_dtypes": contract.INDICES}
    for name in lists:
        if isinstance(given[name], str) or not isinstance(given[name], Sequence):
            raise error("KDA108", op="warmup", argument=name, expected="a list", got=type(given[name]).__name__)
        if not given[name]:
            raise error("KDA125", op="warmup", option=name, got="empty", expected=", ".join(map(dtype_name, lists[name])))
    for dtype in given["index_dtypes"]:
        _check_dtype("index_dtypes", dtype, contract.INDICES)
    for name in ("layouts", "ops"):
        for value in given[name]:
            if not guards.is_one_of(value, lists[name]):
                raise error("KDA125", op="warmup", option=name, got=repr(value), expected=", ".join(lists[name]))
    try:
        torch.empty(0, device=given["device"])
    except (RuntimeError, AssertionError, TypeError) as unknown:  # torch without CUDA asserts
        raise error("KDA125", op="warmup", option="device", got=repr(given["device"]), expected="devices that torch has here") from unknown


def _check_dtype(name: str, value: Any, known: tuple[torch.dtype, ...]) -> None:
    if value not in known:
        raise error("KDA105", op="warmup", argument=name, got=dtype_name(value), expected=", ".join(dtype_name(d) for d in known))
