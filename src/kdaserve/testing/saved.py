"""Calls saved to disk, so that what went wrong on one machine can be looked at on another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdaserve.dispatch import OPS
from kdaserve.errors import error
from kdaserve.plan import PrefillPlan, plan_prefill
from kdaserve.snapshots import Snapshots

POOL = "initial_state"
FORMAT = 1


def save_call(path: str | Path, op: str, arguments: Mapping[str, Any]) -> Path:
    """Saves a call before it is made: tensors to ``path`` (``.safetensors``), the rest to a JSON file beside it.

    Of the pool only the rows that the call names are saved. Strides are kept, and so is ``out=v``. Must run **before** the call: afterwards
    the pool holds the new states.

    Args:
        path: file to write; its suffix becomes ``.safetensors``.
        op: ``"chunk_kda"``, ``"recurrent_kda"`` or ``"packed_decode_kda"``.
        arguments: keyword arguments of the call.

    Returns:
        The path of the safetensors file, to pass to ``kdaserve check``.
    """
    from safetensors.torch import save_file

    if op not in OPS:
        raise error("KDA125", op="save_call", option="op", got=repr(op), expected=", ".join(OPS))
    path = Path(path).with_suffix(".safetensors")
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    strides: dict[str, list[int]] = {}
    for name, value in _flatten(arguments).items():
        if isinstance(value, Tensor):
            strides[name] = list(value.stride())
            tensors[name] = value.detach()
        else:
            scalars[name] = value
    aliases = {}
    if "out" in tensors and "v" in tensors and _is_same(tensors["out"], tensors["v"]):
        aliases["out"] = "v"
        del tensors["out"]
    description: dict[str, Any] = {"format": FORMAT, "op": op, "scalars": scalars, "strides": strides, "aliases": aliases}
    pool = tensors.get(POOL)
    if pool is not None and pool.ndim == 4:
        rows = _named_rows(tensors, pool.shape[0])
        tensors[POOL] = pool[rows]
        description["pool"] = {"slots": pool.shape[0], "rows": rows}
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, path)
    path.with_suffix(".json").write_text(json.dumps(description, indent=1))
    return path


def load_call(path: str | Path) -> tuple[str, dict[str, Any]]:
    """The op and the arguments of a call saved by `save_call`, on the CPU, with the strides they had; other rows of the pool are zero.

    Raises:
        ContractError: KDA130 when the files are missing or not a saved call.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path).with_suffix(".safetensors")
    try:
        description = json.loads(path.with_suffix(".json").read_text())
        tensors = load_file(path)
        op, scalars, strides, aliases = (description[key] for key in ("op", "scalars", "strides", "aliases"))
    except FileNotFoundError as missing:
        raise error("KDA130", path=path, problem=f"{missing.filename} does not exist; a saved call is a .safetensors and a .json file") from missing
    except (KeyError, ValueError, TypeError, SafetensorError, OSError) as broken:
        raise error("KDA130", path=path, problem=f"it cannot be read: {broken}") from broken
    if op not in OPS or description.get("format") != FORMAT:
        raise error("KDA130", path=path, problem=f"it holds op {op!r} in format {description.get('format')}; this version reads format {FORMAT}")
    values: dict[str, Any] = dict(scalars)
    pool_rows = description.get("pool")
    for name, tensor in tensors.items():
        if name == POOL and pool_rows:
            full = _strided((pool_rows["slots"], *tensor.shape[1:]), strides[name], tensor.dtype)
            full[pool_rows["rows"]] = tensor
            values[name] = full
        else:
            values[name] = _with_strides(tensor, strides[name])
    values |= {name: values[source] for name, source in aliases.items()}
    return op, _unflatten(values)


def _flatten(arguments: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Snapshots):
            flat |= {f"snapshots.{part}": getattr(value, part) for part in ("sequence", "tokens", "slot")}
        elif isinstance(value, PrefillPlan):
            flat["plan.lengths"] = list(value.lengths)
        elif value is not None:
            flat[name] = value
    return flat


def _unflatten(values: dict[str, Any]) -> dict[str, Any]:
    if "snapshots.sequence" in values:
        values["snapshots"] = Snapshots(*(values.pop(f"snapshots.{part}") for part in ("sequence", "tokens", "slot")))
    if "plan.lengths" in values:
        values["plan"] = plan_prefill(lengths=values.pop("plan.lengths"))
    return values


def _named_rows(tensors: Mapping[str, Tensor], slots: int) -> list[int]:
    named = [tensors[n].tolist() for n in ("initial_state_indices", "ssm_state_indices", "snapshots.slot") if n in tensors]
    return sorted({row for rows in named for row in rows if 0 <= row < slots})


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _with_strides(tensor: Tensor, stride: list[int]) -> Tensor:
    for dim, step in enumerate(stride):
        if step == 0 and tensor.shape[dim] > 1:  # an expanded dimension: one copy of its data, seen many times
            return _with_strides(tensor.narrow(dim, 0, 1), [*stride[:dim], 1, *stride[dim + 1 :]]).expand(tensor.shape)
    return _strided(tuple(tensor.shape), stride, tensor.dtype).copy_(tensor)


def _strided(shape: tuple[int, ...], stride: list[int], dtype: torch.dtype) -> Tensor:
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
    return torch.zeros(extent, dtype=dtype).as_strided(shape, stride)
