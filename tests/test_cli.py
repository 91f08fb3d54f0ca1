"""The command line: exit codes, machine-readable output, texts that arrive whole.

`kdaserve demo` is tested in `test_demo.py`, `kdaserve bench` in `test_bench.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kdaserve
from commands import assert_plain, run
from helpers import failing, one_wrong_token, sabotage
from kdaserve import KdaError, calls, dispatch
from kdaserve.cli import app
from kdaserve.errors import CATALOGUE, Entry
from kdaserve.testing import decode_inputs, prefill_inputs, save_call

DECODE = "packed_decode_kda"
ROWS = {backend.name: backend for backend in dispatch.BACKENDS}
VERDICTS = {backend.name: "ok" if backend.dim is None else "not run" for backend in dispatch.BACKENDS}
"""On a right call; a backend that is built for some sizes takes none of these."""
pytestmark = pytest.mark.usefixtures("narrow_plain_terminal")


def squeezed(text: str) -> str:
    """Without white space, and so the same however it was wrapped."""
    return "".join(text.split())


@pytest.fixture(params=["chunk_kda", "recurrent_kda", DECODE])
def dump(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A saved call that is right."""
    call = decode_inputs(3) if request.param == DECODE else prefill_inputs([70, 0, 5])
    return save_call(tmp_path / request.param, request.param, call)


def op_of(dump: Path) -> str:
    return dump.stem


# check


def test_check_of_a_right_call(dump: Path) -> None:
    shown = run("check", dump).stdout
    for name in ROWS:
        assert name in shown
    assert shown.count(" ok ") == 1 + list(VERDICTS.values()).count("ok")
    report = json.loads(run("check", dump, "--json").stdout)
    assert report["op"] == op_of(dump)
    assert report["healthy"] is True
    assert {row["check"]: row["verdict"] for row in report["results"]} == {"contract and values": "ok", **VERDICTS}
    for row in (row for row in report["results"][1:] if row["verdict"] == "ok"):
        assert 0 <= row["output"] < 1e-4
        assert 0 <= row["state"] < 1e-4


def test_check_finds_the_backend_that_is_wrong(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, op_of(dump), one_wrong_token)
    report = json.loads(run("check", dump, "--json", code=1).stdout)
    assert report["healthy"] is False
    verdicts = {row["check"]: row["verdict"] for row in report["results"]}
    assert verdicts == {"contract and values": "ok", **VERDICTS, "torch": "KDA309"}
    (message,) = (row["message"] for row in report["results"] if row["check"] == "torch")
    assert "head 1" in message
    assert f"torch: {message}" in run("check", dump, code=1).stdout.splitlines(), "the message stands unwrapped under the table"


