"""Small predicates that find a wrong call before it is made.

Each is True when the thing it names is in order and never raises: an argument of the wrong kind makes it False. Those in the
second half read values: on a GPU they wait for it, so use them in tests and while looking for a fault, not in a serving step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from kdaserve.memory import overlap, same_view

Integers = torch.Tensor | Sequence[int]


def is_tensor(*values: Any) -> bool:
    """Every value is a dense `torch.Tensor`: not None, no list, neither sparse nor nested."""
    return all(isinstance(value, torch.Tensor) and not value.is_nested and value.layout == torch.strided for value in values)


def is_one_of(value: Any, known: Collection[str]) -> bool:
    """`value` is one of the `known` names: of a backend, of an option, of an error code."""
    return isinstance(value, str) and value in known


def is_finite_number(value: Any) -> bool:
    """`value` is a finite int or float; a bool or a tensor is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def has_ndim(tensor: Any, ndim: int) -> bool:
    """`tensor` has `ndim` dimensions."""
    return is_tensor(tensor) and tensor.ndim == ndim


def has_dtype(tensor: Any, *dtypes: torch.dtype) -> bool:
    """The dtype of `tensor` is one of `dtypes`."""
    return is_tensor(tensor) and tensor.dtype in dtypes


def same_dtype(first: Any, *others: Any) -> bool:
    """All tensors have the dtype of the first."""
    return is_tensor(first, *others) and all(other.dtype == first.dtype for other in others)


def same_device(first: Any, *others: Any) -> bool:
    """All tensors live on the device of the first; ``cuda:0`` and ``cuda:1`` are two devices."""
    return is_tensor(first, *others) and all(other.device == first.device for other in others)


def has_storage(*tensors: Any) -> bool:
    """Every tensor has memory of its own; those on the meta device, of `torch.func` and `torch.compile`, and wrappers such as DTensor have not."""
    try:
        return is_tensor(*tensors) and all(tensor.data_ptr() != 0 or (tensor.numel() == 0 and tensor.device.type != "meta") for tensor in tensors)
    except RuntimeError:  # asked of what only stands for a tensor
        return False


def last_dim_contiguous(*tensors: Any) -> bool:
    """Neighbours in the last dimension of every tensor are neighbours in memory."""
    return all(is_tensor(t) and t.ndim > 0 and (t.stride(-1) == 1 or t.shape[-1] <= 1) for t in tensors)


def pool_is_indexed(initial_state: Any, initial_state_indices: Any) -> bool:
    """Both the pool `[slots, HV, V, K]` and the slot of each sequence `[N]` are there."""
    return is_tensor(initial_state, initial_state_indices)


def pool_is_dense(pool: Any) -> bool:
    """`pool` `[slots, HV, V, K]` is contiguous inside a slot, and no two slots share memory; the slot stride is free."""
    if not has_ndim(pool, 4):
        return False
    dense = 1
    for size, stride in zip(reversed(pool.shape[1:]), reversed(pool.stride()[1:]), strict=True):
        if size > 1 and stride != dense:
            return False
        dense *= size
    return pool.shape[0] <= 1 or pool.stride(0) >= dense


def gates_cover_q(q: Any, g: Any, beta: Any) -> bool:
    """`g` `[B, rows, HV, K]` and `beta` `[B, rows, HV]` have at least the T rows of `q` `[B, T, H, K]`; more are ignored."""
    if not is_tensor(q, g, beta) or min(q.ndim, g.ndim, beta.ndim) < 2:
        return False
    return g.shape[1] >= q.shape[1] and beta.shape[1] >= q.shape[1]


def prefill_shapes_agree(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any) -> bool:
    """`q`, `k` `[B, T, H, K]`, `v` `[B, T, HV, V]`, `g` `[B, >=T, HV, K]`, `beta` `[B, >=T, HV]`, pool `[slots, HV, V, K]`."""
    if not all(has_ndim(t, n) for t, n in ((q, 4), (k, 4), (v, 4), (g, 4), (beta, 3), (initial_state, 4))):
        return False
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    shapes = (k.shape, v.shape[:2], g.shape[2:], beta.shape[2:], initial_state.shape[1:], g.shape[:1], beta.shape[:1])
    return shapes == (q.shape, (B, T), (HV, K), (HV,), (HV, V, K), (B,), (B,)) and gates_cover_q(q, g, beta)


def heads_divide(heads: int, v_heads: int) -> bool:
    """`v_heads` (HV) is a positive multiple of `heads` (H)."""
    return heads > 0 and v_heads > 0 and v_heads % heads == 0


def head_dim_supported(size: int) -> bool:
    """A head dimension, K or V, is a multiple of 16 from 16 to 256."""
    return isinstance(size, (int, torch.SymInt)) and 16 <= size <= 256 and size % 16 == 0


