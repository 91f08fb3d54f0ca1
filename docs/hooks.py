"""The parts of the documentation that are made from the code: the tables of the contract and the pages of the error catalogue."""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from kdaserve.contract import TABLE, Argument
from kdaserve.errors import CATALOGUE, Entry

SERIES = {"KDA1": "The call", "KDA2": "The backend", "KDA3": "What tensors hold", "KDA4": "Tuning", "KDA5": "Faults of this library"}
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int32: "int32", torch.int64: "int64"}


def argument_table(arguments: tuple[Argument, ...]) -> str:
    """The tensors of an op as a Markdown table."""
    head = "| argument | shape | dtype | in memory | what it is |\n| --- | --- | --- | --- | --- |\n"
    return head + "\n".join(_row(argument) for argument in arguments) + "\n"


def error_page(entry: Entry) -> str:
    """The page of an error code; codes in its last section are links."""
    text, related = entry.as_markdown().rsplit("## Related", 1)
    links = re.sub(r"KDA\d{3}", lambda code: f"[{code[0]}]({code[0]}.md)", related)
    return f"{text}## Related\n{links}\nThe same entry [as JSON](../api/errors/{entry.code}.json).\n"


def error_json(entry: Entry) -> str:
    """The entry for programs: what ``kdaserve explain CODE --json`` prints."""
    return json.dumps(entry.as_dict(), indent=2) + "\n"


def error_index() -> str:
    """The list of all codes, by series."""
    lines = ["# Errors", "Every error carries a stable code. `kdaserve explain CODE` prints these pages in the terminal."]
    for prefix, title in SERIES.items():
        entries = [entry for code, entry in CATALOGUE.items() if code.startswith(prefix)]
        if entries:
            rows = "\n".join(f"| [{e.code}]({e.code}.md) | {e.title} | `{e.raises}` |" for e in entries)
            lines.append(f"## {prefix}xx: {title}\n\n| code | what is wrong | raises |\n| --- | --- | --- |\n{rows}")
    return "\n\n".join(lines) + "\n"


def generated() -> dict[str, str]:
    """Content of every generated file by its path below `docs/`."""
    pages = {f"errors/{code}.md": error_page(entry) for code, entry in CATALOGUE.items()}
    data = {f"api/errors/{code}.json": error_json(entry) for code, entry in CATALOGUE.items()}
    return {"errors/index.md": error_index(), **pages, **data}


def with_tables(markdown: str) -> str:
    """`markdown` with each ``<!-- arguments of OP -->`` replaced by the table of that op."""
    return re.sub(r"<!-- arguments of (\w+) -->", lambda op: argument_table(TABLE[op[1]]), markdown)


def on_files(files: Any, config: Any) -> Any:
    """MkDocs calls this once it knows the files; adds the generated ones."""
    from mkdocs.structure.files import File

    for path, content in generated().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for every page before it is rendered."""
    return with_tables(markdown)


def _row(argument: Argument) -> str:
    dtypes = f"as `{argument.same_dtype_as}`" if argument.same_dtype_as else ", ".join(SHORT[dtype] for dtype in argument.dtypes)
    if argument.slot_dense:
        memory = "dense inside a row, row stride free"
    else:
        memory = "last dimension contiguous" if argument.last_dim_contiguous else "any strides"
    meaning = re.sub(r"([|*])", r"\\\1", argument.meaning) + ("; may be None" if argument.optional else "")
    return f"| `{argument.name}` | `{argument.layout}` | {dtypes} | {memory} | {meaning} |"
