"""The parts of the documentation that are made from the code: the pages of the error catalogue, and the tables of the contract.

MkDocs makes the pages. The tables stand in `docs/contract.md`, where a test compares them; ``python docs/hooks.py`` brings them up to date.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import torch

from kdaserve.contract import TABLE, Argument
from kdaserve.errors import CATALOGUE, PRELUDE, Entry, KdaError

CONTRACT = Path(__file__).with_name("contract.md")
SERIES = {"KDA1": "The call", "KDA2": "The backend", "KDA3": "What tensors hold", "KDA4": "Tuning", "KDA5": "Faults of this library"}
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int32: "int32", torch.int64: "int64"}


def argument_table(arguments: tuple[Argument, ...]) -> str:
    """The tensors of an op as a Markdown table."""
    head = "| argument | shape | dtype | in memory | what it is |\n| --- | --- | --- | --- | --- |\n"
    return head + "\n".join(_row(argument) for argument in arguments) + "\n"


def filled(entry: Entry) -> Entry:
    """The entry with the message and the fix that its example `before` gets, in place of the templates."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            exec(PRELUDE + entry.before, {})
        except KdaError as raised:
            return dataclasses.replace(entry, message=entry.message.format(**raised.details), fix=entry.fix.format(**raised.details))
    raise AssertionError(f"the example of {entry.code} raises nothing")


def error_page(entry: Entry) -> str:
    """The page of an error code, with the message of its example; codes in its last section are links."""
    text, related = filled(entry).as_markdown().rsplit("## Related", 1)
    text = text.replace(f"`{entry.raises}`: ", f"`{entry.raises}`, here as [the example below](#before) raises it: ", 1)
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
    """`markdown` with the table of an op after each ``<!-- arguments of OP -->``, in place of one that stands there."""
    mark = r"(<!-- arguments of (\w+) -->\n\n)(?:\|.*\n)*"
    return re.sub(mark, lambda found: found[1] + argument_table(TABLE[found[2]]), markdown)


def on_files(files: Any, config: Any) -> Any:
    """MkDocs calls this once it knows the files; adds the generated ones."""
    from mkdocs.structure.files import File

    for path, content in generated().items():
        files.append(File.generated(config, path, content=content))
    return files


def _row(argument: Argument) -> str:
    dtypes = f"as `{argument.same_dtype_as}`" if argument.same_dtype_as else ", ".join(SHORT[dtype] for dtype in argument.dtypes)
    if argument.slot_dense:
        memory = "dense but for the first dimension, whose stride is free"
    else:
        memory = "last dimension contiguous" if argument.last_dim_contiguous else "any strides"
    meaning = re.sub(r"([|*])", r"\\\1", argument.meaning) + ("; may be None" if argument.optional else "")
    return f"| `{argument.name}` | `{argument.layout}` | {dtypes} | {memory} | {meaning} |"


if __name__ == "__main__":
    CONTRACT.write_text(with_tables(CONTRACT.read_text()))