def gate_parameters_fit(A_log: Any, dt_bias: Any, v_heads: int, k_dim: int) -> bool:
    """`A_log` is `[HV]` and `dt_bias`, where there is one, `[HV*K]`."""
    return is_tensor(A_log) and A_log.shape == (v_heads,) and (dt_bias is None or (is_tensor(dt_bias) and dt_bias.shape == (v_heads * k_dim,)))


def gate_is_whole(A_log: Any, dt_bias: Any, lower_bound: Any) -> bool:
    """`dt_bias` and `lower_bound` come with the `A_log` that their formula needs."""
    return A_log is not None or (dt_bias is None and lower_bound is None)


def lower_bound_is_negative(lower_bound: Any) -> bool:
    """`lower_bound` is None (softplus gate) or a finite number below 0 (bounded gate)."""
    return lower_bound is None or (is_finite_number(lower_bound) and lower_bound < 0)


def batch_is_packed(q: Any, cu_seqlens: Any) -> bool:
    """`q` is `[1, T, H, K]` and `cu_seqlens` `[N+1]` holds at least the 0 it starts from."""
    return has_ndim(q, 4) and q.shape[0] == 1 and has_ndim(cu_seqlens, 1) and cu_seqlens.numel() > 0


def one_index_per_sequence(indices: Any, sequences: int) -> bool:
    """`indices` is `[N]` with one entry for each of `sequences` sequences, padded ones included."""
    return has_ndim(indices, 1) and indices.shape[0] == sequences


def packed_width_fits(width: int, v_heads: int, k_dim: int, v_dim: int) -> bool:
    """`width` is ``2*H*K + HV*V`` for a whole H that divides HV."""
    heads, rest = divmod(width - v_heads * v_dim, 2 * k_dim) if k_dim > 0 else (0, 0)
    return rest == 0 and heads_divide(heads, v_heads)


def tracking_is_paired(track_state: Any, track_chunk_idx: Any) -> bool:
    """`track_state` and `track_chunk_idx` are both given or both left out."""
    return (track_state is None) == (track_chunk_idx is None)


def snapshots_are_parallel(sequence: Any, tokens: Any, slot: Any) -> bool:
    """The three lists, or 1D integer tensors, that make `Snapshots` have one length."""
    columns = (sequence, tokens, slot)
    return all(_integers(column) is not None for column in columns) and len({len(column) for column in columns}) == 1


def can_update_in_place(tensor: Any) -> bool:
    """Autograd lets us write `tensor`: neither it nor its base is a leaf that requires a gradient; no inference tensor outside that mode."""
    if not is_tensor(tensor) or (tensor.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    seen = (tensor,) if tensor._base is None else (tensor, tensor._base)
    return not (torch.is_grad_enabled() and any(t.requires_grad and t.is_leaf for t in seen))


def out_does_not_overlap(out: Any, *inputs: Any, may_be_same: bool = False) -> bool:
    """`out` shares no byte with any of `inputs`; column views of one buffer share none. `may_be_same` allows the very same view."""
    return is_tensor(out) and not any(is_tensor(x) and overlap(out, x) and not (may_be_same and same_view(out, x)) for x in inputs)


def elements_are_distinct(tensor: Any) -> bool:
    """No two elements of `tensor` share memory, as they do in an expanded one."""
    if not is_tensor(tensor):
        return False
    if not tensor.numel():
        return True
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * (size - 1) + reach
    return True


def lengths_are_plannable(cu_seqlens: Any, lengths: Any) -> bool:
    """Exactly one is given: `cu_seqlens` as an integer tensor `[N+1]`, or `lengths` as non-negative whole numbers."""
    if (cu_seqlens is None) == (lengths is None):
        return False
    if lengths is None:
        return has_ndim(cu_seqlens, 1) and has_dtype(cu_seqlens, torch.int32, torch.int64) and cu_seqlens.numel() > 0
    found = _integers(lengths)
    return found is not None and all(n >= 0 for n in found)


def pool_sizes_fit(slots: Any, layers: Any, v_heads: Any, k_dim: Any, v_dim: Any) -> bool:
    """Whole, positive numbers of slots, layers and heads, and head dimensions that the kernels take."""
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in (slots, layers, v_heads, k_dim, v_dim)):
        return False
    return min(slots, layers, v_heads) > 0 and head_dim_supported(k_dim) and head_dim_supported(v_dim)


