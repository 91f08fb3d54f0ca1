"""The shape of one catalogue entry, and its renderings."""

from __future__ import annotations

import dataclasses
from typing import Any

PRELUDE = "import torch\nimport kdaserve\nfrom kdaserve.testing import decode_inputs, prefill_inputs\n"
"""What the examples of every entry assume; the tests run them with it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Everything the library says about one error code.

    The exception's text, ``kdaserve explain``, its ``--json`` form and the documentation are all made from this one
    object. `message` and `fix` are `str.format` templates, filled with the details given where the error is raised.
    """

    code: str
    title: str
    raises: str
    """Name of the exception class in `kdaserve.errors`."""
    message: str
    fix: str
    meaning: str
    trigger: str
    situations: tuple[str, ...]
    solutions: tuple[str, ...]
    before: str
    """Code that raises this error; runs after `PRELUDE`."""
    after: str
    """The same code, mended; runs after `PRELUDE` without an error."""
    validation: str
    """A snippet that finds the mistake before the call does."""
    guard: str
    """Name of the predicate in `kdaserve.guards` that finds the mistake of `before`."""
    prevention: tuple[str, ...]
    related: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, ready for ``json.dumps``."""
        fields = dataclasses.asdict(self)
        example = {"prelude": PRELUDE, "before": fields.pop("before"), "after": fields.pop("after")}
        defence = {"validation": fields.pop("validation"), "guard": f"kdaserve.guards.{fields.pop('guard')}"}
        return {**fields, "example": example, "defence": defence}

    def as_markdown(self) -> str:
        """The entry as a page: what ``kdaserve explain`` prints and the documentation shows."""

        def bullets(lines: tuple[str, ...]) -> str:
            return "\n".join(f"- {line}" for line in lines)

        def code(text: str) -> str:
            return f"```python\n{text.strip()}\n```"

        sections = (
            (None, f"# {self.code}: {self.title}"),
            (None, f"`{self.raises}`: {self.message}"),
            (None, f"Fix: {self.fix}"),
            ("Meaning", self.meaning),
            ("When it is raised", self.trigger),
            ("Common situations", bullets(self.situations)),
            ("What to do", bullets(self.solutions)),
            ("Before", code(PRELUDE + "\n" + self.before)),
            ("After", code(PRELUDE + "\n" + self.after)),
            ("Check for it", code(self.validation)),
            ("Guard", f"`kdaserve.guards.{self.guard}`"),
            ("Prevention", bullets(self.prevention)),
            ("Related", ", ".join(self.related)),
        )
        return "\n\n".join(text if head is None else f"## {head}\n\n{text}" for head, text in sections) + "\n"
