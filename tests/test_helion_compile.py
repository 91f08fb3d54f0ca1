"""What the assembler makes of the kernels that Helion generates for Hopper; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("helion")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("sm90_helion.py")
STACK = {
    "decode-fp32-1": 0,
    "decode-fp32-32": 0,
    "decode-bf16-1": 0,
    "decode-bf16-32": 0,
    "decode-fp32-32-any-memory": 0,
    "recurrent": 0,
    # Offsets of tokens are of 64 bits; that takes some registers more than the kernels of `triton` need.
    # Of `prepare`, most of it is used in chunks in which keys repeat.
    "prepare-never": 200,
    "prepare-marked": 208,
    "prepare-only": 544,
    "chain-16": 0,
    "chain-32": 0,
    "chain-64": 32,
    "chain-16-any-memory": 0,
    "chain-16-states": 0,
    "chain-32-states": 0,
    "chain-64-states": 200,
}
"""Bytes of stack a thread, at most."""
SHARED = 227 * 1024
"""Bytes of shared memory that a program may use on Hopper."""


@pytest.fixture(scope="session")
def assembled() -> dict[str, dict[str, Any]]:
    """What `sm90_helion.py` prints. Another process, because in this one triton may interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_variant_has_a_name(assembled: dict[str, dict[str, Any]]):
    assert sorted(assembled) == sorted(STACK)


@pytest.mark.parametrize("name", STACK)
def test_what_is_compiled(assembled: dict[str, dict[str, Any]], name: str):
    """Once for all numbers; few spills; asynchronous products see what threads have written; it fits; vectors where memory is aligned."""
    found = assembled[name]
    assert found["compilations"] == 1
    assert found["stack"] <= STACK[name]
    assert found["late_fences"] == []
    assert found["shared"] <= SHARED
    wide = {i for i in found["instructions"] if i.startswith(("LDG", "STG")) and (".64" in i or ".128" in i)}
    if "any-memory" not in name:
        assert {"LDG.E.128", "STG.E.128"} <= wide
    elif name.startswith("decode"):
        assert wide == set()


@pytest.mark.parametrize("name", [name for name in STACK if name.startswith("chain") and "any-memory" not in name])
def test_tiles_of_the_chain_are_copied_16_bytes_at_a_time(assembled: dict[str, dict[str, Any]], name: str):
    assert assembled[name]["instructions"]["LDGSTS.E.BYPASS.128"] >= 32 * 2
