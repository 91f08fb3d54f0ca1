"""Figures of stored rows: what they show, and that they can be read without colours."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from commands import run
from kdaserve.bench import plot
from kdaserve.testing.cases import GPU_DECODE, GPU_PREFILL, Case, grid

pytestmark = pytest.mark.usefixtures("narrow_plain_terminal")
PROVIDERS = ("torch", "triton", "fla", "sgl_helion")
SWEEP = grid((8, 64), (64, 4096), (1, 8), GPU_PREFILL[0].dtype)


def row(bench: str, case: Case, provider: str, ms: float = 1.0, **more: Any) -> dict[str, Any]:
    sizes = {"heads": case.heads, "sequences": case.sequences, "tokens": case.tokens, "pool_dtype": str(case.pool_dtype).removeprefix("torch.")}
    source = {"device": "NVIDIA H200", "commit": "0123456789ab", "date": "2026-11-30"}
    times = {"eager_ms": 2 * ms, "graph_ms": ms, "share_of_floor": 0.25}
    return {"bench": bench, "case": case.name, "variant": case.variant, "provider": provider, **sizes, **source, **times, **more}


ROWS = [
    row(bench, case, name)
    for bench, few in (("prefill", GPU_PREFILL), ("decode", GPU_DECODE), ("sweep", SWEEP))
    for case in few
    for name in PROVIDERS
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(path: Path) -> set[str]:
    return {" ".join(element.itertext()).strip() for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}


def test_figures_of_stored_rows(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", [{"case": "of the cpu", "ours_ms": 1}, *ROWS])
    told = run("bench", "plot", file, tmp_path / "a" / "b").stderr.split()
    names = {"prefill_latency", "prefill_floor", "decode_latency", "decode_floor", "sweep_latency", "sweep_token"}
    assert {Path(path).name for path in told} == {f"{name}_nvidia_h200.{kind}" for name in names for kind in ("svg", "png")}
    for path in map(Path, told):
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    shown = {name: texts(tmp_path / "a" / "b" / f"{name}_nvidia_h200.svg") for name in names}
    for name, found in shown.items():
        assert f"{name.split('_')[0]}: NVIDIA H200, 0123456789ab of 2026-11-30" in found
    for name in names - {"sweep_token"}:
        assert shown[name] >= set(PROVIDERS)
    assert shown["prefill_latency"] >= {"milliseconds a call", "tokens of all sequences", "8 heads, float32 pool", "96 heads, float32 pool"}
    assert shown["decode_latency"] >= {"12 heads, float32 pool", "12 heads, bfloat16 pool"}
    assert shown["prefill_floor"] >= {"share of the floor, %", *(case.name for case in GPU_PREFILL)}
    assert shown["sweep_token"] >= {
        "microseconds a token",
        "tokens of each sequence",
        "8 heads",
        "64 heads",
        "triton, 8 sequences",
        "fla, 1 sequence",
    }


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        plot.draw(ROWS[:8], tmp_path / folder)
    for path in (tmp_path / "a").glob("*.svg"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_what_did_not_run_is_left_out_and_the_last_row_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[tuple[str, list[tuple[float, float]]]] = []
    monkeypatch.setattr(plot, "_line", lambda ax, label, style, points: drawn.append((label, list(points))))
    monkeypatch.setattr(plot, "_legend", lambda *_: None)
    case = GPU_PREFILL[0]
    absent = {key: value for key, value in row("prefill", case, "fla").items() if not key.endswith("_ms")} | {"not_run": "not installed"}
    eager = {key: value for key, value in row("prefill", case, "torch", 8.0).items() if key != "graph_ms"}
    variant = row("prefill", case.varied("unbounded"), "triton", 9.0)
    plot.draw([row("prefill", case, "triton", 5.0), absent, row("prefill", case, "triton", 3.0), eager, variant], tmp_path)
    assert drawn == [("triton", [(8192, 3.0)]), ("torch", [(8192, 16.0)])]


def test_lines_and_bars_differ_in_more_than_colour() -> None:
    for styles in (plot.MARKERS, plot.LINES, plot.HATCHES, plot.COLOURS):
        assert len(set(styles)) == len(styles) >= 7


def test_figures_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ("--heads", 1, "--length", 64, "--sequences", 1, "--device", "cpu", "--rounds", 3, "--peer", "none")
    result = run("bench", "sweep", *options, "--plot", tmp_path, "--json")
    assert len(json.loads(result.stdout)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {f"sweep_{what}_cpu.{kind}" for what in ("latency", "token") for kind in ("svg", "png")}


@pytest.mark.parametrize("arguments", [("plot", "ROWS", "FOLDER"), ("prefill", "--device", "cpu", "--plot", "FOLDER")], ids=str)
def test_without_matplotlib(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = {"ROWS": written(tmp_path / "rows.jsonl", ROWS[:1]), "FOLDER": tmp_path / "figures"}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("bench", *(paths.get(word, word) for word in arguments), code=2)
    assert "pip install 'kdaserve[bench]'" in result.stderr
    assert not result.stdout
    assert not paths["FOLDER"].exists()


@pytest.mark.parametrize("text", ["no json\n", "[1]\n", "{}\n", '{"case": \n'])
def test_a_file_that_holds_no_rows(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + text)
    assert "line 2 of" in run("bench", "plot", path, tmp_path / "figures", code=2).stderr
    path.write_text('{"case": "h8_2k", "ours_ms": 1}\n')
    assert "nothing to draw" in run("bench", "plot", path, tmp_path / "figures", code=2).stderr
    assert not (tmp_path / "figures").exists()
