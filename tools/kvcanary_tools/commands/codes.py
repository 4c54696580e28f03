"""`kvcanary codes`: what each check means, what to do when it fires, and where in the source it is judged."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT, json_option

if TYPE_CHECKING:
    from kvcanary.codes import Code

WIDTH = 100
#: How the places are called, by the field of `Code` that names them.
SIDES = {"host": "on the host", "device": "on the device", "observed": "in watched caches"}


@click.command("codes", context_settings=CONTEXT, short_help="What each code means, and where it is judged.")
@click.argument("codes", nargs=-1, metavar="[CODE]...")
@json_option
def command(codes: Sequence[str], as_json: bool) -> None:
    """List the codes of findings in the order in which they speak, or tell all about some of them.

    \b
      kvcanary codes
      kvcanary codes R9
      kvcanary codes r9 T1 --json

    Exit codes: 0 listed, 2 wrong usage.
    """
    chosen = _chosen(codes)
    if as_json:
        console.data_json({"codes": [_as_dict(code) for code in chosen]})
    elif codes:
        for code in chosen:
            _tell(code)
    else:
        width = max(len(code.name) for code in chosen)
        for code in chosen:
            console.data(f"{code.code:<4}{code.name:<{width}}  {code.sentence}")


def _chosen(names: Sequence[str]) -> list[Code]:
    """What these names mean, each once; all without a name. R9 and T1 mean two things."""
    from kvcanary.codes import KINDS

    wanted = [name.upper() for name in names]
    known = {*KINDS, *(code.code for code in KINDS.values())}
    for name, upper in zip(names, wanted, strict=True):
        if upper not in known:
            raise console.UsageFailure(f"CODE must be a code of the canary, got {name!r}", f"one of {' '.join(KINDS)}")
    kinds = [kind for name in wanted or KINDS for kind, code in KINDS.items() if name in (kind, code.code)]
    return [KINDS[kind] for kind in dict.fromkeys(kinds)]


def _as_dict(code: Code) -> dict[str, Any]:
    from kvcanary_tools.advice import ADVICE
    from kvcanary_tools.places import find_place

    return {
        "code": code.code,
        "kind": code.kind,
        "name": code.name,
        "sentence": code.sentence,
        **ADVICE[code.kind]._asdict(),
        **{side: [find_place(place)._asdict() for place in getattr(code, side)] for side in SIDES},
    }


def _tell(code: Code) -> None:
    reported = _as_dict(code)
    console.data(f"{code.code} {code.name}", bold=True)
    console.data(f"  {code.sentence}\n")
    for label, text in (("means", reported["consequence"]), ("to do", reported["remedy"])):
        console.data(
            fill(text, WIDTH, initial_indent=f"  {label:<8}", subsequent_indent=" " * 10, break_on_hyphens=False)
        )
    for side, label in SIDES.items():
        if reported[side]:
            console.data(f"\n  judged {label}")
            for place in reported[side]:
                console.data(f"    {place['path']}:{place['line']}  {place['name']}")
    console.data()
