"""What the assembler makes of the Gluon kernels for Hopper; no GPU is needed."""

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

SCRIPT = Path(__file__).with_name("gluon_sm90.py")
NAMES = ("chain", "chain-late", "chain-order", "chain-one-part", "chain-16-bits", "chain-any-memory", "chain-h-track", "chain-states")
SHARED = 227 * 1024
"""Bytes of shared memory that a program may use on Hopper."""
every = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="session")
def report() -> dict[str, Any]:
    """What `gluon_sm90.py` prints. Another process, because in this one triton may interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def built(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By variant."""
    return report["variants"]


def test_nothing_compiles_again_for_another_number_size_or_alignment(report: dict[str, Any]):
    assert set(report["compilations"].values()) == {1}, report["compilations"]


def test_every_variant_has_a_name(built: dict[str, dict[str, Any]]):
    assert sorted(built) == sorted(NAMES)


@every
def test_nothing_spills(built: dict[str, dict[str, Any]], name: str):
    assert built[name]["stack"] == 0


@every
def test_products_run_side_by_side(built: dict[str, dict[str, Any]], name: str):
    """The assembler warns where it puts a wait behind every product. Eleven products a chunk, eight with v' in one part, each four instructions."""
    assert built[name]["warnings"] == []
    assert built[name]["products"] == (32 if name == "chain-one-part" else 44)


@every
def test_fits(built: dict[str, dict[str, Any]], name: str):
    assert built[name]["shared"] <= SHARED
    assert built[name]["scratch"] == 0, "memory of its own, which a direct launch does not give it"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "chain-any-memory"])
def test_the_last_chunk_is_stored_16_bytes_at_a_time(built: dict[str, dict[str, Any]], name: str):
    assert "STG.E.128" in built[name]["stores"]
    assert "STG.E.U16" not in built[name]["stores"]
