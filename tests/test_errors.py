"""The error catalogue: every entry is complete, its examples do what they say, and whatever is raised is in it."""

from __future__ import annotations

import ast
import dataclasses
import json
import pickle
import re
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kdaserve
from kdaserve import errors, guards
from kdaserve.cli import app
from kdaserve.errors import CATALOGUE, PRELUDE, Entry

SOURCE = Path(kdaserve.__file__).parent
CLASSES = {
    "ContractError": (errors.ContractError, ValueError, "KDA1"),
    "ContractTypeError": (errors.ContractTypeError, TypeError, "KDA1"),
    "PoolError": (errors.PoolError, RuntimeError, "KDA1"),
    "BackendError": (errors.BackendError, RuntimeError, "KDA2"),
    "ValuesError": (errors.ValuesError, ValueError, "KDA3"),
    "TuningError": (errors.TuningError, ValueError, "KDA4"),
    "InternalError": (errors.InternalError, RuntimeError, "KDA5"),
}
every_entry = pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.code)


def texts(entry: Entry, *but: str) -> list[str]:
    """All texts of an entry, except the fields `but`."""
    values = [getattr(entry, field.name) for field in dataclasses.fields(entry) if field.name not in but]
    return [text for value in values for text in (value if isinstance(value, tuple) else (value,))]


def words(text: str) -> str:
    """`text` without marks and line breaks."""
    return " ".join(text.replace("`", "").replace("•", " ").split())


def run(*snippets: str, into: dict[str, Any] | None = None) -> dict[str, Any]:
    """Runs `snippets` one after the other in one namespace, as a reader would paste them."""
    namespace = {} if into is None else into
    for snippet in snippets:
        exec(snippet, namespace)
    return namespace


