"""`kdaserve bench`: checked before it is timed, peers reported whatever they do, rows that add up. No test expects a duration."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kdaserve
from commands import run
from helpers import DECODE, NAN, failing, one_wrong_token, sabotage
from kdaserve import dispatch
from kdaserve.bench import limits, providers
from kdaserve.bench.measure import Bench
from kdaserve.testing import cases
from kdaserve.testing.cases import VARIANTS, DecodeCase, PrefillCase

pytestmark = pytest.mark.usefixtures("narrow_plain_terminal")
cli = sys.modules["kdaserve.cli.bench"]

FACTS = {"date", "commit", "environment"}
PREFILL = (PrefillCase("tiny", (70, 5), 2, head_dim=16), PrefillCase("single", (600,), 1, head_dim=16))
DECODES = (DecodeCase(3, 2, torch.float32, 16), DecodeCase(2, 1, torch.float32, 16, torch.bfloat16))
Red = Callable[[Any, Any], None]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cases, small measurements of the machine, and no peer that may be installed here."""
    for name, few in (("PREFILL", PREFILL), ("DECODE", DECODES)):
        monkeypatch.setattr(cli, name, {"cpu": few, "cuda": few})
        monkeypatch.setattr(cli, f"CPU_{name}", few)
    monkeypatch.setattr(sys.modules["kdaserve.bench.cpu"], "CPU_PREFILL", PREFILL[:1])
    for sizes, small in ((limits.COPIED, 2**16), (limits.PRODUCT, 32)):
        monkeypatch.setitem(sizes, "cpu", small)
    for peer in providers.PEERS:
        monkeypatch.setitem(sys.modules, peer.module, None)


def rows(*arguments: object) -> list[dict[str, Any]]:
    return json.loads(run("bench", *arguments, "--device", "cpu", "--rounds", 3, "--json").stdout, parse_constant=pytest.fail)