def saved_call_is_there(path: Any) -> bool:
    """Both files of a saved call, ``.safetensors`` and ``.json``, stand at `path` (with or without suffix)."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    stem = os.fspath(path).removesuffix(".json").removesuffix(".safetensors")
    return all(Path(stem + suffix).is_file() for suffix in (".safetensors", ".json"))


def pool_has_room(pool: Any, requests: int = 1) -> bool:
    """The `kdaserve.StatePool` has free slots for so many requests."""
    return getattr(pool, "free_slots", -1) >= requests


def slot_is_held(slot: Any, held: Collection[int]) -> bool:
    """`slot` is a Python int among the slots that its owner has allocated and not freed; an element of a tensor is none."""
    return isinstance(slot, int) and not isinstance(slot, bool) and slot in held


def plan_fits(plan: Any, sequences: int, rows: int) -> bool:
    """The `kdaserve.PrefillPlan` is for so many sequences, with no more tokens together than `rows` (B * T)."""
    lengths = getattr(plan, "lengths", None)
    return isinstance(lengths, tuple) and len(lengths) == sequences and sum(lengths) <= rows


CONFIGURATION = ("kernel", "gpu", "dtypes", "constants", "config", "evidence")
"""Fields of a tuned configuration."""


def configurations_fit(entries: Any) -> bool:
    """The content of a file of tuned configurations is a list of objects that have all fields."""
    if not isinstance(entries, list):
        return False
    return all(isinstance(entry, dict) and entry.keys() >= {*CONFIGURATION} and isinstance(entry["config"], dict) for entry in entries)


def within_tolerance(deviation: float, tolerance: float) -> bool:
    """`deviation` is a number, not NaN, and at most `tolerance`."""
    return deviation <= tolerance


def is_callers_mistake(error: BaseException) -> bool:
    """`error` came from a call that was wrong, not from a fault of this library: another backend will not help."""
    code = getattr(error, "code", None)
    return isinstance(code, str) and code.startswith("KDA") and not code.startswith("KDA5")


# From here on: predicates that read values.


def _integers(values: Any) -> list[int] | None:
    """`values` as Python ints, None when they are no flat list or tensor of whole numbers."""
    if isinstance(values, torch.Tensor):
        whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
        return values.tolist() if values.ndim == 1 and whole and has_storage(values) else None
    flat = isinstance(values, (list, tuple)) and all(isinstance(n, int) and not isinstance(n, bool) for n in values)
    return list(values) if flat else None


def slots_in_range(indices: Integers, slots: int) -> bool:
    """Every entry of `indices` `[N]` is below `slots`; negative ones are padding."""
    found = _integers(indices)
    return found is not None and all(index < slots for index in found)


def slots_unique(*indices: Integers) -> bool:
    """No slot is named twice, within one of `indices` or across them; negative ones are padding."""
    found = [_integers(one) for one in indices]
    slots = [slot for one in found for slot in one or () if slot >= 0]
    return None not in found and len(slots) == len(set(slots))


def cu_seqlens_ordered(cu_seqlens: Integers, rows: int) -> bool:
    """`cu_seqlens` `[N+1]` starts at 0, never decreases and ends at or before `rows` (T of the packed tensors)."""
    found = _integers(cu_seqlens)
    return found is not None and found[:1] == [0] and found == sorted(found) and found[-1] <= rows


def all_finite(*tensors: Any) -> bool:
    """No tensor holds a NaN or an infinity."""
    return has_storage(*tensors) and all(bool(tensor.isfinite().all()) for tensor in tensors)


def log_decay_nonpositive(g: Any) -> bool:
    """No entry of `g` is above 0; only meant for log decay, not for the raw logits that come with `A_log`."""
    return has_storage(g) and bool((g <= 0).all())


def beta_in_unit_interval(beta: Any) -> bool:
    """Every entry of `beta` is in [0, 1]; logits (``beta_is_raw=True``) need not be."""
    return has_storage(beta) and bool(((beta >= 0) & (beta <= 1)).all())


def chunk_idx_in_range(track_chunk_idx: Integers, lengths: Integers, chunk: int = 64) -> bool:
    """Every entry is negative (none) or a chunk that starts inside its sequence: 128 tokens have chunks 0 and 1."""
    found, tokens = _integers(track_chunk_idx), _integers(lengths)
    if found is None or tokens is None or len(found) != len(tokens):
        return False
    return all(index < 0 or index * chunk < n for index, n in zip(found, tokens, strict=True))


def snapshots_fit(sequence: Integers, tokens: Integers, slot: Integers, lengths: Integers, slots: int, chunk: int = 64) -> bool:
    """Each snapshot with a slot >= 0 names a sequence, of it the length or a multiple of `chunk` up to it, and one of `slots` slots."""
    columns, sizes = [_integers(column) for column in (sequence, tokens, slot)], _integers(lengths)
    if sizes is None or not snapshots_are_parallel(*columns):
        return False
    used = [(n, cut) for n, cut, target in zip(*columns, strict=True) if target >= 0]
    whole = all(0 <= n < len(sizes) and 0 <= cut <= sizes[n] and (cut == sizes[n] or cut % chunk == 0) for n, cut in used)
    return whole and slots_in_range(slot, slots)
