"""What Helion generates, kept on disk: generating a kernel takes seconds, and every process of a server needs the same ones.

The files lie below Triton's cache, and are named after all that they follow from.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from kdaserve.dispatch import installed_version

PACKAGE = Path(__file__).parents[2]


def load(name: str, facts: tuple, generate: Callable[[], str]) -> Callable:
    """The host function of kernel `name`: from disk, or generated now.

    Args:
        facts: what the code follows from, beside the sources and versions; their `repr` says it all.
        generate: gives the code.
    """
    digest = hashlib.sha256(repr((facts, _sources(), _versions())).encode()).hexdigest()[:24]
    path = Path(triton.knobs.cache.dir) / "kdaserve" / f"{name}_{digest}.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(generate())
        draft.replace(path)  # at once: another process sees the whole file or none
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@functools.cache
def _sources() -> str:
    """Of every module that Helion may have traced."""
    files = [PACKAGE / "contract.py", PACKAGE / "ops/jit/chunking.py", *PACKAGE.glob("ops/**/helion.py"), *PACKAGE.glob("ops/**/helion/*.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    return torch.__version__, triton.__version__, installed_version("helion")
