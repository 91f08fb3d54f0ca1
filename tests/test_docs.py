"""The documentation is true: its code runs, its names exist, its numbers match the source; and imports flow one way (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import io
import json
import re
import sys
import tokenize
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import kdaserve
from kdaserve import calls, contract, dispatch, nn, testing
from kdaserve.cli import app
from kdaserve.errors import CATALOGUE, Entry

ROOT = Path(__file__).parents[1]
SOURCE = Path(kdaserve.__file__).parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.rglob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def load_hooks() -> types.ModuleType:
    """`docs/hooks.py`, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = load_hooks()
GENERATED = hooks.generated()


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """The fenced blocks of a page in one of `languages`, each with the number of its first line."""
    text = page.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(2)) + 1, block[2]) for block in found if block[1] in languages]


def code_spans(page: Path) -> list[str]:
    """What stands in single backticks outside of fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", prose)


# What pages show


@every_page
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for line, code in blocks(page, "python"):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
    printed = " ".join(capsys.readouterr().out.split())
    shown = [" ".join(text.split()) for _, text in blocks(page, "text") if text.startswith("[KDA")]
    shown += [comment for _, code in blocks(page, "python") for comment in re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)]
    assert [text for text in shown if text not in printed] == []


def commands(page: Path, program: str) -> list[list[str]]:
    """The words after `program` wherever a shell block or a code span calls it."""
    lines = [line for _, block in blocks(page, "bash") for line in block.splitlines()] + code_spans(page)
    return [line.split()[1:] for line in lines if line.startswith(f"{program} ")]


@every_page
def test_commands_exist(page: Path) -> None:
    for words in commands(page, "kdaserve"):
        command = typer.main.get_command(app)
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {words[0] for words in commands(page, "make")} <= set(targets)


def test_readme_lists_all_commands() -> None:
    assert {words[0] for words in commands(ROOT / "README.md", "kdaserve")} == set(typer.main.get_command(app).commands)


MADE = (".venv/", "site/")
"""What `make` makes."""


def is_there(path: str) -> bool:
    """Whether `path`, which may have stars, is in the repository or generated; a bare file name may stand in any folder."""
    if path in GENERATED or path.startswith(MADE):
        return True
    return any(ROOT.glob(path)) or ("/" not in path and any(any((ROOT / top).rglob(path)) for top in ("src", "tests", "docs", "benchmarks")))


@every_page
def test_paths_exist(page: Path) -> None:
    paths = [span for span in code_spans(page) if re.fullmatch(r"[\w.*-]*(/[\w.*-]*)+|\w[\w-]*\.(py|md|toml|yml|txt)", span)]
    assert [path for path in paths if not is_there(path)] == []


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        path = (page.parent / target).resolve()
        assert path.exists() or (path.is_relative_to(DOCS) and str(path.relative_to(DOCS)) in GENERATED), target


@every_page
def test_codes_exist(page: Path) -> None:
    assert set(re.findall(r"KDA\d{3}", page.read_text())) <= set(CATALOGUE)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_support_table_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text().replace("`", "")
    rows = [
        [cell.strip() for cell in row.split("|")] for row in re.findall(r"^\| (.*) \|$", text[text.index("| op |") :].split("\n\n")[0], re.MULTILINE)
    ]
    assert rows[0][1:] == [backend.name for backend in dispatch.BACKENDS]
    for column, backend in enumerate(dispatch.BACKENDS, 1):
        cells = {row[0]: row[column] for row in rows}
        for op in calls.OPS:
            assert cells[op] == ("yes" if importlib.util.find_spec(backend.module.format(op=op)) else "no")
        assert cells["inputs and pool"].split(", ") == [hooks.SHORT[dtype] for dtype in backend.dtypes]
        assert cells["devices"].split(", ") == [device.upper() for device in backend.devices]
        assert cells["gradients"] == ("yes" if backend.gradients else "no")
        assert cells['picked by backend="auto"'] == (", ".join(f"on {device.upper()}" for device in backend.automatic) or "only when named")


# Numbers that code and documentation share


def comments(path: Path) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_equations_that_code_names_exist_and_all_are_cited() -> None:
    equations = re.findall(r"^([EG]\d+) ", (DOCS / "maths.md").read_text(), re.MULTILINE)
    assert sorted(equations) == sorted([*(f"E{i}" for i in range(1, 12)), "G1", "G2"])
    sources = list(SOURCE.rglob("*.py"))
    named = {number for path in sources for number in re.findall(r"\b[EG]\d{1,2}\b", path.read_text())}
    assert named <= set(equations)
    cited = {number for path in sources for comment in comments(path) for number in re.findall(r"\b[EG]\d{1,2}\b", comment)}
    assert cited == set(equations)


def test_rules_that_code_names_exist() -> None:
    rules = re.findall(r"^- \*\*(S\d+)\*\* ", (DOCS / "contract.md").read_text(), re.MULTILINE)
    assert sorted(rules) == sorted(f"S{i}" for i in range(1, 21))
    files = [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *PAGES]
    cited = {number for path in files for group in re.findall(r"\((S\d[^()]*)\)", path.read_text()) for number in re.findall(r"\bS\d+\b", group)}
    assert cited <= set(rules)


@pytest.mark.parametrize("op", contract.TABLE)
def test_contract_page_shows_every_tensor(op: str) -> None:
    page = (DOCS / "contract.md").read_text()
    assert page == hooks.with_tables(page), "python docs/hooks.py brings the tables up to date"
    for argument in contract.TABLE[op]:
        rows = [line for line in page.splitlines() if line.startswith(f"| `{argument.name}` | `{argument.layout}` |")]
        assert rows
        assert all(argument.meaning in row.replace("\\", "") for row in rows)
        assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows), "a mark inside a cell ends it"


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.code)
def test_every_error_has_its_page_and_its_json(entry: Entry) -> None:
    assert json.loads(GENERATED[f"api/errors/{entry.code}.json"]) == json.loads(json.dumps(entry.as_dict()))
    page, index = GENERATED[f"errors/{entry.code}.md"], GENERATED["errors/index.md"]
    told = hooks.filled(entry)
    assert told.message.rstrip(".") in page
    assert f"Fix: {told.fix}" in page
    assert not re.search(r"[{]\w+[}]", told.message + told.fix), "a template that is not filled in"
    assert entry.as_markdown().split("## Meaning")[1].split("## Related")[0] in page
    assert all(f"[{code}]({code}.md)" in page for code in entry.related)
    assert f"[{entry.code}]({entry.code}.md) | {entry.title} | `{entry.raises}`" in index


def test_reference_names_everything_public() -> None:
    shown = set(re.findall(r"^::: kdaserve\.([\w.]+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE))
    public = {*kdaserve.__all__, *(f"nn.{name}" for name in nn.__all__), *(f"testing.{name}" for name in testing.__all__)}
    assert shown == public | {"errors.Entry"}


# Examples in docstrings

PUBLIC = [getattr(module, name) for module in (kdaserve, nn, testing) for name in module.__all__]
EXAMPLES = [
    test
    for thing in PUBLIC
    if not isinstance(thing, types.ModuleType)
    for test in doctest.DocTestFinder().find(thing, thing.__name__, globs=vars(sys.modules[thing.__module__]))
    if test.examples
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_docstring_examples_run(example: doctest.DocTest) -> None:
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)


def test_ops_and_what_goes_with_them_have_examples() -> None:
    assert {*calls.OPS, "plan_prefill", "StatePool", "Snapshots", "KimiDeltaAttention"} <= {example.name for example in EXAMPLES}


# Imports flow one way

LAYERS = (
    *("errors", "memory", "guards", "contract", "schedule", "plan", "snapshots", "dispatch", "values", "ops", "calls", "pool", "warm"),
    *("", "nn", "testing", "demo", "bench", "cli", "__main__"),
)
"""From the bottom up, the package itself as an empty name: a module imports from its own layer and from those before it."""
APPLICATIONS = ("testing", "demo", "bench", "cli")
MODULES = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCE.rglob("*.py")}
every_module = pytest.mark.parametrize("module", sorted(MODULES))


def imports(module: str, lazy: bool) -> set[str]:
    """Full names of what a module imports when it is loaded, with `lazy` also inside of functions; not what only type checkers see."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names.update(name if name in MODULES else str(node.module) for name in full.values())
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        elif lazy or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(ast.parse(MODULES[module].read_text()))
    return names


