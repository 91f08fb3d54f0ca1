"""Running a command in the tests."""

from __future__ import annotations

import unicodedata

from typer.testing import CliRunner, Result

from kdaserve.cli import app


def run(*arguments: object, code: int = 0) -> Result:
    """A command that exits with `code`, by itself and not by a traceback, and prints no control characters."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, (SystemExit, type(None))), f"{result.exception!r}"
    assert result.exit_code == code, result.output
    assert_plain(result.stdout)
    assert_plain(result.stderr)
    return result


def assert_plain(text: str) -> None:
    controls = {character for character in text if unicodedata.category(character) == "Cc"} - {"\n"}
    assert not controls, f"control characters {controls} in {text[:200]!r}"
