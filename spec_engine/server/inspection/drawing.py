"""The live page, and the part of it that shows incidents; both out of templates that escape every value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from spec_engine.html.incident import incident
from spec_engine.html.templates import environment

MOST_SHOWN = 16  # incidents, the newest first


def templates() -> Environment:
    """Those of this server, with the page's own style and script."""
    made, folder = environment(PackageLoader("spec_engine.server")), files("spec_engine.server") / "templates"
    made.globals["own_style"] = Markup((folder / "canary.css").read_text(encoding="utf-8"))
    made.globals["own_script"] = Markup((folder / "canary.js").read_text(encoding="utf-8"))
    return made


def incidents(found: Sequence[Mapping[str, Any]], url: str) -> dict[str, Any]:
    """What `report.html` shows of these, whole findings in the order in which they were found.

    url: of this server, where `kvcanary explain` reads what was recorded by now
    """
    numbered = list(enumerate(found))[-MOST_SHOWN:][::-1]
    meanings = {one["code"]: {"code": one["code"], "name": one["name"], "sentence": one["sentence"]} for one in found}
    return {
        "stories": [incident(one, commands=[_explain(url, number + 1)]) for number, one in numbered],
        "codes": [code | {"consequence": "", "found": True} for code in meanings.values()],
    }


def _explain(url: str, number: int) -> dict[str, str]:
    purpose = "explains it from what the server has recorded by now; the API key goes into KVCANARY_API_KEY"
    return {"command": f"kvcanary explain {url} --finding {number}", "purpose": purpose}
