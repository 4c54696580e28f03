"""What the canary costs a captured decode step of an 8B model: ``python -m kvcanary_tools.bench.gpu.step``.

Random weights of Llama-3-8B's shape, or with ``--model Qwen3.5-9B`` of that hybrid's, in bf16, made on the device; 1
and 64 requests of 4,096 tokens, or as many as fit into the device's memory, the pool full, overlap schedule. An engine
without a canary takes turns with one of ``content=write`` and one of the default rolling check, some rounds of STEPS
steps each; a step is timed from the host, with the device idle before the first and after the last. Then they are made
anew in another order, until each has had every place in the device's memory.
The floor is the bytes that a step must read over what a plain read of the same device reaches in the same run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup

from kvcanary import CanaryConfig
from kvcanary_tools.bench.common import (
    Rounds,
    machine,
    mean_over,
    progress,
    reported,
    save,
    settled,
    spread,
)
from kvcanary_tools.bench.gpu.device import device, in_orders, read_ceiling
from kvcanary_tools.bench.gpu.fitting import fit, slot_bytes, state_bytes
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.mock.tokenizer import MockTokenizer
from spec_engine.models.config import parse_config
from spec_engine.models.decoder import Decoder, RotaryTable
from spec_engine.models.hybrid import HybridDecoder
from spec_engine.models.loader import Draft

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
QWEN_9B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
}
#: By its name: the record, and the shape.
MODELS = {"Llama-3-8B": ("gpu_step", LLAMA_8B), "Qwen3.5-9B": ("gpu_step_hybrid", QWEN_9B)}
PROMPT_LEN, PAGE_SIZE = 4096, 16
BATCHES = (1, 64)
ROUNDS, STEPS, WARM_STEPS = 3, 48, 8  # ROUNDS: unless others are asked for
Module = TypeVar("Module", bound=torch.nn.Module)
CANARIES = {
    "off": CanaryConfig(mode="off"),
    "write": CanaryConfig(mode="raise", content="write"),
    "rolling": CanaryConfig(mode="raise"),
}


def main(
    batches: Sequence[int] = BATCHES, rounds: int = ROUNDS, places: int = len(CANARIES), name: str = "Llama-3-8B"
) -> None:
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.gpu.step measures a CUDA device, and there is none here")
    record, config = MODELS[name]
    model = random_decoder(config)
    ceiling = read_ceiling() / 1e12
    rows = [measure(size, model, ceiling, rounds, places) for size in batches]
    result = {
        "what": f"milliseconds of a decode step, {PROMPT_LEN} tokens a request, {name}'s shape, bf16, overlap",
        "machine": machine() | device(),
        "read_tb_s": round(ceiling, 3),
        "rounds": rounds,
        "places": places,
        "steps": STEPS,
        "rows": rows,
    }
    save(record, result)
    for row in rows:
        own = f"batch {row['batch']}: off {row['off_ms']:.3f} ms, {row['over_floor']:.2f} x the floor"
        print(own + reported(row["over_off"]))


def random_decoder(config: dict, on: str = "cuda") -> Decoder:
    """A model of random bf16 weights, made on the device."""
    parsed = parse_config(config)
    model = drawn(lambda: Decoder(parsed) if parsed.delta is None else HybridDecoder(parsed), on)
    rotary = RotaryTable(parsed.rope, parsed.head_dim, parsed.max_position_embeddings, parsed.rotary_dim)
    model.rotary = rotary.to(on, torch.bfloat16)
    return model


def drawn(make: Callable[[], Module], on: str = "cuda") -> Module:
    """What ``make`` makes, with random bf16 weights, made on the device."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(on):
            model = make()
    finally:
        torch.set_default_dtype(torch.float32)
    randomise(model)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Weights that keep the scale of what they multiply, the same ones every time."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)


def measure(asked: int, model: Decoder, ceiling: float, rounds: int, places: int) -> dict:
    """A row of the table; ``ceiling``: terabytes a second of a plain read."""
    fits = fit(asked, len(CANARIES), slots_of(rounds), model)
    size = fits.requests
    orders = in_orders(list(CANARIES), places, lambda names: _one_order(size, model, names, rounds))
    seconds, (*_, (_, certificates)) = mean_over([turns for turns, _ in orders]), orders
    off = median(seconds["off"])
    weights = sum(parameter.nbytes for parameter in model.parameters()) - model.embed_weight.nbytes
    watched = [name for name in CANARIES if name in certificates]
    a_request = PROMPT_LEN * slot_bytes(model) + 2 * state_bytes(model)  # states are written, too
    floor = (weights + size * a_request) / ceiling / 1e12
    return {
        "batch": size,
        **fits.as_dict(),
        "off_ms": round(1e3 * off, 4),
        "floor_ms": round(1e3 * floor, 4),
        "over_floor": round(off / floor, 4),
        "over_off": {name: spread(seconds[name], seconds["off"]) for name in watched},
        "certificates": {name: certificates[name] for name in watched},
    }


