"""`kvcanary doctor`: what is installed, on what machine, and does it work."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT, json_option

if TYPE_CHECKING:
    from kvcanary_tools.health import Examined


@click.command("doctor", context_settings=CONTEXT, short_help="Check this installation.")
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check this installation: settings, versions, devices, kernels, the embedded model, and each engine found.

    What is absent but not needed, a GPU or an extra, is "not present" and no error. The last line has the verdict.

    \b
      kvcanary doctor
      kvcanary doctor --json

    Exit codes: 0 everything works, 1 something does not, 2 wrong usage.
    """
    from kvcanary_tools.health import sections

    console.log_to_stderr(logging.CRITICAL)  # a release that was not tested has its line here
    told, problems = {}, []
    for title, examine in sections().items():
        if not as_json:
            console.data(title, newline=False)  # at once: an engine may take half a minute
        examined = examine()
        told[title] = examined.values
        problems += [examined.problem] if examined.problem else []
        if not as_json:
            console.data(_shown(examined))
    if as_json:
        console.data_json({**told, "problems": problems})
    else:
        console.data(_verdict(problems))
    ctx.exit(console.EXIT_FINDING if problems else console.EXIT_CLEAN)


def _verdict(problems: list[str]) -> str:
    if not problems:
        return "everything works"
    return "\n".join([f"{console.numbered(len(problems), 'problem')}:", *(f"  {problem}" for problem in problems)])


def _shown(examined: Examined) -> str:
    """What stands behind a title, and the lines below it."""
    values = examined.values
    if values is None:
        return ": not present"
    if not values:
        return ": none"
    if "standing" in values:
        return f": {_engine(values)}"
    return "\n".join(["", *_lines({name: value for name, value in values.items() if name != "shards"})])


def _engine(found: dict[str, Any]) -> str:
    """The verdict line of one engine, and what would not be checked there, with the reason."""
    version, standing, tested = found["version"] or "version unknown", found["standing"], found["tested"]
    if found["refused"]:
        more = f" (and {len(found['refused']) - 1} more, with --json)" if found["refused"][1:] else ""
        return f"{version}, refused: {found['refused'][0]}{more}"
    known = "" if standing == "supported" else f" ({tested[0]} to {tested[-1]}); names and signatures are as they were"
    gone = [f"  not watched  {path}: {names}" for path, names in found["not_watched"].items()]
    inactive = [f"  inactive     {', '.join(codes)}: {reason}" for reason, codes in found["inactive"].items()]
    return "\n".join([f"{version}, {standing}{known}", *gone, *inactive])


def _lines(values: dict[str, Any]) -> list[str]:
    width = max((len(name) for name in values), default=0)
    return [f"  {name.ljust(width)}  {_text(value)}" for name, value in values.items()]


def _text(value: Any) -> str:
    if value is None:
        return "not present"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(str, value))
    return repr(value) if "\n" in str(value) else str(value)
