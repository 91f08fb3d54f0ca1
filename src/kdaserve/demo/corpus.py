"""The text of the demo model: the reference topics that come with Python, split so that no paragraph is on both sides."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

HELD_OUT, VALIDATION = 0.05, 0.03
"""At least this share of every topic of several paragraphs: its end, for the figure on the model card; and what comes before, to stop by."""


class Corpus(NamedTuple):
    """Contiguous pieces of text; a topic gives at most one to each part."""

    train: tuple[bytes, ...]
    validation: tuple[bytes, ...]
    held_out: tuple[bytes, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of all parts; Python versions differ in their topics."""
        return hashlib.sha256(b"\0".join(b"\1".join(part) for part in self)).hexdigest()


def load_corpus() -> Corpus:
    """The topics of the running Python.

    Topics repeat whole sections of each other. Every paragraph is therefore kept once only, before the text is split, or the held-out part
    would have been trained on.
    """
    from pydoc_data.topics import topics

    train: list[bytes] = []
    validation: list[bytes] = []
    held_out: list[bytes] = []
    seen: set[str] = set()
    for name in sorted(topics):
        paragraphs = []
        for paragraph in topics[name].strip().split("\n\n"):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                paragraphs.append(paragraph)
        text = "\n\n".join(paragraphs)
        last = _paragraph_at(text, 1 - HELD_OUT)
        first = _paragraph_at(text[:last], 1 - VALIDATION)
        for part, piece in ((train, text[:first]), (validation, text[first:last]), (held_out, text[last:])):
            if piece.strip():
                part.append(piece.encode())
    return Corpus(tuple(train), tuple(validation), tuple(held_out))


def _paragraph_at(text: str, share: float) -> int:
    """Where the paragraph starts that holds this share of the text; the end of a text of one paragraph."""
    gap = text.rfind("\n\n", 0, int(len(text) * share))
    return len(text) if gap < 0 else gap + 2
