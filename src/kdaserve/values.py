"""Checks of what tensors hold. They need the values on the host: free for CPU tensors, a sync for a GPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kdaserve import guards
from kdaserve.contract import CHUNK
from kdaserve.errors import error
from kdaserve.plan import chunks_of, sequence_lengths

if TYPE_CHECKING:
    from kdaserve.ops.decode import DecodeCall
    from kdaserve.ops.prefill import PrefillCall


def check_prefill_indices(call: PrefillCall, sync: bool) -> None:
    """KDA120, KDA301 to KDA303, KDA307, KDA308 for the indices that are on the host, or for all of them with `sync`."""

    def readable(tensor: Tensor | None) -> bool:
        return tensor is not None and (sync or tensor.device.type == "cpu") and guards.has_storage(tensor)

    lengths = call.plan.lengths if call.plan is not None else (call.sizes["T"],) * call.sizes["B"] if call.cu_seqlens is None else None
    if readable(call.cu_seqlens) and (call.plan is None or call.cu_seqlens is not call.plan.cu_seqlens):
        assert call.cu_seqlens is not None
        found = sequence_lengths(call.op, call.cu_seqlens, call.sizes["T"])
        if lengths is not None and lengths != found:
            raise error("KDA120", op=call.op, problem=f"it has lengths {list(lengths)}, `cu_seqlens` has {list(found)}")
        lengths = found
    used: dict[int, str] = {}
    if readable(call.initial_state_indices):
        _claim_slots(call, "initial_state_indices", call.initial_state_indices, used)
    if lengths is None:
        return
    if call.snapshots is not None and (sync or call.snapshots.on_host):
        _check_snapshots(call, lengths, used)
    if readable(call.track_chunk_idx):
        assert call.track_chunk_idx is not None
        for n, chunk in enumerate(call.track_chunk_idx.tolist()):
            if chunk >= chunks_of(lengths[n]):
                raise error("KDA307", op=call.op, sequence=n, got=chunk, chunks=chunks_of(lengths[n]))


def check_prefill_data(call: PrefillCall) -> None:
    """KDA304 to KDA306: the tokens, gates and states of every sequence."""
    tokens = call.host_plan().tokens if call.sizes["B"] == 1 else call.sizes["T"]
    for name in ("q", "k", "v", "g", "beta"):
        _check_finite(call.op, name, getattr(call, name)[:, :tokens], ("batch", "token", "head", "channel"))
    _check_parameters(call)
    starting = {n for n, length in enumerate(call.host_plan().lengths) if length}
    if call.snapshots is not None:
        starting |= {sequence for sequence, tokens, _ in call.snapshots.entries() if tokens == 0}
    _check_slots_finite(call, [slot for n, slot in enumerate(call.initial_state_indices.tolist()) if n in starting])
    if call.A_log is None:
        _check_range(call.op, "KDA305", call.g[:, :tokens], call.g[:, :tokens] > 0, ("batch", "token", "head", "channel"))
    if not call.beta_is_raw:
        beta = call.beta[:, :tokens]
        _check_range(call.op, "KDA306", beta, (beta < 0) | (beta > 1), ("batch", "token", "head"))


def check_decode_indices(call: DecodeCall, sync: bool) -> None:
    """KDA301 and KDA302 for the slot of every request."""
    if guards.has_storage(call.ssm_state_indices) and (sync or call.ssm_state_indices.device.type == "cpu"):
        _claim_slots(call, "ssm_state_indices", call.ssm_state_indices, {})


def check_decode_data(call: DecodeCall) -> None:
    """KDA304 for the requests that are no padding."""
    used = call.ssm_state_indices >= 0
    for name in ("mixed_qkv", "a", "b"):
        x = getattr(call, name)
        _check_finite(call.op, name, x.masked_fill(~used[:, None], 0), ("request", "column"))
    _check_parameters(call)
    _check_slots_finite(call, call.ssm_state_indices.tolist())


def _claim_slots(call: PrefillCall | DecodeCall, argument: str, indices: Tensor, used: dict[int, str]) -> None:
    slots = call.sizes["slots"]
    for position, slot in enumerate(indices.tolist()):
        if slot >= slots:
            raise error("KDA301", op=call.op, argument=argument, position=position, got=slot, slots=slots)
        if slot >= 0:
            _claim(call.op, slot, f"`{argument}`[{position}]", used)


def _claim(op: str, slot: int, user: str, used: dict[int, str]) -> None:
    first = used.setdefault(slot, user)
    if first != user:
        raise error("KDA302", op=op, slot=slot, first=first, second=user)


def _check_snapshots(call: PrefillCall, lengths: tuple[int, ...], used: dict[int, str]) -> None:
    assert call.snapshots is not None
    slots = call.sizes["slots"]
    for i, (sequence, tokens, slot) in enumerate(call.snapshots.rows()):
        if slot < 0:
            continue
        if not 0 <= sequence < len(lengths):
            problem = f"sequence {sequence} does not exist, the call has {len(lengths)}"
        elif slot >= slots:
            problem = f"slot {slot} does not exist, the pool has {slots}"
        elif not 0 <= tokens <= lengths[sequence]:
            problem = f"sequence {sequence} has {lengths[sequence]} tokens, the snapshot is after {tokens}"
        elif tokens % CHUNK and tokens != lengths[sequence]:
            problem = f"{tokens} tokens is neither a multiple of {CHUNK} nor the length {lengths[sequence]} of sequence {sequence}"
        else:
            _claim(call.op, slot, f"`snapshots`[{i}]", used)
            continue
        raise error("KDA308", op=call.op, position=i, problem=problem)


def _check_parameters(call: PrefillCall | DecodeCall) -> None:
    for name in ("A_log", "dt_bias"):
        parameter = getattr(call, name)
        if parameter is not None:
            _check_finite(call.op, name, parameter, ("entry",))


def _check_slots_finite(call: PrefillCall | DecodeCall, slots: list[int]) -> None:
    """The states that the call will read, one slot at a time so that a large pool is not copied."""
    for slot in slots:
        if slot >= 0:
            _check_finite(call.op, f"initial_state[{slot}]", call.initial_state[slot], ("head", "row", "column"))


def _check_finite(op: str, name: str, x: Tensor, dims: tuple[str, ...]) -> None:
    bad = ~torch.isfinite(x)
    if bad.any():
        raise error("KDA304", op=op, argument=name, **_first(x, bad, dims))


def _check_range(op: str, code: str, x: Tensor, bad: Tensor, dims: tuple[str, ...]) -> None:
    if bad.any():
        raise error(code, op=op, **_first(x, bad, dims))


def _first(x: Tensor, bad: Tensor, dims: tuple[str, ...]) -> dict[str, object]:
    index = bad.nonzero()[0].tolist()
    return {"got": f"{x[tuple(index)].item():.6g}", "where": ", ".join(f"{d} {i}" for d, i in zip(dims, index, strict=False))}