def _one_order(size: int, model: Decoder, names: Sequence[str], rounds: int) -> tuple[Rounds, dict[str, dict]]:
    """Seconds of a step by round, of engines made in this order, whose pools fit together; their certificates."""
    engines = {}
    for name in names:
        progress(f"batch {size}: prompts, canary {name}")
        engines[name] = make_engine(size, model, CANARIES[name], rounds)
        fill(engines[name], size, rounds)
    progress(f"batch {size}: {rounds} rounds of {STEPS} steps")
    seconds: Rounds = {name: [] for name in engines}
    with settled():
        for number in range(rounds):
            order = list(engines.items())
            for name, engine in order if number % 2 else reversed(order):
                seconds[name].append(timed(engine))
    certificates = {name: engine.canary.certificate() for name, engine in engines.items() if engine.canary is not None}
    return seconds, certificates


def make_engine(
    size: int,
    model: Decoder,
    canary: CanaryConfig,
    rounds: int,
    head: Draft | None = None,
    ranks: ProcessGroup | None = None,
    **settings: Any,
) -> Engine:
    """With room for these requests and what rounds bring; ``settings`` go before those of this benchmark."""
    new = new_tokens(rounds)
    own = {
        "max_total_tokens": size * slots_of(rounds),
        "max_running_requests": size,
        "context_length": PROMPT_LEN + new + 1,
        "prefill_chunk_tokens": PROMPT_LEN,
        "graphs": "on",
        "graph_buckets": (size,),
    }
    return plain_engine(model, canary, head, ranks, **own | settings)


def plain_engine(
    model: Decoder,
    canary: CanaryConfig,
    head: Draft | None = None,
    ranks: ProcessGroup | None = None,
    **settings: Any,
) -> Engine:
    """What all benchmarks of an 8B model have in common, and ``settings`` of one of them."""
    common = {
        "draft": "none" if head is None else head.kind,
        "dtype": "bfloat16",
        "device": "cuda",
        "page_size": PAGE_SIZE,
        "attention_backend": "triton",
        "schedule": "overlap",
        "prefix_cache": False,
        "canary": canary,
    }
    config = EngineConfig(**common | settings)
    return Engine(config, model=model, draft=head, tokenizer=MockTokenizer(), ranks=ranks)


def slots_of(rounds: int) -> int:
    """That a request has in a pool."""
    return PROMPT_LEN + new_tokens(rounds) + 4 * PAGE_SIZE


def new_tokens(rounds: int) -> int:
    """That a request may have: those of a run, and some to spare."""
    return rounds * STEPS + 2 * WARM_STEPS


def fill(engine: Engine, size: int, rounds: int, tokens: int | None = None) -> None:
    """Every request in decode, the programs warm. ``tokens``: of each prompt; None: PROMPT_LEN."""
    tokens = tokens or PROMPT_LEN
    draws = random.Random(0)
    params = SamplingParams(max_new_tokens=new_tokens(rounds), ignore_eos=True)
    for _ in range(size):
        engine.submit([draws.randrange(engine.model.config.vocab_size) for _ in range(tokens)], params)
    while engine.metrics.prefill_tokens < size * tokens:
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what prefills have used: all pools must fit


def timed(engine: Engine) -> float:
    """Seconds of a step, over STEPS of them."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, action="append", help="requests in a step; by default 1 and 64")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns in each place; by default {ROUNDS}")
    orders = {
        "choices": range(1, len(CANARIES) + 1),
        "default": len(CANARIES),
        "help": "by default one for each engine",
    }
    parser.add_argument("--places", type=int, **orders)
    parser.add_argument("--model", choices=MODELS, default="Llama-3-8B", help="whose shape; by default Llama-3-8B's")
    arguments = parser.parse_args()
    main(arguments.batch or BATCHES, arguments.rounds, arguments.places, arguments.model)
