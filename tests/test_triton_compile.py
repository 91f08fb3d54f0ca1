"""What the assembler makes of the Triton kernels for Hopper; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("sm90.py")
NAMES = (
    "decode-fp32-4",
    "decode-fp32-8",
    "decode-bf16-8",
    "decode-bf16-16",
    "decode-fp32-softplus",
    "decode-fp32-any-memory",
    "recurrent-fp32",
    "recurrent-bf16",
    "recurrent-fp32-softplus-states",
    "recurrent-fp32-any-memory",
)


@pytest.fixture(scope="session")
def report() -> dict[str, Any]:
    """What `sm90.py` prints. Another process, because in this one triton may interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def assembled(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By variant: registers, bytes of stack, instructions."""
    return report["variants"]


def test_nothing_compiles_again_for_another_number_or_alignment(report: dict[str, Any]):
    assert set(report["compilations"].values()) == {1}, report["compilations"]


def test_every_variant_has_a_name(assembled: dict[str, dict[str, Any]]):
    assert sorted(assembled) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_no_spills(assembled: dict[str, dict[str, Any]], name: str):
    assert assembled[name]["stack"] == 0
    assert not {"LDL", "STL"} & {instruction.split(".")[0] for instruction in assembled[name]["instructions"]}


@pytest.mark.parametrize("name", [name for name in NAMES if "any-memory" not in name])
def test_state_moves_16_bytes_at_a_time(assembled: dict[str, dict[str, Any]], name: str):
    """A program of a kernel writes the state with vector stores, and with them alone: single ones are left to the output, in 16 bits."""
    stores = {i: n for i, n in assembled[name]["instructions"].items() if i.startswith("STG")}
    assert {i for i in stores if not i.startswith(("STG.E.U16", "STG.E.128"))} == set()
    assert any(i.startswith("LDG.E.128") for i in assembled[name]["instructions"])


@pytest.mark.parametrize("name", [name for name in NAMES if "any-memory" in name])
def test_any_memory_takes_no_alignment_for_granted(assembled: dict[str, dict[str, Any]], name: str):
    wide = [i for i in assembled[name]["instructions"] if i.startswith(("LDG", "STG")) and (".64" in i or ".128" in i)]
    assert wide == []
