"""Files that are no saved call: told apart from calls, by KDA130 and exit code 2, never by another exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kdaserve import ContractError, plan_prefill
from kdaserve.cli import app
from kdaserve.testing import decode_inputs, load_call, prefill_inputs, save_call
from test_saved import DECODE, with_snapshots_and_tracking


def unreadable(path: Path) -> str:
    with pytest.raises(ContractError) as caught:
        load_call(path)
    assert caught.value.code == "KDA130"
    assert str(path.parent) in str(caught.value)
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 2
    assert "KDA130" in result.stderr
    return str(caught.value)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    call = with_snapshots_and_tracking("chunk_kda") | {"plan": plan_prefill(lengths=[70, 0, 5])}
    return save_call(tmp_path / "call", "chunk_kda", call)


def description(saved: Path) -> dict[str, Any]:
    return json.loads(saved.with_suffix(".json").read_text())


def rewrite(saved: Path, changed: Any) -> None:
    saved.with_suffix(".json").write_text(json.dumps(changed))


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="KDA130"):
        save_call(tmp_path / "none" / "call", "chunk_kda", prefill_inputs([5]))
    unreadable(tmp_path / "none" / "call")
    unreadable(tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_file_that_is_missing_or_a_folder(saved: Path, suffix: str) -> None:
    saved.with_suffix(suffix).unlink()
    assert f"call{suffix}" in unreadable(saved)
    saved.with_suffix(suffix).mkdir()
    unreadable(saved)
    with pytest.raises(ContractError, match="KDA130"):
        save_call(saved, "chunk_kda", prefill_inputs([5]))


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file(saved: Path, suffix: str, part: float) -> None:
    whole = saved.with_suffix(suffix).read_bytes()
    saved.with_suffix(suffix).write_bytes(whole[: int(part * len(whole))])
    unreadable(saved)


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00\x01" * 8, b"null", b"[1, 2]", b'"chunk_kda"', b"{}", b"[" * 100_000, b"\x00" * 64], ids=lambda b: repr(b[:6])
)
def test_a_file_of_something_else(saved: Path, suffix: str, content: bytes) -> None:
    saved.with_suffix(suffix).write_bytes(content)
    unreadable(saved)


def test_swapped_files(saved: Path, tmp_path: Path) -> None:
    """Descriptions under each other's tensors; and the two files of one call under each other's name."""
    other = save_call(tmp_path / "other", DECODE, decode_inputs(2))
    texts = [path.with_suffix(".json").read_text() for path in (saved, other)]
    for path, text in zip((other, saved), texts, strict=True):
        path.with_suffix(".json").write_text(text)
        unreadable(path)
    kept = saved.read_bytes()
    saved.write_bytes(saved.with_suffix(".json").read_bytes())
    saved.with_suffix(".json").write_bytes(kept)
    unreadable(saved)


def test_tensors_of_another_call_of_the_same_op(saved: Path, tmp_path: Path) -> None:
    """Same names, other shapes and slots."""
    call = with_snapshots_and_tracking("chunk_kda") | {"initial_state_indices": torch.tensor([8, 5, 2])}
    other = save_call(tmp_path / "other", "chunk_kda", call)
    other.with_suffix(".json").write_text(saved.with_suffix(".json").read_text())
    unreadable(other)


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda found: found.update({key: value})


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a key removed": lambda found: found.pop("strides"),
    "another op": _set("op", "recurrent_kda"),
    "another format": _set("format", 2),
    "another stride": lambda found: found["strides"].update(q=[1, 1, 1, 1]),
    "other slots": lambda found: found["pool"].update(saved=[8, 7, 4, 2, 0]),
    "another scalar": lambda found: found["scalars"].update(lower_bound=-1.0),
    "a refusal taken out": _set("refused", None),
    "a key more": _set("note", "mine"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_description(saved: Path, edit: str) -> None:
    """The two files belong together as they were written; nothing else is loaded, so nothing that was edited can pass for a call."""
    changed = description(saved) | {"refused": "something"}
    EDITS[edit](changed)
    rewrite(saved, changed)
    unreadable(saved)
