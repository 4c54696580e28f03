"""What the canary costs a captured step with drafts: ``python -m kvcanary_tools.bench.gpu.drafted_step``.

Random weights of Llama-3-8B's shape, or with ``--model Qwen3.5-9B`` of that hybrid's, in bf16, and an EAGLE head of the
same widths, both made on the device, so that hardly a draft is accepted; trees and chains, requests of 4,096 tokens,
overlap schedule. Engines without a canary, with ``content=write`` and with the default rolling check take turns, some
rounds of steps each, and are made anew until each has had every place in the device's memory; a step is timed from the
host. All as in `kvcanary_tools.bench.gpu.step`.
A draft substep lasts from where the index arrays of a draft forward are built to where those of the next forward are,
the target's behind the last: with the selection that follows it. Stamps that the captured graphs hold time it, in every
engine alike, in rounds of their own; what the canary adds is the difference of two medians of one round.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch

from kvcanary_tools.bench.common import Rounds, added, machine, mean_over, progress, reported, save, settled, spread
from kvcanary_tools.bench.gpu import step
from kvcanary_tools.bench.gpu.device import device, in_orders
from kvcanary_tools.bench.gpu.fitting import fit
from kvcanary_tools.bench.gpu.stamps import stamp
from spec_engine import Engine
from spec_engine.graphs.forward import StaticForward
from spec_engine.models.decoder import Decoder
from spec_engine.models.eagle import Eagle

DRAFTS: dict[str, dict[str, Any]] = {
    "tree": {"topk": 4, "num_steps": 5, "num_draft_tokens": 16},
    "chain": {"topk": 1, "num_steps": 3},
}
CASES = (("tree", 1), ("tree", 16), ("chain", 1), ("chain", 16), ("chain", 64))  # drafts, requests
ROUNDS = {1: 5, 16: 4, 64: 5}  # in each place, by requests
FEW, MANY = ("off", "write", "rolling"), ("off", "rolling")  # of the canaries, by requests: their pools fit together
MOST_FEW = 16
RESERVE = 12 * step.PAGE_SIZE  # slots of a request for its branches, and for pages in quarantine
SUBSTEP_STEPS = 16  # of a round in which substeps are timed
#: Records, by the model.
NAMES = {"Llama-3-8B": "gpu_drafted_step", "Qwen3.5-9B": "gpu_drafted_step_hybrid"}


def main(cases: Sequence[tuple[str, int]] = CASES, places: int | None = None, name: str = "Llama-3-8B") -> None:
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.gpu.drafted_step measures a CUDA device, and there is none here")
    model = step.random_decoder(step.MODELS[name][1])
    head, rows = random_head(model), []
    for drafts, size in cases:
        rows.append(measure(drafts, size, model, head, ROUNDS[size], places))
        tell(rows[-1])
        result = {
            "what": f"milliseconds of a step with drafts, {step.PROMPT_LEN} tokens a request, {name}'s shape and "
            "an EAGLE head, bf16, overlap; canary on / off",
            "machine": machine() | device(),
            "drafts": DRAFTS,
            "steps": step.STEPS,
            "rows": rows,
        }
        save(NAMES[name], result)


def tell(row: dict) -> None:
    print(f"{row['drafts']} x {row['batch']}: off {row['off_ms']:.3f} ms{reported(row['over_off'])}")
    added = "".join(
        f"   {name} {us['median']:+.2f} us ({us['min']:+.2f} to {us['max']:+.2f})"
        for name, us in row["substep_added_us"].items()
    )
    print(f"    a draft substep: off {row['substep_us']['off']:.1f} us{added}", flush=True)


def random_head(model: Decoder) -> Eagle:
    """One layer of attention of the model's own widths, on its device."""
    return step.drawn(lambda: Eagle(replace(model.config, num_layers=1), model), model.embed_weight.device.type)


def measure(
    drafts: str, size: int, model: Decoder, head: Eagle, rounds: int, places: int | None = None, **settings: Any
) -> dict:
    """A row of the table; ``settings``: of the engines, beside those of DRAFTS. ``places``: None: one an engine."""
    names = FEW if size <= MOST_FEW else MANY
    places = min(places or len(names), len(names))
    nodes = int(DRAFTS[drafts].get("num_draft_tokens", DRAFTS[drafts]["num_steps"] + 1))
    fits = fit(size, len(names), slots_of(2 * rounds), model, nodes=nodes)
    size = fits.requests
    orders = in_orders(names, places, lambda own: _one_order(drafts, size, model, head, own, rounds, settings))
    seconds, substeps = (mean_over([own[part] for own in orders]) for part in range(2))
    _, _, accepted_length, certificates = orders[-1]
    return {
        "drafts": drafts,
        "batch": size,
        **fits.as_dict(),
        "rounds": rounds,
        "places": places,
        "tokens_a_step": round(accepted_length, 3),
        "off_ms": round(1e3 * median(seconds["off"]), 4),
        "over_off": {name: spread(seconds[name], seconds["off"]) for name in names[1:]},
        "substep_us": {name: round(1e6 * median(substeps[name]), 2) for name in names},
        "substep_added_us": {name: added(substeps[name], substeps["off"]) for name in names[1:]},
        "certificates": {name: certificates[name] for name in names[1:]},
    }


