"""The model inside the package, and the pieces of held-out code it is shown and measured on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

EMBEDDED_MODEL = Path(__file__).parent / "embedded_model"


@dataclass(frozen=True)
class Excerpt:
    """A place in a file of CPython's standard library that the model was not trained on.

    file, sha256: of the whole source file; prompt: what precedes the place; continuation: what really follows.
    """

    file: str
    sha256: str
    prompt: str
    continuation: str


@cache
def load_excerpts() -> tuple[Excerpt, ...]:
    """All held-out excerpts, benchmark prompts first."""
    raw = json.loads((EMBEDDED_MODEL / "excerpts.json").read_text(encoding="utf-8"))
    return tuple(Excerpt(**fields) for fields in raw)
