"""What the assembler makes of the Gluon kernels for Hopper; no GPU is needed."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from kdaserve.ops.chunk_kda.sm90 import PROGRAMS, REGISTERS

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("gluon_sm90.py")
CHAIN = ("chain", "chain-order", "chain-16-bits", "chain-any-memory", "chain-h-track", "chain-states")
PREPARE = {
    "prepare": 0,
    "prepare-order": 0,
    "prepare-batch": 0,
    "prepare-fp16": 0,
    # For the branches of chunks that decay widely; most of it is put away once, before the loop over the slices.
    "prepare-wide": 136,
    "prepare-softplus": 120,
    "prepare-no-gate": 144,
}
"""Bytes of stack a thread, at most."""
WIDE = ("prepare-wide", "prepare-softplus", "prepare-no-gate")
NAMES = (*CHAIN, *PREPARE)
SHARED = 227 * 1024
"""Bytes of shared memory that a program may use on Hopper."""
TAKEN = 1024
"""Bytes of a multiprocessor's shared memory that each program takes besides; there are as many more than `SHARED`."""
every = pytest.mark.parametrize("name", NAMES)
prepares = pytest.mark.parametrize("name", PREPARE)


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `gluon_sm90.py` prints, once for all workers. Another process, because in this one triton may interpret."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    path = folder / "gluon_sm90.json"
    with (folder / "gluon_sm90.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
            done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment, check=False)
            assert done.returncode == 0, done.stderr
            path.write_text(done.stdout)
    return json.loads(path.read_text())


@pytest.fixture(scope="session")
def built(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By variant."""
    return report["variants"]


def test_nothing_compiles_again_for_another_number_size_or_alignment(report: dict[str, Any]):
    assert set(report["compilations"].values()) == {1}, report["compilations"]


def test_every_variant_has_a_name(built: dict[str, dict[str, Any]]):
    assert sorted(built) == sorted(NAMES)


@every
def test_nothing_spills_but_what_must(built: dict[str, dict[str, Any]], name: str):
    assert built[name]["stack"] <= PREPARE.get(name, 0)


@every
def test_nothing_else_lies_where_a_barrier_does(built: dict[str, dict[str, Any]], name: str):
    """Not even when it has been waited for: it changes there when a GPU goes from one process to the next."""
    assert built[name]["reused"] == []


@every
def test_products_run_side_by_side(built: dict[str, dict[str, Any]], name: str):
    """The assembler warns where it puts a wait behind every product. Each is four instructions.

    Of the chain eleven products a chunk; of prepare six a slice of channels, and where chunks may decay widely ten more, of which six add up decays.
    """
    assert built[name]["warnings"] == []
    assert built[name]["products"] == (88 if name in WIDE else 48 if name in PREPARE else 44)


@every
def test_asynchronous_reads_see_what_threads_have_written(built: dict[str, dict[str, Any]], name: str):
    """The products of prepare and the copies of the chain: a fence behind the writing, and a barrier behind the fence."""
    assert built[name]["fenced"]


@every
def test_fits(built: dict[str, dict[str, Any]], name: str):
    assert built[name]["shared"] <= SHARED
    assert built[name]["scratch"] == 0, "memory of its own, which a direct launch does not give it"


@prepares
def test_programs_of_prepare_run_side_by_side(built: dict[str, dict[str, Any]], name: str):
    """As many on a multiprocessor as the host counts on, of 128 threads."""
    assert built[name]["registers"] <= REGISTERS
    assert PROGRAMS * 128 * REGISTERS <= 2**16
    assert PROGRAMS * (built[name]["shared"] + TAKEN) <= SHARED + TAKEN


@pytest.mark.parametrize("name", [name for name in CHAIN if name != "chain-any-memory"])
def test_the_last_chunk_is_stored_16_bytes_at_a_time(built: dict[str, dict[str, Any]], name: str):
    assert "STG.E.128" in built[name]["stores"]
    assert "STG.E.U16" not in built[name]["stores"]


@prepares
def test_prepare_copies_boxes_and_stores_16_bytes_at_a_time(built: dict[str, dict[str, Any]], name: str):
    """q, k and g by TMA, six boxes.

    What threads load are beta and parameters of a head, keys that repeat and their gates, a channel a thread, and wide chunks, 16 bytes at a time,
    or of a few wide channels two tokens a thread, the next channel ahead, which are stored likewise.
    """
    loads, stores = built[name]["loads"], built[name]["stores"]
    assert built[name]["copies"] == 6
    assert loads["LDG.E.U16"] <= 1 + 16 + (12 if name in WIDE else 0)
    assert {*loads} <= {"LDG.E", "LDG.E.U16", *(["LDG.E.128"] if name in WIDE else [])}
    assert stores["STG.E.128"] >= 12 + 16
    assert {*stores} <= {"STG.E.128", "STG.E.64", "STG.E", *(["STG.E.U16"] if name in WIDE else [])}
    assert stores["STG.E.64"] + stores.get("STG.E", 0) <= 5