def fail(entry: Entry) -> tuple[errors.KdaError, dict[str, Any]]:
    """The error that the entry's `before` raises, and what it had defined by then."""
    namespace: dict[str, Any] = {}
    with pytest.raises(errors.KdaError) as raised:
        run(PRELUDE, entry.before, into=namespace)
    return raised.value, namespace


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples may write files."""
    monkeypatch.chdir(tmp_path)


@every_entry
def test_before_raises_this_very_error(entry: Entry) -> None:
    error, _ = fail(entry)
    assert error.code == entry.code
    assert type(error) is CLASSES[entry.raises][0]
    text = str(error)
    assert text.startswith(f"[{entry.code}] {entry.message.format(**error.details)}")
    assert f"Fix: {entry.fix.format(**error.details)}" in text
    assert text.endswith(f"(kdaserve explain {entry.code})")
    assert "\n" not in text


@every_entry
def test_after_runs_and_its_validation_passes(entry: Entry) -> None:
    run(PRELUDE, entry.after, entry.validation)


@every_entry
def test_validation_finds_the_mistake_of_before(entry: Entry) -> None:
    _, namespace = fail(entry)
    with pytest.raises(AssertionError):
        run(entry.validation, into=namespace)


@every_entry
def test_errors_survive_pickling(entry: Entry) -> None:
    error, _ = fail(entry)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.code) == (type(error), str(error), error.code)
    assert repr(copy.details) == repr(error.details)


@every_entry
def test_entry_is_complete(entry: Entry) -> None:
    assert all(getattr(entry, field.name) for field in dataclasses.fields(entry))
    assert all(text and text == text.strip() for text in texts(entry))
    assert len(entry.situations) >= 2
    assert len(entry.solutions) >= 2
    assert "\n" not in entry.message + entry.fix
    assert entry.message.endswith(".")
    assert entry.fix.endswith(".")
    assert len(set(texts(entry))) == len(texts(entry))


@every_entry
def test_prose_survives_markdown(entry: Entry) -> None:
    for text in texts(entry, "before", "after", "validation"):
        assert text.count("`") % 2 == 0
        assert not set("*<") & set(re.sub(r"`[^`]*`", "", text)), text


@every_entry
def test_related_codes_exist(entry: Entry) -> None:
    assert set(entry.related) <= set(CATALOGUE) - {entry.code}
    assert list(entry.related) == sorted(set(entry.related))


@every_entry
def test_guard_is_a_documented_function_that_the_validation_uses(entry: Entry) -> None:
    guard = getattr(guards, entry.guard)
    assert guard.__module__ == guards.__name__
    assert guard.__doc__
    assert f"kdaserve.guards.{entry.guard}(" in entry.validation


@every_entry
def test_renderings_carry_the_whole_entry(entry: Entry) -> None:
    page = entry.as_markdown()
    plain = json.loads(json.dumps(entry.as_dict()))
    told = [plain[name] for name in ("code", "title", "raises", "message", "fix", "meaning", "trigger")]
    told += plain["situations"] + plain["solutions"] + plain["prevention"] + plain["related"]
    told += [plain["example"]["before"], plain["example"]["after"], plain["defence"]["validation"]]
    assert sorted(told) == sorted(texts(entry, "guard"))
    assert plain["defence"]["guard"] == f"kdaserve.guards.{entry.guard}"
    assert plain["example"]["prelude"] == PRELUDE
    assert [text for text in texts(entry, "fix") if text not in page] == []


def test_pages_show_the_fix() -> None:
    assert [entry.code for entry in CATALOGUE.values() if entry.fix not in entry.as_markdown()] == []


def test_catalogue_is_in_order_and_codes_fit_their_classes() -> None:
    assert list(CATALOGUE) == sorted(CATALOGUE)
    for code, entry in CATALOGUE.items():
        assert re.fullmatch(r"KDA[1-5]\d\d", code)
        assert code == entry.code
        assert code.startswith(CLASSES[entry.raises][2])
    assert len({entry.title for entry in CATALOGUE.values()}) == len(CATALOGUE)


@pytest.mark.parametrize(("ours", "builtin"), [(ours, builtin) for ours, builtin, _ in CLASSES.values()])
def test_engines_can_catch_the_builtin_exception(ours: type, builtin: type) -> None:
    assert issubclass(ours, (errors.KdaError, builtin))
    assert issubclass(ours, errors.KdaError)
    assert issubclass(ours, builtin)


def test_contractual_sentences() -> None:
    assert "KDA prefill requires an indexed initial-state pool" in str(fail(CATALOGUE["KDA101"])[0])
    assert "g and beta must cover every q token" in str(fail(CATALOGUE["KDA102"])[0])
    assert "`mixed_qkv` must be a 2D tensor (got ndim=3)" in str(fail(CATALOGUE["KDA103"])[0])
    assert "`mixed_qkv` must be contiguous in the last dim." in str(fail(CATALOGUE["KDA109"])[0])


def raise_sites() -> list[tuple[str, ast.Call]]:
    """Every ``error("KDA...", ...)`` of the library."""
    sites = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "error" and node.args:
                sites.append((f"{path.relative_to(SOURCE)}:{node.lineno}", node))
    assert sites
    return sites


@pytest.mark.parametrize(("where", "call"), [pytest.param(*site, id=site[0]) for site in raise_sites()])
def test_raise_sites_give_what_the_templates_use(where: str, call: ast.Call) -> None:
    code = call.args[0]
    given = {keyword.arg for keyword in call.keywords}
    if isinstance(code, ast.Constant) and None not in given:
        entry = CATALOGUE[code.value]
        used = {name for _, name, _, _ in string.Formatter().parse(entry.message + entry.fix) if name}
        assert used <= given, where


def test_every_entry_is_raised_somewhere() -> None:
    raised = " ".join(path.read_text() for path in SOURCE.rglob("*.py") if "catalogue" not in path.parts)
    unused = [code for code in CATALOGUE if f'"{code}"' not in raised]
    assert not unused


def test_catalogue_imports_nothing_heavy() -> None:
    program = (
        "import sys, types\n"
        "package = types.ModuleType('kdaserve')\n"
        f"package.__path__ = [{str(SOURCE)!r}]\n"
        "sys.modules['kdaserve'] = package\n"
        "import kdaserve.errors.catalogue\n"
        "assert not {'torch', 'numpy', 'typer', 'rich'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_explain_takes_any_case_and_refuses_other_codes() -> None:
    assert kdaserve.explain("kda102") is CATALOGUE["KDA102"]
    with pytest.raises(errors.ContractError, match=r"KDA131.*KDA999.*KDA102"):
        kdaserve.explain("KDA999")


def test_cli_lists_all_codes() -> None:
    result = CliRunner().invoke(app, ["explain"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for entry in CATALOGUE.values():
        assert f"{entry.code} " in result.stdout
        assert entry.title in result.stdout


def test_cli_lists_all_codes_as_json() -> None:
    result = CliRunner().invoke(app, ["explain", "--json"])
    assert json.loads(result.stdout) == json.loads(json.dumps([entry.as_dict() for entry in CATALOGUE.values()]))


@every_entry
def test_cli_explains_a_code(entry: Entry) -> None:
    result = CliRunner().invoke(app, ["explain", entry.code.lower()], env={"COLUMNS": "400"})
    assert result.exit_code == 0
    printed = words(result.stdout)
    assert [text for text in texts(entry, "fix", "before", "after", "validation") if words(text) not in printed] == []
    as_json = CliRunner().invoke(app, ["explain", entry.code, "--json"])
    assert json.loads(as_json.stdout) == json.loads(json.dumps(entry.as_dict()))


def test_cli_refuses_an_unknown_code() -> None:
    result = CliRunner().invoke(app, ["explain", "KDA999"])
    assert result.exit_code == 2
    assert "KDA131" in result.stderr
    assert not result.stdout
