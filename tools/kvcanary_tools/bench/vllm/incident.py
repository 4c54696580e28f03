"""`python -m kvcanary_tools.bench.vllm.incident MODEL DIR`: a real vLLM, and the dump that a finding in it leaves.

Request 'first' has ended and 'late' has its blocks; then an entry of 'late' gets the bytes of one of 'beside', in every
layer. MODEL is a folder with a checkpoint, the smaller the better.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import torch

BLOCK, BLOCKS, LONGEST = 32, 6, 160
TARGET, SOURCE = ("late", 18), ("beside", 6)
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.argument("folder", type=click.Path(path_type=Path))
def command(model: str, folder: Path) -> None:
    os.environ |= SETTINGS | {"KVCANARY_MODE": "raise", "KVCANARY_CONTENT": "full", "KVCANARY_DUMP": str(folder)}
    from kvcanary import KVCorruptionError
    from kvcanary.adapters import vllm as plugin

    plugin.register()
    from vllm import LLM

    llm = LLM(
        model=model, skip_tokenizer_init=True, max_model_len=LONGEST, enforce_eager=True, block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS, seed=0,
    )  # fmt: skip
    try:
        serve(llm.llm_engine)
    except KVCorruptionError as error:
        click.echo("" if error.report is None else error.report.dump)


def serve(engine: Any) -> None:
    """Until the finding; 64 steps at most."""
    canary = engine.model_executor.driver_worker.worker.kvcanary.canary
    ask(engine, "first", 40, 3)
    ask(engine, "beside", 18, 30)
    for step in range(64):
        ended = [output.request_id for output in engine.step() if output.finished]
        if any(name.startswith("first") for name in ended):
            ask(engine, "late", 44, 20)
        if step == 8:
            with torch.inference_mode():
                copy_entry(canary, SOURCE, TARGET)


def ask(engine: Any, name: str, length: int, tokens: int) -> None:
    from vllm import SamplingParams

    prompt = [(7 * n + len(name)) % 97 + 3 for n in range(length)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine.add_request(name, {"prompt_token_ids": prompt}, params)


def copy_entry(canary: Any, source: tuple[str, int], target: tuple[str, int]) -> None:
    """The bytes of an entry into that of another request, in every layer."""
    src, dst = slot_of(canary, *source), slot_of(canary, *target)
    for layers in canary.groups[0].layers:
        for layer in range(len(layers.names)):
            layers.rows.scatter_layer(layer, dst, layers.rows.gather_layer(layer, src))


def slot_of(canary: Any, name: str, position: int) -> torch.Tensor:
    """[1] int64, along the row's block table as its last forward read it; vLLM may add to a request's name."""
    own = next(known for known in reversed(canary.writers.values()) if known.startswith(name))
    size = canary.groups[0].block_size
    block = int(canary.kept[0][canary.recent.number_of(own), position // size])
    return torch.tensor([block * size + position % size], device=canary.memory.device)


if __name__ == "__main__":
    command()
