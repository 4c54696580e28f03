"""States inside a real vLLM, on a CPU or a GPU: ``python -m kvcanary_tools.bench.vllm.hybrids gdn --out FILE``.

With the prefix cache (mode `align`) or without it (`none`), with drafts or without: the same requests with and without
the plug-in, with hits and preemption. Then one planted fault after the other under a canary that logs, and the first
once more under one that raises.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click

from kvcanary_tools.bench.vllm.cpu import BUDGET, ENVIRONMENT, REQUESTS, TOKENS, CpuBench, interpret, machine, told
from kvcanary_tools.bench.vllm.engine import N_GRAMS, draft_always
from kvcanary_tools.bench.vllm.hybrids.harms import CACHED_DRAFT_HARMS, HARMS, OWN_DRAFT_HARMS, DraftHarms, Harms
from kvcanary_tools.bench.vllm.hybrids.models import draft_alike, randomise, write_hybrid
from kvcanary_tools.bench.vllm.loads.restart import device_name
from kvcanary_tools.bench.vllm.model import Prompts, make_prompts

BLOCKS = {"gdn": 44, "mamba2": 20}  # so few that requests are preempted
ON_GPU = 3, 128  # as many times more, as blocks are larger there, and tokens of a step
KIND = Prompts(prefixes=3, prefix_tokens=150, shortest=60, longest=200, vocabulary=512)
KEPT = ("code", "pool", "entry", "reader", "writer", "layers", "expected", "found", "history", "sentence")
MTP = {"method": "mtp", "num_speculative_tokens": 2}
REPORTED = ("forwards", "states_checked", "slots_checked", "fired", "unchecked", "not_watched", "watched")


RUNNER_V2 = "VLLM_USE_V2_MODEL_RUNNER"
FEW = 4  # requests, where kernels of Triton are interpreted
AFTERWARDS = 3  # steps that a fault is followed for once it was found


class HybridBench(CpuBench):
    """A hybrid in a vLLM of its own."""

    def __init__(self, folder: Path, kind: str, **engine: Any) -> None:
        model = write_hybrid(folder / "model", kind)
        times, budget = ON_GPU if has_gpu() else (1, BUDGET)
        own = {"load_format": "dummy", "block_size": None, "num_gpu_blocks_override": times * BLOCKS[kind]}
        own |= {"max_num_batched_tokens": budget, "additional_config": {"gdn_prefill_backend": "triton"}}
        own["mamba_ssm_cache_dtype"] = "float32"  # as CPUs with AVX-512 have it, whatever they are asked for
        if engine.get("enable_prefix_caching"):
            own["mamba_cache_mode"] = "align"  # and not `all`, as Mamba 2 may have it
        super().__init__(folder, model, **own | engine)
        randomise(self.runner.model)
        if engine.get("speculative_config") == MTP:
            draft_alike(self.runner.model, (getattr(self.runner, "drafter", None) or self.runner.speculator).model)

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        return make_prompts(count, seed, KIND)


def clean(bench: HybridBench, requests: int) -> dict[str, Any]:
    """The same requests with the plug-in, twice so that prefixes are hit, and without it."""
    prompts = bench.prompts(requests, seed=3) * 2
    with told(bench) as counts:
        watched = [list(output.token_ids) for output in bench.run(prompts, TOKENS)[0]]
    report = bench.worker.kvcanary.report()
    bench.worker.kvcanary.detach()
    bare = [list(output.token_ids) for output in bench.run(prompts, TOKENS)[0]]
    own = {name: report[name] for name in REPORTED} | {"findings": len(report["findings"])}
    return own | {"equal_tokens": watched == bare, "distinct": len({t for each in bare for t in each}), **counts}


def attempt(bench: HybridBench, harms: Harms, name: str, mode: str = "log") -> dict[str, Any]:
    """One fault: what was found first, and in mode raise how many tokens left from the step of the blow on."""
    import torch

    from kvcanary import KVCorruptionError

    for state in harms.states:  # of Mamba 2, kernels for CPUs take along NaN that a fault before has left
        for part in state:
            part.zero_()
    given, struck = dict[str, int](), dict[str, Any]()
    number, first, left = 0, None, None  # step; in which the first was found; tokens that left after the blow

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += bool(scheduler_output.total_num_scheduled_tokens)
        with torch.inference_mode():
            if not struck and getattr(harms, name)(scheduler_output, number):
                struck.update(step=number, request=harms.touched, block=harms.block, tokens=sum(given.values()))
        return inner(scheduler_output, *args, **kwargs)

    with bench.watched(mode=mode, content="full") as handle:
        inner, bench.runner.execute_model = bench.runner.execute_model, execute_model
        try:
            for tokens in bench.steps():
                given.update(tokens)
                if first is None and handle.canary.log.findings:
                    first = number
                if first is not None and number == first + AFTERWARDS:
                    break
        except KVCorruptionError:
            left = sum(given.values()) - struck["tokens"]
        finally:
            bench.runner.execute_model = inner
            harms.repair()
        log = handle.canary.log.findings
    own = {key: getattr(log[0], key) for key in KEPT} | {"cause": log[0].causes[0].text} if log else None
    codes = sorted({found.code for found in log})
    return {"struck": struck, "found_in": first, "found": own, "codes": codes, "left": left}


def every_second_time(bench: HybridBench) -> dict[str, Any]:
    """Drafts that are not proposed in each step: right traffic, which vllm#39273 answers wrongly before 0.32."""
    from kvcanary import KVCorruptionError

    if not has_gpu():
        accept_any_index()
    given, found = dict[str, int](), None
    with bench.watched(mode="raise", content="full") as handle, told(bench) as counts:
        DraftHarms(bench).propose_every_second_time()
        try:
            for tokens in bench.steps():
                given.update(tokens)
        except KVCorruptionError as error:
            first = error.findings[0]
            found = {key: getattr(first, key) for key in KEPT} | {"cause": first.causes[0].text}
        checked = handle.report()["states_checked"]
    return {"tokens": sum(given.values()), "states_checked": checked, "found": found, **counts}


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def fails_with_few_drafts() -> bool:
    """Whether kernels of 0.32 fail here where one row of several has fewer tokens than it had accepted before."""
    import torch

    return not has_gpu() and not torch.cpu._is_amx_tile_supported()