def _one_order(
    drafts: str, size: int, model: Decoder, head: Eagle, names: Sequence[str], rounds: int, settings: dict[str, Any]
) -> tuple[Rounds, Rounds, float, dict[str, dict]]:
    """Of engines made in this order: seconds of a step and of a substep by round, accepted length, certificates."""
    marks = {name: Marks() for name in names}
    engines = {}
    for name in names:
        progress(f"{drafts} x {size}: prompts, canary {name}")
        with marks[name].placed():
            engines[name] = _engine(name, size, model, head, rounds, DRAFTS[drafts] | settings)
    progress(f"{drafts} x {size}: {rounds} rounds of {step.STEPS} steps")
    seconds, substeps = ({name: [] for name in names} for _ in range(2))
    with settled():
        for number in range(rounds):
            for name in names if number % 2 else reversed(names):
                seconds[name].append(step.timed(engines[name]))
                substeps[name].append(_substep(engines[name], marks[name]))
    certificates = {name: engine.canary.certificate() for name, engine in engines.items() if engine.canary is not None}
    return seconds, substeps, engines["off"].metrics.accepted_length, certificates


def _engine(name: str, size: int, model: Decoder, head: Eagle, rounds: int, settings: dict[str, Any]) -> Engine:
    """Every request in decode, with room for as many accepted drafts as there are steps."""
    room = 2 * rounds
    tokens = size * slots_of(room)
    engine = step.make_engine(size, model, step.CANARIES[name], room, head, max_total_tokens=tokens, **settings)
    step.fill(engine, size, room)
    return engine


def slots_of(rounds: int) -> int:
    """That a request with drafts has in a pool."""
    return step.PROMPT_LEN + step.new_tokens(rounds) + RESERVE


def _substep(engine: Engine, marks: Marks) -> float:
    """Seconds of a draft substep, in the median step."""
    found = []
    for _ in range(SUBSTEP_STEPS):
        with marks.placed():
            engine.step()
        torch.cuda.synchronize()
        found.append(mean(marks.seconds()))
    return median(found)


class Marks:
    """Where the draft forwards of a captured step begin, and the target's behind them."""

    def __init__(self) -> None:
        # nanoseconds by kind and index of the forward, in the order of a step: a number, or [1] int64 on the device
        self._marks: dict[tuple[str, int], int | torch.Tensor] = {}

    @contextmanager
    def placed(self) -> Iterator[None]:
        """In programs that are made within: on a CPU in those that run within."""
        read = StaticForward.read

        def marked(forward: StaticForward, table: torch.Tensor, *rest: Any) -> None:
            if forward.kind in ("draft", "verify"):
                self._mark((forward.kind, forward.index), table)
            read(forward, table, *rest)

        StaticForward.read = marked  # type: ignore[method-assign]
        try:
            yield
        finally:
            StaticForward.read = read  # type: ignore[method-assign]

    def seconds(self) -> list[float]:
        """From mark to mark of the last step, which is over."""
        return [(int(other) - int(one)) / 1e9 for one, other in pairwise(self._marks.values())]

    def _mark(self, which: tuple[str, int], table: torch.Tensor) -> None:
        if not table.is_cuda:
            self._marks[which] = time.perf_counter_ns()
            return
        if which not in self._marks:  # a program runs once before it is captured
            self._marks[which] = table.new_zeros(1)
        stamp(self._marks[which])


def case(text: str) -> tuple[str, int]:
    drafts, _, size = text.partition("x")
    return drafts, int(size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=case, action="append", help="DRAFTSxREQUESTS, such as treex16")
    parser.add_argument("--places", type=int, choices=(1, 2, 3), help="orders of engines; by default one for each")
    parser.add_argument("--model", choices=NAMES, default="Llama-3-8B", help="whose shape; by default Llama-3-8B's")
    arguments = parser.parse_args()
    main(arguments.case or CASES, arguments.places, arguments.model)