def test_check_of_a_backend_that_fails(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in brackets is text, not markup."""
    cause = "[bold]no[/bold] [/] [red] shape [2, 3] at [link=x]"
    sabotage(monkeypatch, op_of(dump), failing(cause))
    message = next(line for line in run("check", dump, code=1).stdout.splitlines() if line.startswith("torch: "))
    assert "KDA501" in message
    assert f"ValueError: {cause}" in message
    (message,) = (row["message"] for row in json.loads(run("check", dump, "--json", code=1).stdout)["results"] if row["check"] == "torch")
    assert cause in message


def test_check_of_a_wrong_call(tmp_path: Path) -> None:
    call = prefill_inputs([70, 5]) | {"initial_state_indices": torch.tensor([2, 2])}
    dump = save_call(tmp_path / "call", "chunk_kda", call)
    with pytest.raises(KdaError) as caught:
        calls.checked_call("chunk_kda", call)
    report = json.loads(run("check", dump, "--json", code=1).stdout)
    assert [row["verdict"] for row in report["results"]] == [caught.value.code]
    assert caught.value.code in run("check", dump, code=1).stdout


def test_check_of_a_misspelt_argument(tmp_path: Path) -> None:
    dump = save_call(tmp_path / "call", "chunk_kda", prefill_inputs([5]) | {"[bold]bond[/]": -5.0})
    assert "'[bold]bond[/]'" in run("check", dump, code=1).stdout
    assert "'[bold]bond[/]'" in json.loads(run("check", dump, "--json", code=1).stdout)["results"][0]["message"]


def test_check_of_values(tmp_path: Path) -> None:
    """NaN is found though the call itself would take it; it comes out as JSON that a strict reader takes."""
    call = prefill_inputs([70, 5])
    call["k"][0, 71, 1, 3] = float("nan")
    dump = save_call(tmp_path / "call", "chunk_kda", call)
    report = json.loads(run("check", dump, "--json", code=1).stdout, parse_constant=pytest.fail)
    assert [row["verdict"] for row in report["results"]] == ["KDA304"]
    assert "token 71" in report["results"][0]["message"]


@pytest.mark.parametrize("name", ["[bold]call", "[red]a[b]", "[link=x]", "a[0] b"])
def test_check_of_a_path_that_looks_like_markup(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dump = save_call(name, "chunk_kda", prefill_inputs([5]))
    assert f"chunk_kda: {dump}" in run("check", str(dump)).stdout
    dump.unlink()
    assert str(dump) in run("check", str(dump), code=2).stderr


@pytest.mark.parametrize("options", [(), ("--json",)], ids=str)
def test_check_of_no_call(options: tuple[str, ...], tmp_path: Path) -> None:
    result = run("check", tmp_path / "none", *options, code=2)
    assert "KDA130" in result.stderr
    assert not result.stdout


def test_check_to_a_tolerance(dump: Path) -> None:
    run("check", dump, "--tolerance", "1")
    report = json.loads(run("check", dump, "--tolerance", "1e-13", "--json", code=1).stdout)
    assert "KDA309" in {row["verdict"] for row in report["results"]}


def test_check_of_a_call_that_a_backend_does_not_take(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not run, for a reason, and that is no fault of the call."""
    narrow = dataclasses.replace(ROWS["torch"], name="narrow", dtypes=(torch.bfloat16,))
    absent = dataclasses.replace(ROWS["torch"], name="absent", unavailable=lambda: "no [sm_90] GPU")
    monkeypatch.setattr(dispatch, "BACKENDS", (narrow, absent, *dispatch.BACKENDS))
    verdicts = {row["check"]: row["verdict"] for row in json.loads(run("check", dump, "--json").stdout)["results"]}
    assert verdicts == {"contract and values": "ok", "narrow": "not run", "absent": "not run", **VERDICTS}
    assert "no [sm_90] GPU" in run("check", dump).stdout


# explain


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.code)
def test_explain_as_json_is_complete(entry: Entry) -> None:
    found = json.loads(run("explain", entry.code, "--json").stdout)
    assert found == json.loads(json.dumps(entry.as_dict()))
    for key, value in found.items():
        assert value, f"{entry.code}: {key} is empty"
    fields = {field.name for field in dataclasses.fields(Entry)} - {"before", "after", "validation", "guard"}
    assert found.keys() == fields | {"example", "defence"}
    assert found["example"].keys() == {"prelude", "before", "after"}
    assert found["defence"].keys() == {"validation", "guard"}


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.code)
def test_explain_shows_everything(entry: Entry) -> None:
    """Markdown and wrapping take nothing out of the texts: no star, bracket or underscore of theirs is read as markup."""
    shown = squeezed(run("explain", entry.code).stdout)
    texts = [entry.code, entry.title, entry.raises, entry.message, entry.fix, entry.meaning, entry.trigger, *entry.situations, *entry.solutions]
    texts += [*entry.before.splitlines(), *entry.after.splitlines(), *entry.validation.splitlines(), entry.guard, *entry.prevention, *entry.related]
    for text in texts:
        assert squeezed(text.replace("`", "")) in shown.replace("`", ""), f"{entry.code} does not show: {text}"


@pytest.mark.parametrize("written", ["KDA102", "kda102", "102", "[KDA102]", "[kda102]", "[102]", " KDA102 "])
def test_explain_takes_codes_as_people_write_them(written: str) -> None:
    assert run("explain", written).stdout == run("explain", "KDA102").stdout
    assert json.loads(run("explain", written, "--json").stdout)["code"] == "KDA102"


