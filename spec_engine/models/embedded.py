"""The embedded model, of the checkout or of the package kvcanary-embedded, and the held-out code it is measured on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from spec_engine.errors import ConfigError

PACKAGE = "kvcanary_embedded"


def _folder() -> Path:
    """Beside this file, as in a checkout; else where the package is."""
    beside, package = Path(__file__).parent / "embedded_model", find_spec(PACKAGE)
    if beside.is_dir() or package is None or not package.submodule_search_locations:
        return beside
    return Path(package.submodule_search_locations[0])


EMBEDDED_MODEL = _folder()


def embedded_model() -> Path:
    """Its folder; ConfigError where it is not installed."""
    if not EMBEDDED_MODEL.is_dir():
        raise ConfigError(
            "the embedded model is not installed",
            "pip install kvcanary-embedded; generate and serve take --model DIR, too",
        )
    return EMBEDDED_MODEL


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
    raw = json.loads((embedded_model() / "excerpts.json").read_text(encoding="utf-8"))
    return tuple(Excerpt(**fields) for fields in raw)
