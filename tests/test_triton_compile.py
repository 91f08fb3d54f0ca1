"""What the assembler makes of the Triton kernels for Hopper; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("sm90.py")
TOKENS = (
    "decode-fp32-4",
    "decode-fp32-8",
    "decode-bf16-8",
    "decode-bf16-32",
    "decode-fp32-softplus",
    "decode-fp32-any-memory",
    "recurrent-fp32",
    "recurrent-bf16",
    "recurrent-fp32-softplus-states",
    "recurrent-fp32-any-memory",
)
"""Kernels that go token by token."""
STACK = {
    # Six products of 32 x 32 are added up at once, and with the tiles of a slice in flight they take all 255 registers. More warps, or smaller
    # slices, spill nothing and take longer.
    "prepare-never": 104,
    "prepare-marked": 104,
    # For the few chunks whose decay is too wide: slices of 64 channels hold more, and have fewer steps one after the other.
    "prepare-only": 624,
    # Addresses of single elements take the place of those of vectors. What is not aligned is read correctly, not fast.
    "prepare-never-any-memory": 288,
    "chain-16": 0,
    "chain-32": 0,
    # The state, [64, 128] in fp32, is 64 registers a thread, its bf16 operand 32, output and v' 32 each.
    "chain-64": 24,
    "chain-16-states": 0,
    "chain-32-states": 0,
    "chain-64-states": 112,
    # Four warps do the same work, and each holds all of it.
    "chain-alone-256-channels": 120,
    "chain-alone-tf32": 256,
    "chain-alone-three-tf32": 1024,
    "chain-16-any-memory": 0,
    "chain-16-states-any-memory": 0,
    "chain-64-any-memory": 48,
}
"""Of the kernels of a prefill: bytes of stack a thread, at most."""
NAMES = (*TOKENS, *STACK)
PREPARE = [name for name in STACK if name.startswith("prepare")]
CHAIN = [name for name in STACK if name.startswith("chain")]
SHARED = 227 * 1024
"""Bytes of shared memory that a program may use on Hopper."""


def aligned(names: Iterable[str]) -> list[str]:
    """Those in the form with vector loads."""
    return [name for name in names if "any-memory" not in name]


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


@pytest.mark.parametrize("name", TOKENS)
def test_no_spills(assembled: dict[str, dict[str, Any]], name: str):
    assert assembled[name]["stack"] == 0
    assert not {"LDL", "STL"} & {instruction.split(".")[0] for instruction in assembled[name]["instructions"]}


@pytest.mark.parametrize("name", STACK)
def test_prefill_spills_no_more_than_it_must(assembled: dict[str, dict[str, Any]], name: str):
    assert assembled[name]["stack"] <= STACK[name]


@pytest.mark.parametrize("name", aligned(TOKENS))
def test_state_moves_16_bytes_at_a_time(assembled: dict[str, dict[str, Any]], name: str):
    """A program of a kernel writes the state with vector stores, and with them alone: single ones are left to the output, in 16 bits."""
    stores = {i: n for i, n in assembled[name]["instructions"].items() if i.startswith("STG")}
    assert {i for i in stores if not i.startswith(("STG.E.U16", "STG.E.128"))} == set()
    assert any(i.startswith("LDG.E.128") for i in assembled[name]["instructions"])


@pytest.mark.parametrize("name", [name for name in TOKENS if name not in aligned(TOKENS)])
def test_any_memory_takes_no_alignment_for_granted(assembled: dict[str, dict[str, Any]], name: str):
    assert vectors(assembled[name]) == set()


@pytest.mark.parametrize("name", [name for name in STACK if name not in aligned(STACK)])
def test_only_the_workspace_is_known_to_be_aligned(assembled: dict[str, dict[str, Any]], name: str):
    """Which `prepare` writes, and the chain copies past the registers."""
    assert not {i for i in vectors(assembled[name]) if i.startswith("LDG.")}
    if name in CHAIN:
        assert {i for i in vectors(assembled[name]) if i.startswith("STG")} <= ({"STG.E.128"} if "states" in name else set())


@pytest.mark.parametrize("name", NAMES)
def test_asynchronous_products_see_what_threads_have_written(assembled: dict[str, dict[str, Any]], name: str):
    """Triton 3.6 puts the fence in front of the product, and no barrier behind it if there was one since the writing."""
    assert assembled[name]["late_fences"] == []


@pytest.mark.parametrize("name", aligned(PREPARE))
def test_inputs_of_prepare_come_16_bytes_at_a_time(assembled: dict[str, dict[str, Any]], name: str):
    """q, k and g do, by vector loads or copied past the registers; single elements are left to beta, a few instructions of the whole kernel."""
    counts = assembled[name]["instructions"]
    wide = sum(n for i, n in counts.items() if i.startswith(("LDG.E.128", "LDGSTS.E.BYPASS.128")))
    assert wide >= 30
    assert {i for i in counts if i.split(".")[0] in ("LDG", "LDGSTS")} <= {"LDG.E.128", "LDGSTS.E.BYPASS.128", "LDG.E", "LDG.E.U16"}
    assert counts.get("LDG.E.U16", 0) <= 24
    assert counts.get("LDG.E", 0) <= 5, "a few numbers: the bounds of the sequence, A_log"
    assert not {i for i in counts if i.startswith("STG")} - {"STG.E.128", "STG.E"}
    assert counts.get("STG.E", 0) <= 2, "the mark of a chunk"


@pytest.mark.parametrize("name", [name for name in aligned(CHAIN) if "alone" not in name])
def test_tiles_of_the_chain_are_copied_16_bytes_at_a_time(assembled: dict[str, dict[str, Any]], name: str):
    """Tiles go to shared memory past the registers, in vectors; what else is copied is the decay, one or two numbers a thread and chunk in flight."""
    counts = assembled[name]["instructions"]
    assert counts["LDGSTS.E.BYPASS.128"] >= 32 * 2
    (decay,) = {i for i in counts if i.startswith("LDGSTS")} - {"LDGSTS.E.BYPASS.128"}
    assert counts[decay] <= 3
    assert {i for i in counts if i.startswith("STG")} == {"STG.E.128"}


@pytest.mark.parametrize("name", NAMES)
def test_shared_memory(assembled: dict[str, dict[str, Any]], name: str):
    """It fits, and `config` does not take the chain for smaller than it is: it would choose a form that cannot be launched."""
    found = assembled[name]
    assert found["shared"] <= found.get("expected_shared", SHARED) <= SHARED


def vectors(found: dict[str, Any]) -> set[str]:
    """Loads and stores of more than four bytes."""
    return {i for i in found["instructions"] if i.startswith(("LDG", "STG")) and (".64" in i or ".128" in i)}
