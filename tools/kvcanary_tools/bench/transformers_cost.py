"""What the canary costs inside transformers' generate: ``python -m kvcanary_tools.bench.transformers_cost``.

A Llama of 99.5 M random parameters in bfloat16, batch 4, 512 + 64 tokens, greedy, two threads; without a canary, with
records alone (`write`), rolling and full, in turn within each of five passes.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch

from kvcanary import CanaryConfig
from kvcanary_tools.bench.common import NUM_THREADS, PAIRS, machine, progress, save

SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "pad_token_id": 0,
}
BATCH, PROMPT_TOKENS, NEW_TOKENS = 4, 512, 64
CONTENTS = ("write", "rolling", "full")


def main() -> None:
    torch.set_num_threads(NUM_THREADS)
    model, prompt = make_model(SHAPE), make_prompt(SHAPE["vocab_size"])  # type: ignore[arg-type]
    timings = measure(model, prompt, PAIRS)
    result = {
        "what": "seconds of generate with the canary / without",
        "machine": machine(),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "batch": BATCH,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "passes": PAIRS,
        "seconds": timings,
        "ratios": ratios(timings),
    }
    save("cpu_transformers", result)
    for content, ratio in result["ratios"].items():
        print(f"{content:8s} {ratio:.3f}")


def make_model(shape: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16).eval()


def make_prompt(vocabulary: int, batch: int = BATCH, tokens: int = PROMPT_TOKENS) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(1))


def measure(model: Any, prompt: torch.Tensor, passes: int, new_tokens: int = NEW_TOKENS) -> dict[str, list[float]]:
    """Seconds by way, `off` first; RuntimeError where tokens differ."""
    from kvcanary.adapters.transformers import attach

    ways = ("off", *CONTENTS)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    expected = None
    for number in range(passes + 1):  # the first one warms up
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            with nullcontext() if way == "off" else attach(model, CanaryConfig(content=way, seed=7)):
                start = time.perf_counter()
                output = model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False
                )
                if number:
                    seconds[way].append(time.perf_counter() - start)
            expected = output if expected is None else expected
            if not torch.equal(output, expected):
                raise RuntimeError(f"tokens differ with the canary {way}")
        progress(f"pass {number} of {passes}")
    return seconds


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Median over the passes of with / without in the same pass."""
    return {
        way: median(own / off for own, off in zip(times, seconds["off"], strict=True))
        for way, times in seconds.items()
        if way != "off"
    }


if __name__ == "__main__":
    main()