def accept_any_index() -> None:
    """Kernels for CPUs before 0.32 refuse the column of a table as an index; they are given a copy of it."""
    import torch
    from vllm import _custom_ops as ops

    kernel = ops.fused_sigmoid_gating_delta_rule_update_cpu

    def dense(value: Any) -> Any:
        is_column = isinstance(value, torch.Tensor) and value.dim() == 1 and value.stride(0) != 1
        return value.new_empty(value.shape).copy_(value) if is_column else value

    ops.fused_sigmoid_gating_delta_rule_update_cpu = lambda **given: kernel(**{n: dense(v) for n, v in given.items()})


@click.command()
@click.argument("kind", type=click.Choice(list(BLOCKS)))
@click.option("--no-cache", is_flag=True, help="Without the prefix cache: mode none of states; faults with --drafts.")
@click.option("--drafts", is_flag=True, help="Drafts of two tokens, found in the prompt.")
@click.option("--mtp", is_flag=True, help="With --drafts: by a layer of the model's own, of gdn.")
@click.option(
    "--always", is_flag=True, help="With --drafts: in every step, which alone is right before 0.32 (vllm#39273)."
)
@click.option(
    "--sparse", is_flag=True, help="With --drafts: steps without any between, which is vllm#39273 before 0.32."
)
@click.option("--requests", type=int, default=REQUESTS, show_default=True, help="Asked twice, without a fault.")
@click.option("--runner", type=click.Choice(["v1", "v2"]), default="v1", help="V2 without faults.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where the JSON goes.")
def command(
    kind: str, no_cache: bool, drafts: bool, mtp: bool, always: bool, sparse: bool, requests: int, runner: str,
    out: Path,
) -> None:  # fmt: skip
    """Run everything over one hybrid in one vLLM."""
    os.environ.update(ENVIRONMENT)
    for name, is_given, what in ("sparse", sparse, "leaves out"), ("always", always, "adds"), ("mtp", mtp, "makes"):
        if is_given and not drafts:
            raise click.UsageError(f"--{name} {what} drafts, and there are none: give --drafts too")
    if mtp and (kind != "gdn" or sparse or always):
        raise click.UsageError(
            "--mtp is of gdn, which has a layer that drafts, and in every step: leave out the others"
        )
    engine = {"speculative_config": MTP if mtp else N_GRAMS} if drafts else {}
    is_slow = not has_gpu() and (runner == "v2" or (drafts and not no_cache))  # copies of the latter are kernels
    if is_slow:
        interpret("kvcanary_tools.bench.vllm.hybrids")
    os.environ[RUNNER_V2] = str(int(runner == "v2"))
    with tempfile.TemporaryDirectory() as folder:
        bench = HybridBench(Path(folder), kind, enable_prefix_caching=not no_cache, **engine)
        record = {"kind": kind, "machine": machine() | {"device": device_name()}, "runner": runner}
        if always or (engine.get("speculative_config") == N_GRAMS and fails_with_few_drafts()):
            draft_always(bench.runner)
        if sparse:
            record["sparse"] = every_second_time(bench)
        else:
            record["clean"] = clean(bench, min(requests, FEW) if is_slow else requests)
        if not sparse and runner == "v1" and (drafts or not no_cache) and not record["clean"]["not_watched"]:
            every = OWN_DRAFT_HARMS if no_cache else CACHED_DRAFT_HARMS
            of_drafts = [name for name in every if not (always or mtp) or name != "no_drafts_no_column"]
            made, names = (DraftHarms, of_drafts) if drafts else (Harms, HARMS)
            record["faults"] = {name: attempt(bench, made(bench), name) for name in names}
            record["raise"] = attempt(bench, made(bench), names[0], mode="raise")  # this engine answers nothing more
    out.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command()