def stored(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Peers that stand in for those that need a GPU


def install(monkeypatch: pytest.MonkeyPatch, name: str, op: str, function: Callable[..., Any]) -> None:
    """Makes `function` what is imported as that peer."""
    (peer,) = (peer for peer in providers.PEERS if (peer.name, peer.op) == (name, op))
    module = types.ModuleType(peer.module)
    setattr(module, peer.function, function)
    monkeypatch.setitem(sys.modules, peer.module, module)


def sglang(q, k, v, g, beta, *, initial_state, initial_state_indices, use_qk_l2norm_in_kernel, cu_seqlens, A_log, dt_bias, lower_bound):
    """SGLang's contract; writes the output over v."""
    gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    pool = {"initial_state": initial_state, "initial_state_indices": initial_state_indices}
    norm = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    return v.copy_(kdaserve.chunk_kda(q, k, v, g, beta.to(q.dtype), cu_seqlens=cu_seqlens, **gate, **pool, **norm))


def fla(
    q, k, v, g, beta, A_log, dt_bias, initial_state, use_qk_l2norm_in_kernel, output_final_state, use_gate_in_kernel, safe_gate, state_v_first,
    lower_bound, cu_seqlens=None, cu_seqlens_cpu=None,
):  # fmt: skip
    """The contract of Flash Linear Attention: states in, new states out."""
    assert output_final_state
    assert use_gate_in_kernel
    assert state_v_first
    assert safe_gate == (lower_bound is not None)
    assert (cu_seqlens is None) == (cu_seqlens_cpu is None) == (len(initial_state) == 1)
    states, slots = initial_state.clone(), torch.arange(len(initial_state))
    gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    return kdaserve.chunk_kda(q, k, v, g, beta, initial_state=states, initial_state_indices=slots, cu_seqlens=cu_seqlens, **gate), states


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All peers, installed and right."""
    for name, function in (("fla", fla), ("sgl_triton", sglang), ("sgl_helion", sglang)):
        install(monkeypatch, name, "chunk_kda", function)
    for name in ("sgl_triton", "sgl_helion"):
        install(monkeypatch, name, DECODE, kdaserve.packed_decode_kda)


def assert_adds_up(row: dict[str, Any], case: PrefillCase | DecodeCase) -> None:
    """A row of ours that was timed."""
    assert (row["heads"], row["sequences"], row["tokens"]) == (case.heads, case.sequences, case.tokens)
    assert (row["bytes"], row["flops"]) == (case.nbytes, case.flops)
    assert 0 < row["eager_p20"] <= row["eager_ms"] <= row["eager_p80"]
    assert row["host_ms"] > 0
    floor = 1e3 * max(case.nbytes / 1e9 / row["copy_gb_s"], case.flops / 1e12 / row["product_tflop_s"])
    assert row["floor_ms"] == pytest.approx(floor, rel=1e-3)
    assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row.get("graph_ms", row["eager_ms"]), rel=1e-3)
    assert 0 < row["err_o"] < 1e-3
    assert 0 < row["err_s"] < 5e-3


# prefill and decode


@pytest.mark.parametrize(("command", "few"), [("prefill", PREFILL), ("decode", DECODES)])
def test_cases_are_timed(command: str, few: tuple[Any, ...]) -> None:
    found = rows(command, "--backend", "torch", "--backend", "reference", "--peer", "none")
    assert [(row["case"], row["provider"]) for row in found] == [(case.name, name) for case in few for name in ("torch", "reference")]
    for row, case in zip(found, (case for case in few for _ in range(2)), strict=True):
        assert_adds_up(row, case)
        assert row["bench"] == command
        assert row["device"] == "cpu"
        assert row["pool_dtype"] == str(case.pool_dtype).removeprefix("torch.")
        assert row["checked_tokens"] == case.tokens
        assert "CUDA graphs" in row["graph_reason"]


def test_the_floor_is_that_of_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.float32: 1e9, torch.bfloat16: 5e9}
    monkeypatch.setattr(limits, "product_rate", lambda device, dtype, rounds: rates[dtype])
    few = (PREFILL[0], dataclasses.replace(PREFILL[0], name="low", dtype=torch.bfloat16))
    monkeypatch.setattr(cli, "PREFILL", {"cpu": few})
    assert [row["product_tflop_s"] for row in rows("prefill", "--peer", "none")] == [1e-3, 5e-3]


def test_only_named_cases_are_timed_each_once() -> None:
    assert [row["case"] for row in rows("prefill", "single", "tiny", "single", "--peer", "none")] == ["single", "tiny"]


def test_backends_that_auto_may_pick_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_row = next(b for b in dispatch.BACKENDS if b.name == "torch")
    named = dataclasses.replace(torch_row, name="named", automatic=())
    absent = dataclasses.replace(torch_row, name="absent", unavailable=lambda: "no GPU")
    fast = dataclasses.replace(torch_row, name="fast")
    monkeypatch.setattr(dispatch, "BACKENDS", (named, absent, fast, *dispatch.BACKENDS))
    assert [row["provider"] for row in rows("decode", DECODES[0].name, "--peer", "none")] == ["fast", "torch"]


def test_a_backend_that_does_not_take_the_call_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = dataclasses.replace(dispatch.BACKENDS[-1], name="narrow", dtypes=(torch.bfloat16,))
    absent = dataclasses.replace(dispatch.BACKENDS[-1], name="absent", unavailable=lambda: "no [sm_90] GPU")
    monkeypatch.setattr(dispatch, "BACKENDS", (narrow, absent, *dispatch.BACKENDS))
    options = ("prefill", "tiny", "--peer", "none", "--backend", "narrow", "--backend", "absent", "--backend", "torch")
    reasons = [row.get("not_run", "") for row in rows(*options)]
    assert ["KDA203" in reasons[0], "no [sm_90] GPU" in reasons[1], reasons[2]] == [True, True, ""]
    shown = run("bench", *options, "--device", "cpu", "--rounds", 3).stdout
    assert any(line.startswith("absent: not run: ") and "no [sm_90] GPU" in line for line in shown.splitlines())


def test_larger_cases_are_checked_on_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    exact = providers.exact_results
    monkeypatch.setattr(sys.modules["kdaserve.bench.measure"], "exact_results", lambda op, x: seen.append(x["q"].shape[1]) or exact(op, x))
    found = {row["case"]: row for row in rows("prefill", "--check-tokens", 100, "--peer", "none")}
    assert [found["tiny"]["checked_tokens"], found["single"]["checked_tokens"]] == seen == [75, 100]
    assert found["single"]["tokens"] == 600


def test_sweep_has_every_combination(peers: None) -> None:
    found = rows("sweep", *("--heads", 1, "--heads", 2), *("--length", 5, "--length", 70), *("--sequences", 1, "--sequences", 3), "--peer", "fla")
    ours = [row for row in found if not row["peer"]]
    assert len(found) == 2 * len(ours) == 16
    combinations = {(row["heads"], row["sequences"], row["tokens"] // row["sequences"]) for row in ours}
    assert combinations == {(H, N, T) for H in (1, 2) for N in (1, 3) for T in (5, 70)}
    assert all(row["ratio_to"].keys() == {"fla"} for row in ours)


# Variants


def test_variants_stand_beside_their_plain_case(peers: None) -> None:
    found = rows("prefill", *(word for name in VARIANTS for word in ("--variant", name)))
    ours = {(row["case"], row["variant"]): row for row in found if not row["peer"]}
    assert list(ours) == [(case.name, variant) for case in PREFILL for variant in ("plain", *VARIANTS)]
    for (name, variant), row in ours.items():
        plain = ours[name, "plain"]
        assert ("ratio_to_plain" in row) == (variant != "plain")
        assert row.get("ratio_to_plain", 1) == pytest.approx(row["eager_ms"] / plain["eager_ms"], rel=1e-3)
        assert_adds_up(row, next(case if variant == "plain" else case.varied(variant) for case in PREFILL if case.name == name))
    assert ours["single", "bf16_pool"]["bytes"] < ours["single", "plain"]["bytes"] < ours["single", "snapshots"]["bytes"]
    of_peers = [row for row in found if row["peer"]]
    assert all(("snapshots" in row.get("not_run", "")) == (row["variant"] == "snapshots") for row in of_peers)


def test_snapshots_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_snapshot(call: Any, _: Any) -> None:
        if call.snapshots is not None and len(call.snapshots.slot):
            call.initial_state[call.snapshots.slot[-1]] *= 1.1

    sabotage(monkeypatch, "chunk_kda", wrong_snapshot)
    rows("prefill", "single", "--variant", "unbounded")
    result = run("bench", "prefill", "single", "--variant", "snapshots", "--device", "cpu", "--rounds", 3, code=1)
    assert "single snapshots" in result.stderr


# Peers


def test_peers_are_measured_on_the_same_inputs(peers: None) -> None:
    """Adapters hand over everything: each peer is as close to the float64 recurrence as ours, with both gates."""
    found = rows("prefill", "--variant", "unbounded") + rows("decode")
    for row in found:
        assert "not_run" not in row, row
        assert 0 < row["err_o"] < 1e-3
        assert 0 < row["err_s"] < 5e-3
    for row in (row for row in found if not row["peer"]):
        same = [p for p in found if p["peer"] and all(p[key] == row[key] for key in ("bench", "case", "variant"))]
        beside = {p["provider"]: p for p in same}
        assert list(row["ratio_to"]) == [peer.name for peer in providers.PEERS if (peer.op == DECODE) == (row["bench"] == "decode")]
        for name, ratio in row["ratio_to"].items():
            assert ratio == pytest.approx(beside[name]["eager_ms"] / row["eager_ms"], rel=1e-3)
        assert row["ratio_to_best_peer"] == min(row["ratio_to"].values())


@pytest.mark.parametrize(("command", "op", "case"), [("prefill", "chunk_kda", "tiny"), ("decode", DECODE, DECODES[0].name)])
def test_a_peer_that_fails_is_told_and_stops_nothing(command: str, op: str, case: str, peers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("[red]no kernel image[/]\nmore")

    install(monkeypatch, "sgl_triton", op, broken)
    found = {row["provider"]: row for row in rows(command, case)}
    assert found["sgl_triton"]["not_run"] == "RuntimeError: [red]no kernel image[/]"
    assert "sgl_triton" not in found["torch"]["ratio_to"]
    assert "sgl_helion" in found["torch"]["ratio_to"]
    assert "sgl_triton: not run: RuntimeError: [red]no kernel image[/]" in run("bench", command, case, "--device", "cpu", "--rounds", 3).stdout


def test_a_peer_that_fails_while_it_is_timed_is_told(peers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def once(*arguments: Any, **options: Any) -> Any:
        made.append(1)
        if len(made) > 1:
            raise RuntimeError("only once")
        return sglang(*arguments, **options)

    install(monkeypatch, "sgl_helion", "chunk_kda", once)
    found = {row["provider"]: row for row in rows("prefill", "tiny")}
    assert found["sgl_helion"]["not_run"] == "RuntimeError: only once"
    assert found["torch"]["ratio_to"].keys() == {"fla", "sgl_triton"}


def test_a_peer_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "fla", "chunk_kda", fla)
    found = {row["provider"]: row for row in rows("prefill", "tiny")}
    assert list(found) == ["torch", "fla", "sgl_triton", "sgl_helion"]
    assert found["sgl_helion"]["not_run"].startswith("not installed: ")
    assert found["torch"]["ratio_to"].keys() == {"fla"}
    assert "ratio_to_best_peer" not in rows("prefill", "tiny", "--peer", "sgl_helion")[0]


@pytest.mark.parametrize("wrong", [1.5, NAN])
def test_a_peer_that_is_wrong_is_reported_and_refuses_nothing(wrong: float, peers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "sgl_helion", "chunk_kda", lambda *x, **options: sglang(*x, **options) * wrong)
    found = {row["provider"]: row for row in rows("prefill", "tiny")}
    assert found["sgl_helion"]["err_o"] == (pytest.approx(0.5, rel=1e-2) if wrong == 1.5 else "nan")
    assert found["sgl_helion"]["err_s"] < 1e-3
    assert "sgl_helion" in found["torch"]["ratio_to"]
    shown = run("bench", "prefill", "tiny", "--device", "cpu", "--rounds", 3).stdout
    assert ("5.0e-01" if wrong == 1.5 else "nan") in shown


# Red


def nan_state(call: Any, _: Any) -> None:
    call.initial_state.fill_(NAN)


@pytest.mark.parametrize(("command", "op"), [("prefill", "chunk_kda"), ("decode", DECODE), ("cpu", "chunk_kda"), ("cpu", DECODE)])
@pytest.mark.parametrize("disturb", [one_wrong_token, nan_state, failing("[/bold] broken")], ids=["wrong", "nan", "failing"])
@pytest.mark.parametrize("options", [(), ("--json",)], ids=str)
def test_no_figures_on_red(
    command: str, op: str, disturb: Red, options: tuple[str, ...], peers: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sabotage(monkeypatch, op, disturb)
    where = () if command == "cpu" else ("--device", "cpu", "--plot", tmp_path / "figures")
    result = run("bench", command, "--rounds", 3, "--save", tmp_path / "rows.jsonl", *where, *options, code=1)
    assert not result.stdout
    assert "No figures on a red check" in result.stderr
    assert re.search(r"KDA309|KDA501|KDA30\d", result.stderr)
    assert op in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_last_case_is_checked_before_the_first_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, "chunk_kda", lambda call, result: result[0].mul_(1 + (call.sizes["T"] == 600)))
    monkeypatch.setattr(sys.modules["kdaserve.bench.measure"], "eager", lambda *_: pytest.fail("timed"))
    assert "case single" in run("bench", "prefill", "--device", "cpu", code=1).stderr


# What is kept and shown


@pytest.mark.parametrize("command", ["cpu", "prefill", "decode"])
def test_rows_are_appended_with_where_they_come_from(command: str, peers: None, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"case": "older"}\n')
    options = ("--rounds", 3, "--json", "--save", path, *(() if command == "cpu" else ("--device", "cpu")))
    shown = [json.loads(run("bench", command, *options).stdout) for _ in range(2)]
    older, *kept = stored(path)
    assert older == {"case": "older"}
    assert [{key: value for key, value in row.items() if key not in FACTS} for row in kept] == [*shown[0], *shown[1]]
    for row in kept:
        assert row["commit"].strip("+")
        assert row["environment"]["packages"]["torch"] == torch.__version__
        assert row["environment"].keys() == json.loads(run("env", "--json").stdout).keys()


def test_the_commit_of_a_copy_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    known = limits.commit()

    def no_git(*_: Any, **__: Any) -> None:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(subprocess, "run", no_git)
    monkeypatch.delenv(limits.COMMIT, raising=False)
    assert limits.commit() == "unknown"
    monkeypatch.setenv(limits.COMMIT, "0123456789ab")
    assert limits.commit() == "0123456789ab"
    monkeypatch.undo()
    monkeypatch.setenv(limits.COMMIT, "0123456789ab")
    assert limits.commit() == known != "0123456789ab"


def test_a_table_and_the_reasons(peers: None) -> None:
    shown = run("bench", "prefill", "--variant", "snapshots", "--device", "cpu", "--rounds", 3).stdout
    for word in ("tiny", "single", "torch", "fla", "sgl_triton", "of floor", "best peer", "error o"):
        assert word in shown
    assert "fla: not run: saves no snapshots (tiny snapshots, single snapshots)" in shown
    assert "fla: no replay: RuntimeError: no CUDA graphs on cpu (tiny, single)" in shown


def test_warming_up_checks_and_times_nothing(peers: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules["kdaserve.bench.measure"], "eager", lambda *_: pytest.fail("timed"))
    path = tmp_path / "rows.jsonl"
    found = rows("prefill", "tiny", "--warm", "--save", path)
    assert all(row["err_o"] < 1e-3 and "eager_ms" not in row for row in found)
    assert "fla" in run("bench", "prefill", "tiny", "--warm", "--device", "cpu").stdout
    assert not path.exists()
    sabotage(monkeypatch, "chunk_kda", one_wrong_token)
    run("bench", "prefill", "--warm", "--device", "cpu", code=1)


def test_every_field_is_explained(peers: None, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows("prefill", "--variant", "unbounded", "--save", path)
    rows("prefill", "--variant", "snapshots", "--save", path)
    run("bench", "cpu", "--rounds", 3, "--save", path)
    page = (Path(__file__).parents[1] / "benchmarks" / "README.md").read_text()
    fields = {field for row in stored(path) for field in row} | {"graph_ms", "graph_p20", "graph_p80", "extra_bytes", "extra_ratio"}
    assert {field for field in fields if f"`{field}`" not in page} == set()


# bench cpu


def test_the_cpu_beside_plain_pytorch() -> None:
    found = {row["case"]: row for row in json.loads(run("bench", "cpu", "--json", "--rounds", 3).stdout)}
    assert list(found) == ["tiny", "decode_b1"]
    for name, row in found.items():
        for who in ("ours", "plain"):
            assert 0 < row[f"{who}_p20"] <= row[f"{who}_ms"] <= row[f"{who}_p80"], name
        assert row["ratio"] == pytest.approx(row["plain_ms"] / row["ours_ms"], rel=0.02, abs=0.01)
    assert found["tiny"]["bytes"] == PREFILL[0].nbytes
    assert found["tiny"]["gflop"] == pytest.approx(PREFILL[0].flops / 1e9, abs=1e-3)
    assert found["tiny"]["share_of_floor"] == pytest.approx(found["tiny"]["floor_ms"] / found["tiny"]["ours_ms"], rel=0.05, abs=1e-3)
    shown = run("bench", "cpu", "--rounds", 3).stdout
    for word in ("tiny", "decode_b1", "plain PyTorch", "share"):
        assert word in shown


# Wrong command lines


@pytest.mark.parametrize("rounds", ["2", "0", "-1", "many"])
@pytest.mark.parametrize("command", ["cpu", "prefill", "decode", "sweep"])
def test_rounds_are_needed(command: str, rounds: str) -> None:
    assert "rounds" in run("bench", command, "--rounds", rounds, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("prefill", "[bold]none[/]"), "'[bold]none[/]' is none of"),
        (("prefill", "--variant", "plain"), "bf16_pool"),
        (("prefill", "--backend", "none"), "reference"),
        (("decode", "--peer", "all"), "sgl_helion"),
        (("decode", "tiny"), "h2_b3_fp32"),
        (("sweep", "--device", "tpu"), "cuda"),
        (("sweep", "--heads", "0"), "heads"),
    ],
    ids=str,
)
def test_what_there_is_not_is_refused_with_what_there_is(arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    result = run("bench", *arguments, code=2)
    assert said in result.stderr
    assert not result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert "no CUDA GPU" in run("bench", "prefill", "--device", "cuda", code=2).stderr


# Cases


ALL = [*cases.CPU_PREFILL, *cases.GPU_PREFILL, *cases.CPU_DECODE, *cases.GPU_DECODE]


def test_names_are_unique_in_each_op() -> None:
    names = [(case.op, case.name) for case in ALL]
    assert len(set(names)) == len(names)
    assert len(cases.GPU_PREFILL) == 13
    assert len(cases.GPU_DECODE) == 3 * 5 * 2


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.op}-{case.name}")
@pytest.mark.parametrize("tokens", [1, 100, 8192])
def test_a_shortened_case_differs_in_size_alone(case: Any, tokens: int) -> None:
    short = case.shortened(tokens)
    assert short.tokens <= max(tokens, case.sequences)
    assert short.tokens > 0
    assert case.tokens > tokens or short == case
    size = "lengths" if isinstance(case, PrefillCase) else "batch"
    assert dataclasses.replace(case, **{size: getattr(short, size)}) == short
    assert case.op == DECODE or short.sequences == case.sequences


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_prefill_cases_are_right_calls(variant: str | None, dtype: torch.dtype) -> None:
    case = PrefillCase("small", (1300, 512, 100), 1, dtype, head_dim=16)
    case = case.varied(variant) if variant else case
    call = case.inputs()
    kdaserve.chunk_kda(**call, check="values")
    assert call["q"].dtype == dtype
    assert call["initial_state"].dtype == (torch.bfloat16 if variant == "bf16_pool" else torch.float32)
    assert (call["lower_bound"] is None) == (variant == "unbounded")
    entries = [(n, t) for n, t, _ in call["snapshots"].entries()] if variant == "snapshots" else []
    assert entries == ([(0, 512), (0, 1024), (1, 512)] if variant == "snapshots" else [])
    moved = sum(call[name].nbytes for name in ("q", "k", "v", "v", "g", "beta")) + (2 * 3 + len(entries)) * call["initial_state"][0].nbytes
    assert case.nbytes == moved


@pytest.mark.parametrize("case", DECODES, ids=lambda case: case.name)
def test_decode_cases_are_right_calls(case: DecodeCase) -> None:
    call = case.inputs()
    kdaserve.packed_decode_kda(**call, check="values")
    assert case.nbytes == 2 * call["initial_state"][call["ssm_state_indices"].long()].nbytes


EVERYWHERE = [pytest.param("cpu", case, id=f"cpu-{case.name}") for case in (*cases.CPU_PREFILL, *cases.CPU_DECODE)]
ON_A_GPU = [
    *(each for case in cases.GPU_PREFILL for each in (case, *(case.varied(name) for name in VARIANTS))),
    *cases.GPU_DECODE,
]
EVERYWHERE += [pytest.param("cuda", case, id=f"cuda-{case.name}-{case.variant}", marks=pytest.mark.gpu) for case in ON_A_GPU]


@pytest.mark.parametrize(("where", "case"), EVERYWHERE)
def test_cases_are_computed_right(where: str, case: Any) -> None:
    """The cases of the benchmarks, cut short, on every backend that they would time."""
    found = providers.providers(case.op, providers.automatic_backends(case.op, torch.device(where)), [])
    (checked,) = Bench("check", [case], found, torch.device(where), checked_tokens=600).check()
    assert len(checked) == len(found) >= 1
    assert all(check.reason or (check.output < 6e-3 and check.state < 5e-3) for check in checked)
    assert not all(check.reason for check in checked)
