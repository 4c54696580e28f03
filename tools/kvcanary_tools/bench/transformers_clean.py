"""Sound generation has no finding: ``python -m kvcanary_tools.bench.transformers_clean``.

Tiny random models of four families, with and without sliding windows, generate in every way that transformers has, once
without a canary and once with it (`full`, mode ``raise``): tokens must be equal, and the first finding ends the run. A
row is an entry of one layer that attention read in one step, judged at that step.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

import torch
import transformers

from kvcanary import CanaryConfig
from kvcanary.adapters.transformers import attach
from kvcanary.adapters.transformers.unwatched import cache_argument, cache_in
from kvcanary_tools.bench.common import events_to_stderr, machine, progress, save

ROWS, TOKENS, WINDOW = 10**6, 120, 8
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},  # every other layer has the window
}
#: For `generate_batch`, windows in all layers, and in two of three.
BATCHED_FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Mistral": {"sliding_window": WINDOW},
    "Qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
}
#: By name, the arguments of generate(), and how many rows the prompt may have.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({}, 2),
    "sampling": ({"do_sample": True, "temperature": 1.3}, 2),
    "beams": ({"num_beams": 3}, 2),
    "assisted": ({}, 1),  # an assistant of the same family
    "lookup": ({"prompt_lookup_num_tokens": 3}, 1),
    "static": ({"cache_implementation": "static", "disable_compile": True}, 2),
    "chunks": ({"prefill_chunk_size": 3}, 2),
    "embeddings": ({}, 2),  # of the prompt, in place of its tokens
    "turns": ({}, 2),  # a second prompt goes on over the cache of the first one
    "new tokens": ({}, 2),  # the same, of which only these are given
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="count rows of sound generation; any finding is an error")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows to reach, all ways together")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = measure(options.rows)
    save("cpu_transformers_clean", result)
    print(f"{'family':8} {'way':10} {'rows':>10} {'seconds':>8}  findings")
    for line in (*result["ways"], {"family": "all", "way": "", **result}):
        print(f"{line['family']:8} {line['way']:10} {line['rows']:10,} {line['seconds']:8.1f}  {line['findings']}")


def measure(rows: int, tokens: int = TOKENS) -> dict[str, Any]:
    """Every way of every family, each until its share of the rows is reached; the totals and the split."""
    pairs = [(family, way) for family in FAMILIES for way in WAYS] + [(family, "batch") for family in BATCHED_FAMILIES]
    lines = [run(family, way, rows / len(pairs), tokens) for family, way in pairs]
    return {
        "what": "rows that attention read in sound generation, and what the canary found in them",
        "machine": machine(),
        "transformers": transformers.__version__,
        "rows": sum(line["rows"] for line in lines),
        "findings": sum(line["findings"] for line in lines),
        "seconds": round(sum(line["seconds"] for line in lines), 1),
        "ways": lines,
    }


def run(family: str, way: str, rows: float, tokens: int) -> dict[str, Any]:
    """One family in one way, with another seed each time. RuntimeError where tokens differ with the canary."""
    start, runs = time.perf_counter(), 0
    model = make_model(family, own=BATCHED_FAMILIES[family] if way == "batch" else None)
    assistant = make_model(family, seed=1) if way == "assisted" else None

    def output() -> Any:
        if way == "batch":
            return generate_batch(model, 1 + runs % 3, tokens, seed=runs)
        return generate(model, way, tokens, seed=runs, assistant=assistant).tolist()

    certificate: dict[str, Any] = {"slots_checked": 0}
    found = done = forwards = 0
    while done < rows or not runs:
        expected = output()
        with attach(model, CanaryConfig(content="full", seed=7 + runs)) as handle:
            if output() != expected:
                raise RuntimeError(f"tokens of {family}, {way}, differ with the canary")
            certificate = handle.certificate()
        done, forwards, runs = done + certificate["slots_checked"], forwards + certificate["forwards"], runs + 1
        found += len(certificate["findings"])
    progress(f"{family}, {way}: {done:,} rows")
    return {
        "family": family,
        "way": way,
        "rows": done,
        "forwards": forwards,
        "runs": runs,
        "findings": found,
        "seconds": round(time.perf_counter() - start, 1),
    }


def make_model(family: str = "Llama", seed: int = 0, own: dict[str, Any] | None = None) -> Any:
    """A model of random weights; `own`: settings in the place of those of FAMILIES."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | (FAMILIES[family] if own is None else own)))
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def generate(
    model: Any, way: str = "greedy", tokens: int = 24, seed: int = 5, assistant: Any = None, **others: Any
) -> torch.Tensor:
    """Tokens of one of WAYS, from a prompt that the seed gives."""
    arguments, rows = WAYS[way]
    torch.manual_seed(seed)
    prompt = torch.randint(3, 97, (rows, 7))
    if way == "lookup":
        prompt = prompt.repeat(1, 3)
    if way == "assisted":
        arguments = {"assistant_model": assistant}
    mask = torch.ones_like(prompt)
    if way == "embeddings":
        arguments, prompt = {"inputs_embeds": model.get_input_embeddings()(prompt)}, None
    elif way in ("turns", "new tokens"):
        first = model.generate(prompt, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True)
        cache, whole = cache_in(first), torch.cat((first.sequences, prompt[:, :3]), 1)
        arguments, mask = {cache_argument(model): cache}, torch.ones_like(whole)
        prompt = whole[:, cache.get_seq_length() :] if way == "new tokens" else whole
    return model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, **arguments, **others)


def generate_batch(
    model: Any, children: int = 1, tokens: int = 24, seed: int = 1, num_shared: int = 20
) -> list[list[int]]:
    """Tokens of prompts that share a prefix, over several chunks and blocks of four, `children` of each."""
    from transformers.generation import configuration_utils as settings

    # its thread logs every error that it hands over, and that psutil is not there
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    is_new = "page_size" in settings.ContinuousBatchingConfig.__dataclass_fields__
    model.set_attn_implementation("sdpa" if is_new else "paged|sdpa")
    torch.manual_seed(seed)
    shared = torch.randint(3, 97, (20,)).tolist()[:num_shared]
    own = 20 - num_shared  # prompts are as long whatever they share
    prompts = [shared + torch.randint(3, 97, (own + n,)).tolist() for n in (3, 9, 14, 30, 5, 7)]
    torch.manual_seed(seed + 1)
    outputs = model.generate_batch(
        prompts,
        generation_config=settings.GenerationConfig(
            max_new_tokens=tokens, do_sample=children > 1, num_return_sequences=children, eos_token_id=-1
        ),
        continuous_batching_config=settings.ContinuousBatchingConfig(
            num_blocks=160 * children,
            max_batch_tokens=40,
            use_cuda_graph=False,
            **{"page_size" if is_new else "block_size": 4},
        ),
    )
    return [output.generated_tokens for output in outputs.values()]


if __name__ == "__main__":
    events_to_stderr()
    main()
