"""What the canary costs a captured decode step of an 8B model: ``python -m kvcanary_tools.bench.step``.

Random weights of Llama-3-8B's shape in bf16, made on the device; 1 and 64 requests of 4,096 tokens, the pool full,
overlap schedule. An engine without a canary takes turns with one of ``content=write`` and with one of the default
rolling check, ROUNDS times STEPS steps each; a step is timed from the host, with the device idle before the first and
after the last.
The floor is the bytes that a step must read over what a plain read of the same device reaches in the same run.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch

from kvcanary import CanaryConfig
from kvcanary_tools.bench.common import machine, progress, save
from kvcanary_tools.bench.gpu import device, read_ceiling
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.mock.tokenizer import MockTokenizer
from spec_engine.models.config import parse_config
from spec_engine.models.decoder import Decoder, RotaryTable

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
PROMPT_LEN, PAGE_SIZE = 4096, 16
BATCHES = (1, 64)
ROUNDS, STEPS, WARM_STEPS = 12, 16, 8
NEW_TOKENS = 2 * ROUNDS * STEPS
CANARIES = {
    "off": CanaryConfig(mode="off"),
    "write": CanaryConfig(mode="raise", content="write"),
    "rolling": CanaryConfig(mode="raise"),
}


def main(batches: Sequence[int] = BATCHES) -> None:
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.step measures a CUDA device, and there is none here")
    model = random_decoder(LLAMA_8B)
    ceiling = read_ceiling() / 1e12
    rows = [_one_batch(size, model, ceiling) for size in batches]
    result = {
        "what": f"milliseconds of a decode step, {PROMPT_LEN} tokens a request, Llama-3-8B's shape, bf16, overlap",
        "machine": machine() | device(),
        "read_tb_s": round(ceiling, 3),
        "rounds": ROUNDS,
        "steps": STEPS,
        "rows": rows,
    }
    save("gpu_step", result)
    for row in rows:
        print(f"batch {row['batch']}: off {row['off_ms']:.3f} ms, {row['over_floor']:.2f} x the floor", end="")
        for name, ratio in row["over_off"].items():
            print(f"   {name} x{ratio['median']:.4f} ({ratio['min']:.4f} to {ratio['max']:.4f})", end="")
        print()


def random_decoder(config: dict) -> Decoder:
    """A model of random bf16 weights that keep the scale of what they multiply, made on the device."""
    parsed = parse_config(config)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = Decoder(parsed)
    finally:
        torch.set_default_dtype(torch.float32)
    model.rotary = RotaryTable(parsed.rope, parsed.head_dim, parsed.max_position_embeddings).to("cuda", torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return model.requires_grad_(False).eval()


def _one_batch(size: int, model: Decoder, ceiling: float) -> dict:
    pairs = {name: _one_pair(size, model, name) for name in CANARIES if name != "off"}
    off = median(second for pair in pairs.values() for second in pair["off"])
    weights = sum(parameter.nbytes for parameter in model.parameters()) - model.embed_weight.nbytes
    config = model.config
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.embed_weight.itemsize
    floor = (weights + size * PROMPT_LEN * token_bytes) / ceiling / 1e12
    return {
        "batch": size,
        "off_ms": round(1e3 * off, 4),
        "floor_ms": round(1e3 * floor, 4),
        "over_floor": round(off / floor, 4),
        "over_off": {name: _spread(pair) for name, pair in pairs.items()},
        "certificates": {name: pair["certificate"] for name, pair in pairs.items()},
    }


def _one_pair(size: int, model: Decoder, name: str) -> dict:
    """Seconds of a step by round, without a canary and with the one of that name; two pools fit into the memory."""
    engines = {mode: make_engine(size, model, CANARIES[mode]) for mode in ("off", name)}
    for mode, engine in engines.items():
        progress(f"batch {size}: prompts, canary {mode}")
        fill(engine, size)
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    for number in range(ROUNDS):
        order = list(engines.items())
        for mode, engine in order if number % 2 else reversed(order):
            seconds[mode].append(_timed(engine))
    certificate = engines[name].canary.certificate()
    engines.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return {"off": seconds["off"], "on": seconds[name], "certificate": certificate}


def _spread(pair: dict) -> dict:
    ratios = [on / off for on, off in zip(pair["on"], pair["off"], strict=True)]
    return {"median": round(median(ratios), 4), "min": round(min(ratios), 4), "max": round(max(ratios), 4)}


def make_engine(size: int, model: Decoder, canary: CanaryConfig, new_tokens: int = NEW_TOKENS) -> Engine:
    """Room for requests of PROMPT_LEN tokens and so many new ones, decode steps in one bucket."""
    config = EngineConfig(
        draft="none",
        dtype="bfloat16",
        device="cuda",
        page_size=PAGE_SIZE,
        schedule="overlap",
        prefix_cache=False,
        max_total_tokens=size * (PROMPT_LEN + new_tokens + 4 * PAGE_SIZE),
        max_running_requests=size,
        context_length=PROMPT_LEN + new_tokens,
        prefill_chunk_tokens=PROMPT_LEN,
        graphs="on",
        graph_buckets=(size,),
        canary=canary,
    )
    return Engine(config, model=model, tokenizer=MockTokenizer())


def fill(engine: Engine, size: int, new_tokens: int = NEW_TOKENS - 1) -> None:
    """Every request in decode, the programs warm."""
    draws = random.Random(0)
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    for _ in range(size):
        engine.submit([draws.randrange(engine.model.config.vocab_size) for _ in range(PROMPT_LEN)], params)
    while engine.metrics.prefill_tokens < size * PROMPT_LEN:
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    torch.cuda.synchronize()


def _timed(engine: Engine) -> float:
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
    main(parser.parse_args().batch or BATCHES)
