"""`kvcanary doctor`: what is installed, on what machine, and does it work."""

from __future__ import annotations

from typing import Any

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT, json_option


@click.command("doctor", context_settings=CONTEXT, short_help="Check this installation.")
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check this installation: versions, devices, kernels, the embedded model and adapters.

    What is absent but not needed, a GPU or an extra, is "not present" and no error.

    \b
      kvcanary doctor
      kvcanary doctor --json

    Exit codes: 0 everything works, 1 something does not, 2 wrong usage.
    """
    from kvcanary_tools.health import examine

    health = examine()
    if as_json:
        console.data_json(health)
    else:
        for title, values in health.items():
            if isinstance(values, dict):
                console.data("\n".join([title, *_lines(values)]))
        broken = health["broken"]
        console.data("everything works" if not broken else f"broken: {', '.join(broken)}")
    ctx.exit(console.EXIT_FINDING if health["broken"] else console.EXIT_CLEAN)


def _lines(values: dict[str, Any], indent: str = "  ") -> list[str]:
    width = max((len(name) for name in values), default=0)
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name.ljust(width)}  {_shown(value)}")
    return lines


def _shown(value: Any) -> str:
    if value is None:
        return "not present"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return repr(value) if "\n" in str(value) else str(value)
