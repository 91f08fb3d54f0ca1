"""``kdaserve env`` and ``kdaserve backends``: what a bug report needs, and what can run here."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kdaserve
from kdaserve import dispatch

PACKAGES = ("torch", "triton", "helion", "numpy", "safetensors")


def environment() -> dict[str, object]:
    """Versions, processor and GPUs of this machine; plain types only."""
    versions: dict[str, object] = {"kdaserve": kdaserve.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    gpus = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        gpus.append({"name": p.name, "capability": f"{p.major}.{p.minor}", "memory_gib": round(p.total_memory / 2**30, 1)})
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "packages": versions,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "backends": {b.name: b.reason or "available" for b in dispatch.backends()},
    }


def env(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Print what a bug report needs."""
    facts = environment()
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    for name, value in facts.items():
        lines = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
        typer.echo(f"{name}: " + ("; ".join(str(line) for line in lines) or "none"))


def backends(as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False) -> None:
    """List the backends: what can run here, and why not the rest."""
    found = dispatch.backends()
    if as_json:
        typer.echo(
            json.dumps([{"name": b.name, "available": b.available, "automatic": b.automatic, "role": b.role, "reason": b.reason} for b in found])
        )
        return
    table = Table("backend", "can run here", "auto", "role")
    for b in found:
        table.add_row(b.name, "yes" if b.available else escape(f"no: {b.reason}"), ", ".join(b.automatic) or "when named", b.role)
    Console().print(table)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    except OSError:
        return platform.processor() or platform.machine()