def test_explain_lists_all() -> None:
    lines = run("explain").stdout.splitlines()
    starts = [line.split()[0] for line in lines if line.startswith("KDA")]
    assert starts == list(CATALOGUE)
    shown = squeezed("".join(lines))
    found = json.loads(run("explain", "--json").stdout)
    assert [entry["code"] for entry in found] == list(CATALOGUE)
    for entry in CATALOGUE.values():
        assert entry.raises in shown
        assert json.loads(json.dumps(entry.as_dict())) in found


@pytest.mark.parametrize("options", [(), ("--json",)], ids=str)
@pytest.mark.parametrize("written", ["KDA999", "999", "", "KDA", "[KDA]", "102x", "KDAKDA102", "[/bold]", "KDA102 KDA103"])
def test_explain_of_no_code(written: str, options: tuple[str, ...]) -> None:
    result = run("explain", written, *options, code=2)
    assert "KDA131" in result.stderr
    assert repr(written) in result.stderr
    assert not result.stdout


# env and backends


def test_env_says_what_a_bug_report_needs() -> None:
    facts = json.loads(run("env", "--json").stdout)
    assert facts["packages"]["kdaserve"] == kdaserve.__version__
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert facts["backends"].keys() == ROWS.keys()
    assert len(facts["gpus"]) == torch.cuda.device_count()
    lines = run("env").stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == list(facts)
    shown = dict(line.split(": ", 1) for line in lines)
    assert f"torch: {torch.__version__}" in shown["packages"]
    assert facts["processor"] in shown["processor"]


def test_env_without_optional_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("kdaserve.cli.env")
    monkeypatch.setattr(module, "PACKAGES", ("torch", "no-such-package"))
    assert json.loads(run("env", "--json").stdout)["packages"] == {
        "kdaserve": kdaserve.__version__,
        "torch": torch.__version__,
        "no-such-package": None,
    }
    assert "no-such-package: None" in run("env").stdout


def test_backends_are_listed() -> None:
    found = json.loads(run("backends", "--json").stdout)
    assert found == [{**dataclasses.asdict(status), "automatic": list(status.automatic)} for status in kdaserve.backends()]
    shown = run("backends").stdout
    for status in kdaserve.backends():
        assert status.name in shown
    assert shown.count(" yes ") >= sum(status.available for status in kdaserve.backends())


@pytest.mark.parametrize("reason", ["no [sm_90] GPU", "needs [/bold]", "[red]"])
def test_backends_say_why_not(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(ROWS["torch"], name="absent", role="short", unavailable=lambda: reason)
    monkeypatch.setattr(dispatch, "BACKENDS", (absent, ROWS["torch"]))
    assert json.loads(run("backends", "--json").stdout)[0]["reason"] == reason
    assert json.loads(run("env", "--json").stdout)["backends"]["absent"] == reason
    assert reason in run("env").stdout
    monkeypatch.setenv("COLUMNS", "200")
    assert f"no: {reason}" in run("backends").stdout


# The program


def test_version() -> None:
    assert run("--version").stdout == f"kdaserve {kdaserve.__version__}\n"


@pytest.mark.parametrize("arguments", [("no-such-command",), ("check",), ("explain", "--yaml"), ("check", "a", "b")], ids=str)
def test_wrong_command_lines(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr
    assert not result.stdout


def piped(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kdaserve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_program_checks_a_call(tmp_path: Path) -> None:
    """A refused call through a pipe: exit code, whole message, no colours, nothing else on the error stream."""
    call = prefill_inputs([5, 3])
    dump = save_call(tmp_path / "call", "chunk_kda", call | {"out": call["q"]})
    done = piped("check", str(dump))
    assert done.returncode == 1, done.stderr
    assert_plain(done.stdout)
    assert not done.stderr
    assert any(line.startswith("contract and values: [KDA121] chunk_kda: ") for line in done.stdout.splitlines())


def test_the_program_explains() -> None:
    done = piped("explain", "102", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["code"] == "KDA102"
    assert_plain(done.stdout)
    assert not done.stderr
