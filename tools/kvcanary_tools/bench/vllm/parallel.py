"""The plug-in in two vLLM workers that share a model (tensor parallel): told once, and each finding names its ranks.

    KVCANARY_MODE=log python -m kvcanary_tools.bench.vllm.parallel --out FOLDER

Needs two GPUs and vllm. First requests without harm, then one bit of a cached block is flipped in the second worker,
then one in both; the request that finds the block must see it. Writes vllm_parallel.json.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvcanary_tools.bench.vllm.model import SHAPE, make_prompts, write_model

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
    cache = context[group.layers[0].names[layer]].kv_cache
    block, offset = divmod(slot, group.block_size)
    with torch.inference_mode():
        cache.view(torch.uint8)[block, 0, offset, -1] ^= 1
    return slot


class Bench:
    """One vLLM over two GPUs, with the plug-in from its entry point."""

    def __init__(self, work: Path, ranks: int) -> None:
        model = write_model(work / "model", SHAPE)
        from vllm import LLM, SamplingParams

        self.sampling = SamplingParams
        self.llm = LLM(
            model=str(model), skip_tokenizer_init=True, enable_prefix_caching=True, max_model_len=2048,
            max_num_seqs=64, max_num_batched_tokens=2048, num_gpu_blocks_override=2000, gpu_memory_utilization=0.3,
            tensor_parallel_size=ranks, disable_custom_all_reduce=True, seed=0,
        )  # fmt: skip

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        params = self.sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - start

    def report(self) -> dict[str, Any]:
        from kvcanary.adapters.hosted.ranks import merged

        made = merged(self.llm.collective_rpc("kvcanary_report"))
        kept = ("code", "reader", "position", "slot", "layer", "part", "bit", "ranks")
        made["findings"] = [{name: finding[name] for name in kept} for finding in made["findings"]]
        made["workers"] = [
            {name: worker[name] for name in ("rank", "armed", "forwards", "slots_checked", "bytes_checked")}
            for worker in made["workers"]
        ]
        return made

    def struck(self, ranks: Sequence[int], seed: int) -> dict[str, Any]:
        """A prompt is computed, a bit of it flipped, and asked again."""
        [prompt] = make_prompts(1, seed)
        self.run([prompt], 4)
        slots = self.llm.collective_rpc(functools.partial(strike, ranks=ranks))
        before = self.report()["findings"]
        self.run([prompt], 4)
        found = [finding for finding in self.report()["findings"] if finding not in before]
        return {"struck": ranks, "slots": slots, "found": found}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the JSON.")
@click.option(
    "--work", type=click.Path(path_type=Path), default=Path("/dev/shm/kvcanary-vllm"), help="The checkpoint goes here."
)
@click.option("--ranks", default=2, help="GPUs.")
def command(out: Path, work: Path, ranks: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `strike` is sent to the workers
    bench = Bench(work, ranks)
    seconds = bench.run(make_prompts(64), 128)
    result: dict[str, Any] = {"ranks": ranks, "run_s": seconds, "clean": bench.report()}
    for seed, (name, struck) in enumerate((("one", [ranks - 1]), ("all", list(range(ranks)))), 20):
        result[name] = bench.struck(struck, seed)
        (out / "vllm_parallel.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    command()
