"""`kvcanary probe`: memory and kernels of a suspected device, on known words, for as long as you like."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT

FREE_SHARE = 0.8  # of a GPU's free memory that is taken by default
ON_A_CPU = "64MiB"


@click.command("probe", context_settings=CONTEXT, short_help="Test the memory and kernels of a suspected GPU.")
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="cuda, cuda:1 or cpu; auto: a GPU if there is one.",
)
@click.option("--minutes", type=click.FloatRange(min=0), default=10.0, show_default=True, metavar="N", help="How long.")
@click.option("--memory", metavar="SIZE", help="How much to fill, such as 4GiB; by default 80 % of what is free.")
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSON of a probe of another device of this kind: its kernels must have given the same.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_context
def command(
    ctx: click.Context, device: str, minutes: float, memory: str | None, against: Path | None, as_json: bool
) -> None:
    """Fill free memory with known words, run store, move and attention kernels on known inputs, and compare every bit.

    For a GPU that is drained: run `dcgmi diag -r 3` first where DCGM is installed. A probe that finds nothing is no
    proof: faults that depend on heat or load may need hours.

    \b
      kvcanary probe --minutes 30 --json > node17.json
      kvcanary probe --minutes 30 --against node17.json

    Exit codes: 0 everything was right, 1 something was not, 2 wrong usage.
    """
    import torch

    from kvcanary_tools.fleet.probing import Probed, differences, probe

    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    chosen = _device(name)
    told: Probed | None = None
    for told in probe(chosen, _size(chosen, memory), 60 * minutes):
        console.say(f"round {told.rounds}: {console.numbered(len(told.faults), 'fault')}")
    whole: dict[str, Any] = {} if told is None else asdict(told)
    differ = [] if against is None or told is None else _compared(told, against, differences)
    if as_json:
        console.data_json(whole | {"differ": differ})
    else:
        _tell(whole, differ)
    ctx.exit(console.EXIT_FINDING if whole.get("faults") or differ else console.EXIT_CLEAN)


def _device(name: str) -> Any:
    import torch

    present = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    present += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if name not in present:
        raise console.UsageFailure(f"device {name!r} is not present", f"there is: {', '.join(present)}")
    return torch.device(name)


def _size(device: Any, memory: str | None) -> int:
    import torch

    from kvcanary import CanaryConfigError
    from kvcanary.environment import parse_bytes

    if memory is None and device.type == "cuda":
        return int(FREE_SHARE * torch.cuda.mem_get_info(device)[0])
    try:
        return parse_bytes(memory or ON_A_CPU)
    except CanaryConfigError as error:
        raise console.UsageFailure(f"--memory is a size, got {memory!r}", "such as 512MiB or 4GiB") from error


def _compared(told: Any, against: Path, differences: Any) -> list[str]:
    try:
        return list(differences(told, json.loads(against.read_text(encoding="utf-8"))))
    except (ValueError, KeyError, TypeError) as error:
        raise console.UsageFailure(f"{against} cannot be compared: {error}", "give the --json of a probe") from error


def _tell(told: dict[str, Any], differ: list[str]) -> None:
    where = told["hardware"].get("gpu_uuid", told["hardware"]["hostname"])
    rounds, size = console.numbered(told["rounds"], "round"), console.size(told["bytes"])
    console.data(f"{where}: {told['device']}, {rounds} over {size}")
    for fault in told["faults"]:
        console.data("  wrong: " + ", ".join(f"{name} {value}" for name, value in fault.items()))
    for name in differ:
        console.data(f"  {name} gives other bits than the device compared with")
    if not told["faults"] and not differ:
        console.data("  every answer was right")
