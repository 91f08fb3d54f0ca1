"""Calls saved to disk, so that what went wrong on one machine can be looked at on another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdaserve import guards, memory
from kdaserve.calls import OPS, check_op, checked_call
from kdaserve.errors import KdaError, error
from kdaserve.plan import PrefillPlan, plan_prefill
from kdaserve.snapshots import Snapshots

POOL = "initial_state"
SLOTS = ("initial_state_indices", "ssm_state_indices", "snapshots.slot")
FORMAT = 1


def save_call(path: str | Path, op: str, arguments: Mapping[str, Any]) -> Path:
    """Saves a call before it is made: tensors to a ``.safetensors`` file, the rest to a ``.json`` file beside it.

    Of the pool only the slots that the call names are saved, renumbered from 0 in the order of their numbers. Strides inside a token and
    ``out=v`` are kept. Must run **before** the call: afterwards the pool holds the new states.

    Args:
        path: of the file to write; ``.safetensors`` is appended unless it ends so.
        op: ``"chunk_kda"``, ``"recurrent_kda"`` or ``"packed_decode_kda"``.
        arguments: keyword arguments of the call. A wrong call is saved too, with the error that it raises.

    Returns:
        The path of the safetensors file, to pass to ``kdaserve check``.

    Raises:
        ContractError: KDA125 for an unknown op, KDA130 when the files cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_op("save_call", op)
    target = _tensor_file(path)
    description: dict[str, Any] = {"format": FORMAT, "op": op, "refused": _refusal(op, arguments)}
    flat = _flatten(arguments)
    tensors = {name: x.detach() for name, x in flat.items() if guards.has_storage(x) and not x.is_complex()}
    description["scalars"] = {name: value for name, value in flat.items() if name not in tensors}
    description["strides"] = {name: list(x.stride()) for name, x in tensors.items()}
    if "out" in tensors and "v" in tensors and memory.same_view(tensors["out"], tensors["v"]):
        description["out_is_v"] = True
        del tensors["out"]
    pool = tensors.get(POOL)
    if pool is not None and pool.ndim == 4:
        slots = sorted({slot for name in SLOTS for slot in _integers(tensors.get(name)) if 0 <= slot < len(pool)})
        tensors[POOL] = pool[slots]
        description["pool"] = {"slots": len(pool), "saved": slots}
    try:
        text = json.dumps(description, indent=1, default=str, skipkeys=True)
        save_file({name: x.contiguous().clone() for name, x in tensors.items()}, target, {"description": _digest(text)})
        _description_file(target).write_text(text)
    except (OSError, SafetensorError) as failed:
        raise error("KDA130", path=target, problem=f"cannot be written: {failed}") from failed
    return target


def load_call(path: str | Path) -> tuple[str, dict[str, Any]]:
    """The op and the arguments of a call saved by `save_call`, on the CPU.

    The pool holds the saved slots alone, renumbered from 0; an index that was past the pool's end still is.

    Raises:
        ContractError: KDA130 when the files are missing or not a saved call.
    """
    from safetensors import SafetensorError, safe_open

    target = _tensor_file(path)
    for file in (target, _description_file(target)):
        if not file.is_file():
            raise error("KDA130", path=target, problem=f"{file} does not exist; a saved call is a .safetensors and a .json file")
    try:
        text = _description_file(target).read_text()
        with safe_open(target, "pt") as file:
            if (file.metadata() or {}).get("description") != _digest(text):
                raise ValueError("the .json file was changed, or belongs to another call")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        description = json.loads(text)
        if description["op"] not in OPS or description["format"] != FORMAT:
            raise ValueError(f"it holds op {description['op']!r} in format {description['format']}; this version reads format {FORMAT}")
        return description["op"], _arguments(description, tensors)
    except (AttributeError, IndexError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as broken:
        raise error("KDA130", path=target, problem=f"it cannot be read: {type(broken).__name__}: {broken}") from broken


def refusal_when_saved(path: str | Path) -> str | None:
    """The error that the call of a saved call raised when it was saved; None when it was fine. For files that `load_call` takes."""
    return json.loads(_description_file(_tensor_file(path)).read_text()).get("refused")


def _arguments(description: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    saved = description.get("pool")
    if saved is not None:
        renumbered = {slot: i for i, slot in enumerate(saved["saved"])}
        past_the_end = len(renumbered) - saved["slots"]
        for name in SLOTS:
            if name in tensors:
                new = [renumbered.get(slot, slot if slot < 0 else slot + past_the_end) for slot in _integers(tensors[name])]
                tensors[name] = torch.tensor(new, dtype=tensors[name].dtype, device="cpu") if tensors[name].ndim == 1 else tensors[name]
    values: dict[str, Any] = dict(description["scalars"])
    for name, tensor in tensors.items():
        values[name] = tensor if name == POOL else _with_strides(tensor, description["strides"][name])
    if description.get("out_is_v"):
        values["out"] = values["v"]
    parts = [f"snapshots.{part}" for part in ("sequence", "tokens", "slot")]
    if any(part in values for part in parts):
        values["snapshots"] = Snapshots(*(values.pop(part) for part in parts))
    if "plan.lengths" in values:
        values["plan"] = plan_prefill(lengths=values.pop("plan.lengths"))
    return values


def _flatten(arguments: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Snapshots):
            flat |= {f"snapshots.{part}": getattr(value, part) for part in ("sequence", "tokens", "slot")}
        elif isinstance(value, PrefillPlan):
            flat["plan.lengths"] = list(value.lengths)
        else:
            flat[name] = value
    return flat


def _refusal(op: str, arguments: Mapping[str, Any]) -> str | None:
    try:
        checked_call(op, arguments)
    except (KdaError, TypeError) as refused:
        return str(refused)
    return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _integers(indices: Tensor | None) -> list[int]:
    return indices.tolist() if indices is not None and indices.ndim == 1 and indices.dtype in (torch.int32, torch.int64) else []


def _tensor_file(path: str | Path) -> Path:
    text = str(path).removesuffix(".json")
    return Path(text if text.endswith(".safetensors") else f"{text}.safetensors")


def _description_file(tensor_file: Path) -> Path:
    return Path(str(tensor_file).removesuffix(".safetensors") + ".json")


def _with_strides(tensor: Tensor, stride: list[int]) -> Tensor:
    for dim, step in enumerate(stride):
        if step == 0 and tensor.shape[dim] > 1:  # an expanded dimension: one copy of its data, seen many times
            return _with_strides(tensor.narrow(dim, 0, 1), [*stride[:dim], 1, *stride[dim + 1 :]]).expand(tensor.shape)
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, stride, strict=True)) if tensor.numel() else 0
    return torch.zeros(extent, dtype=tensor.dtype, device="cpu").as_strided(tensor.shape, stride).copy_(tensor)
