"""The templates, with one style and one script for every page, which stand in the page itself."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection
from functools import cache
from importlib.resources import files

from jinja2 import BaseLoader, ChoiceLoader, DictLoader, Environment, StrictUndefined
from markupsafe import Markup

CODE = re.compile(r"\b([A-Z]\d{1,2})\b")
SHARED = ("style.css", "copy.js", "parts.html.j2")


def environment(loader: BaseLoader | None = None) -> Environment:
    """Everything is escaped but our own style and script; `loader` has the templates of a page, `SHARED` are there."""
    shared = DictLoader({name: text(name) for name in SHARED})
    made = Environment(
        loader=ChoiceLoader([shared, loader] if loader else [shared]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["capitalize_first"] = lambda words: words[:1].upper() + words[1:]
    made.filters["linked"] = linked
    made.globals |= {"style": Markup(text("style.css")), "script": Markup(text("copy.js"))}
    return made


def linked(text: str, codes: Collection[str]) -> Markup:
    """The text, escaped, with every code that the page explains as a link to its meaning."""
    parts = CODE.split(text)
    return Markup("").join(
        Markup('<a href="#code-{0}">{0}</a>').format(part) if part in codes else part for part in parts
    )


def source_of_script() -> str:
    """What a Content-Security-Policy names this script by, so that no other one runs."""
    digest = base64.b64encode(hashlib.sha256(text("copy.js").encode()).digest()).decode()
    return f"'sha256-{digest}'"


@cache
def text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