def layer(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def backend(module: str) -> str | None:
    """The backend that a module belongs to: ``kdaserve.ops.<op>.<backend>...``, all but `api`."""
    parts = module.split(".")
    return parts[3] if len(parts) > 3 and parts[2] in calls.OPS and parts[3] != "api" else None


def test_every_module_has_a_layer() -> None:
    assert {layer(module) for module in MODULES} == set(LAYERS)


@every_module
def test_imports_go_down(module: str) -> None:
    for name in imports(module, lazy=False):
        if name.startswith("kdaserve"):
            assert LAYERS.index(layer(name)) <= LAYERS.index(layer(module)), name


BUILT_ON = {"sm90": "triton"}
"""A backend that takes what it does not do better from another."""


@every_module
def test_only_a_backend_imports_its_modules(module: str) -> None:
    if layer(module) in APPLICATIONS:
        return
    own = backend(module)
    others = {name for name in imports(module, lazy=True) if backend(name) not in (None, own, BUILT_ON.get(own or ""))}
    assert not others


@pytest.mark.parametrize("module", sorted(module for module in MODULES if layer(module) == "errors"))
def test_errors_import_nothing_but_themselves(module: str) -> None:
    assert {name.split(".")[0] for name in imports(module, lazy=True)} <= {*sys.stdlib_module_names, "kdaserve"}
    assert {layer(name) for name in imports(module, lazy=True) if name.startswith("kdaserve")} <= {"errors"}


@every_module
def test_the_library_imports_torch_alone(module: str) -> None:
    if (
        layer(module) in APPLICATIONS
        or backend(module) not in (None, "reference", "torch")
        or module.startswith(("kdaserve.ops.jit.", "kdaserve.ops.helion."))
    ):
        return
    assert {name.split(".")[0] for name in imports(module, lazy=False)} <= {*sys.stdlib_module_names, "torch", "kdaserve"}
