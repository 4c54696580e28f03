"""The plug-in inside a real vLLM: silent and cheap over 256 requests, then one fault at a time.

    python -m kvcanary_tools.bench.vllm.plugin --out FOLDER [--kind mla] [--drafts eagle] [--graphs none] [--faults]

Needs a GPU and vllm. A Llama of 1.1 B random parameters is written first; requests share prefixes, prompts come in
chunks, and the pool is small enough that requests are preempted. With and without the plug-in in turn, in one process,
in the same order; each side of a pair is as many runs of the 256 requests as take the time asked for, and equal steps
of all of them are compared (`turns`). What was measured is written after every part, so that a run that is cut
short leaves what it had.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from kvcanary_tools.bench.vllm.engine import Bench
from kvcanary_tools.bench.vllm.faults import Faults
from kvcanary_tools.bench.vllm.hooks.floor import floored
from kvcanary_tools.bench.vllm.model import BLOCKS, KINDS, SHAPES
from kvcanary_tools.files import lines_of

GRAPHS = {
    "full": {},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "none": {"enforce_eager": True},
}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the JSON.")
@click.option(
    "--work", type=click.Path(path_type=Path), default=Path("/dev/shm/kvcanary-vllm"), help="Checkpoints go here."
)
@click.option("--size", type=click.Choice(list(SHAPES)), default="1b", help="Parameters of the model.")
@click.option("--kind", type=click.Choice(list(KINDS)), default="dense", help="Of cache.")
@click.option(
    "--drafts",
    type=click.Choice(["eagle", "ngram"]),
    help="EAGLE of random weights, which is nearly always rejected; or n-grams of what was generated, in every step.",
)
@click.option("--runner", type=click.Choice(["v2", "v1"]), default="v2", help="vLLM's model runner.")
@click.option("--graphs", type=click.Choice(list(GRAPHS)), default="full", help="CUDA graphs; none is eager.")
@click.option("--pairs", default=3, help="Interleaved pairs with and without.")
@click.option("--seconds", default=20.0, help="Each side of a pair, at least.")
@click.option("--floor", is_flag=True, help="Hooks that do the least that hooks can, and judge nothing.")
@click.option("--faults", is_flag=True, help="Then the faults, one at a time.")
@click.option("--profile", is_flag=True, help="And where the time goes.")
@click.option("--deadline", type=float, default=240.0, help="Seconds after which no new part begins.")
def command(
    out: Path,
    work: Path,
    size: str,
    kind: str,
    drafts: str | None,
    runner: str,
    graphs: str,
    pairs: int,
    seconds: float,
    floor: bool,
    faults: bool,
    profile: bool,
    deadline: float,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if runner == "v1":  # vLLM takes the other one for this model
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    bench = Bench(work, size, drafts, deadline, kind, **GRAPHS[graphs])
    runner = "v2" if hasattr(bench.runner, "req_states") else "v1"  # whatever was asked for
    result: dict[str, Any] = {"size": size, "kind": kind, "drafts": drafts, "runner": runner, "graphs": graphs}
    result |= machine() | {"attention": bench.attention}
    path = out / f"{name_of(size, kind, drafts, runner, graphs)}{'_floor' * floor}.json"

    def keep(name: str, part: Any) -> None:
        result[name] = part
        path.write_text(lines_of(result) + "\n")

    with floored() if floor else nullcontext():
        for part in bench.compare(pairs, seconds):
            keep("compared", part)
    shown = result["compared"]
    reported = ("throughput_ratio", "ratios", "off_over_off", "by_step", "hooks_us", "waits", "findings", "preemptions")
    print(json.dumps({name: shown.get(name) for name in reported}))
    print([entry["share"] for entry in (*shown["on_off"], *shown["off_off"])], shown.get("largest_gap_where_different"))
    for part in bench.profile(out) if profile and not bench.is_late else ():
        keep("profile", part)
        bench.say(f"profile: {json.dumps(part)[:2500]}")
    for name, found in Faults(bench).each() if faults else ():
        keep("faults", result.get("faults", {}) | {name: found})
        bench.say(f"{name}: {json.dumps(found)[:700]}")  # the last one leaves a broken engine


def name_of(size: str, kind: str, drafts: str | None, runner: str, graphs: str) -> str:
    """Of the file: vllm, and what is not the usual."""
    parts = {
        size: "1b",
        kind: "dense",
        drafts or "": "",
        runner: "v2",
        "eager" if graphs == "none" else graphs: "full",
    }
    return "_".join(("vllm", *(part for part, usual in parts.items() if part != usual)))


def machine() -> dict[str, Any]:
    import torch
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "blocks": BLOCKS}


if __name__ == "__main__":
    command()
