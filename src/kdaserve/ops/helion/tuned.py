"""Configurations that `kdaserve tune helion` found, each with its evidence; where there is none, the rules beside the kernels hold.

A file is a list of entries, as JSON: a kernel, a GPU and the dtypes and constants it was generated for; the fields of its `helion.Config`; the
evidence.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kdaserve import guards
from kdaserve.errors import dtype_name, error

VARIABLE = "KDASERVE_HELION_CONFIGS"


def path() -> Path:
    """Where configurations are kept: the file that the environment variable names, or one in the user's own folder."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(os.environ.get(VARIABLE) or folder / "kdaserve" / "helion.json")


def identity(kernel: str, device: torch.device, dtypes: Sequence[str | None], constants: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration is for, in plain types."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    plain = {name: dtype_name(x) if isinstance(x, torch.dtype) else x for name, x in constants.items()}
    return {"kernel": kernel, "gpu": gpu, "dtypes": list(dtypes), "constants": plain}


def find(wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration kept for an `identity`, or None.

    Raises: KDA401 when the file is there and cannot be used.
    """
    for entry in read(path()):
        if all(entry[name] == value for name, value in wanted.items()):
            return entry["config"]
    return None


@functools.lru_cache(maxsize=8)
def read(file: Path) -> list[dict[str, Any]]:
    """The entries of a file, none when it does not exist; KDA401 when it is no such file."""
    if not file.exists():
        return []
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError) as cause:
        raise error("KDA401", path=file, problem=f"{type(cause).__name__}: {cause}") from cause
    if not guards.configurations_fit(entries):
        raise error("KDA401", path=file, problem=f"it is no list of objects with {', '.join(guards.CONFIGURATION)}")
    return entries


def keep(file: Path, found: Sequence[dict[str, Any]]) -> None:
    """Writes entries to a file, in place of those for the same kernels."""
    names = ("kernel", "gpu", "dtypes", "constants")
    keys = [[entry[name] for name in names] for entry in found]
    others = [entry for entry in read(file) if [entry[name] for name in names] not in keys]
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps([*others, *found], indent=1) + "\n")
    draft.replace(file)
    read.cache_clear()
