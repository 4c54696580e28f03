"""NaN that one layer stores in a captured step of a real vLLM: is the first place named? ``first_nan --kind mla``.

    python -m kvcanary_tools.bench.vllm.first_nan --out FOLDER [--kind mla] [--tries 100]

Needs a GPU and vllm. Before vLLM captures its graphs the store of one layer is wrapped: of the entry that goes to the
slot in a buffer of ours it stores NaN, so that a replay does it when that buffer says so. Each try runs a few requests,
lets one of them store NaN in a step in which all decode, and compares the first finding with what was done.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import click

from kvcanary_tools.bench.vllm.engine import Bench
from kvcanary_tools.bench.vllm.faults import Faults
from kvcanary_tools.bench.vllm.model import KINDS
from kvcanary_tools.bench.vllm.plugin import machine
from kvcanary_tools.files import lines_of

REQUESTS, TOKENS, STEPS = 8, 40, (6, 30)  # of a try, and between which of its steps NaN comes
PLACE = ("layer", "request", "position", "step")
NOWHERE = -1


class Plant:
    """The store of one layer, in which the entry of `target` [1] int64, a slot, becomes NaN."""

    def __init__(self, worker: Any, layer: int) -> None:
        import torch

        context = worker.model_runner.compilation_config.static_forward_context
        attentions = [one for one in context.values() if hasattr(getattr(one, "impl", None), "do_kv_cache_update")]
        self.layer, self.target = layer, torch.full((1,), NOWHERE, dtype=torch.int64, device=worker.device)
        impl = attentions[layer].impl
        place = 0 if hasattr(attentions[layer], "kv_lora_rank") else 1  # of what is stored, among the arguments
        inner = impl.do_kv_cache_update

        def store(*args: Any, **kwargs: Any) -> Any:
            values, slots = args[place].clone(), args[place + 3].flatten()
            is_struck = (slots == self.target).view(-1, *[1] * (values.dim() - 1))
            values[: len(slots)].masked_fill_(is_struck, float("nan"))
            return inner(*args[:place], values, *args[place + 1 :], **kwargs)

        impl.do_kv_cache_update = store


def planted_at_start(layer: int) -> list[Plant]:
    """Where the plant of the next engine will be: it is put in behind the loading, before anything is captured."""
    from vllm.v1.worker.gpu_worker import Worker

    plants: list[Plant] = []
    warm_up = Worker.compile_or_warm_up_model

    def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
        Worker.compile_or_warm_up_model = warm_up
        plants.append(Plant(self, layer))
        return warm_up(self, *args, **kwargs)

    Worker.compile_or_warm_up_model = planted
    return plants


class Tries:
    """Tries in one engine, one after the other."""

    def __init__(self, bench: Bench, plant: Plant) -> None:
        self.bench, self.plant, self.faults = bench, plant, Faults(bench)

    def one(self, seed: int) -> dict[str, Any]:
        """What was done, what was found first, and in which parts of the place they agree."""
        draw, struck = random.Random(seed), dict[str, Any]()
        due, runner = draw.randrange(*STEPS), self.bench.runner
        inner, step = runner.execute_model, 0

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            nonlocal step
            output = args[0] if args else kwargs["scheduler_output"]
            step += output.total_num_scheduled_tokens > 0
            self.plant.target.fill_(NOWHERE)
            if not struck and step >= due and (slot := self._choose(output, draw, struck)) is not None:
                self.plant.target.fill_(slot)
                struck["step"] = step
            return inner(*args, **kwargs)

        runner.execute_model = execute_model
        try:
            with self.bench.watched(mode="log") as handle:
                self.bench.run(self.bench.prompts(REQUESTS, seed), TOKENS)
                findings = handle.canary.log.findings
        finally:
            runner.execute_model = inner
            self.plant.target.fill_(NOWHERE)
        if not findings:
            return {"struck": struck, "found": None, "right": []}
        first = findings[0]
        found = {"layer": first.layer, "request": first.writer, "position": first.position, "step": first.step}
        right = [name for name in PLACE if struck.get(name) == found[name]]
        return {"struck": struck, "found": found | {"code": first.code, "phase": first.site[0]}, "right": right}

    def _choose(self, output: Any, draw: random.Random, struck: dict[str, Any]) -> int | None:
        """The slot of a request's next entry, where all decode and its block is there already."""
        cached, size = output.scheduled_cached_reqs, self.faults.size
        if output.total_num_scheduled_tokens != len(cached.req_ids):
            return None
        going = [own for own in zip(cached.req_ids, cached.num_computed_tokens, strict=True) if own[1] % size]
        if not going:
            return None
        name, position = draw.choice(going)
        states = self.bench.runner.input_batch if self.faults.is_v1 else self.bench.runner.req_states
        row = states.req_id_to_index[name]
        struck.update(layer=self.plant.layer, request=name, position=position)
        return int(self.faults.table()[row, position // size]) * size + position % size


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the JSON.")
@click.option(
    "--work", type=click.Path(path_type=Path), default=Path("/dev/shm/kvcanary-vllm"), help="Checkpoints go here."
)
@click.option("--kind", type=click.Choice(list(KINDS)), default="dense", help="Of cache.")
@click.option("--layer", default=5, help="That stores NaN.")
@click.option("--tries", default=100, help="Each a run of a few requests.")
@click.option("--deadline", type=float, default=240.0, help="Seconds after which no new try begins.")
def command(out: Path, work: Path, kind: str, layer: int, tries: int, deadline: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    plants = planted_at_start(layer)
    bench = Bench(work, "1b", None, deadline, kind)
    [plant] = plants
    graphs = str(bench.runner.compilation_config.cudagraph_mode)
    result: dict[str, Any] = {"kind": kind, "graphs": graphs, **machine(), "attention": bench.attention, "tries": []}
    own = Tries(bench, plant)
    for seed in range(tries):
        result["tries"].append(own.one(seed))
        if bench.is_late:
            break
    result["right"] = {name: sum(name in one["right"] for one in result["tries"]) for name in PLACE}
    result["all_right"] = sum(len(one["right"]) == len(PLACE) for one in result["tries"])
    (out / f"vllm_first_nan_{kind}.json").write_text(lines_of(result) + "\n", encoding="utf-8")
    print(
        f"{kind}: {result['all_right']} of {len(result['tries'])}: {result['right']}, {result['tries'][0]}", flush=True
    )


if __name__ == "__main__":
    command()
