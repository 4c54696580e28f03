"""What a prefill of an 8B model takes, and what the canary adds to it: ``python -m kvcanary_tools.bench.prefill``.

Random weights of Llama-3-8B's shape in bf16, made on the device; fresh random prompts each round, overlap schedule,
chunks of CHUNK tokens. An engine without a canary takes turns with one of ``content=write`` and with one of the default
rolling check; a prefill is timed from the host, with the device idle before the first chunk and after the last.
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
from kvcanary_tools.bench.common import machine, progress, save, spread
from kvcanary_tools.bench.gpu import device
from kvcanary_tools.bench.step import CANARIES, LLAMA_8B, PAGE_SIZE, random_decoder
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.mock.tokenizer import MockTokenizer
from spec_engine.models.decoder import Decoder

CASES = ((1, 4032), (1, 8192), (64, 4032))  # requests, tokens of each
CHUNK = 8192
MOST_ROUNDS, TOKENS_TIMED = 12, 1 << 16  # rounds of a case: as many as its tokens allow, 2 or more
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)


def main(cases: Sequence[tuple[int, int]] = CASES) -> None:
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.prefill measures a CUDA device, and there is none here")
    longest = max(tokens for _, tokens in cases) + 2 * PARAMS.max_new_tokens
    model = random_decoder(LLAMA_8B | {"max_position_embeddings": longest})
    rows = [_one_case(size, tokens, model) for size, tokens in cases]
    result = {
        "what": "milliseconds of a prefill, Llama-3-8B's shape, bf16, overlap; canary on / off",
        "machine": machine() | device(),
        "chunk_tokens": CHUNK,
        "rows": rows,
    }
    save("gpu_prefill", result)
    for row in rows:
        print(f"{row['requests']} x {row['tokens']}: off {row['off_ms']:.1f} ms", end="")
        for name, ratio in row["over_off"].items():
            print(f"   {name} x{ratio['median']:.4f} ({ratio['min']:.4f} to {ratio['max']:.4f})", end="")
        print()


def _one_case(size: int, tokens: int, model: Decoder) -> dict:
    rounds = max(2, min(MOST_ROUNDS, TOKENS_TIMED // (size * tokens)))
    pairs = {name: _one_pair(size, tokens, model, name, rounds) for name in CANARIES if name != "off"}
    off = [second for pair in pairs.values() for second in pair["off"]]
    return {
        "requests": size,
        "tokens": tokens,
        "rounds": rounds,
        "off_ms": round(1e3 * median(off), 3),
        "off_ms_min": round(1e3 * min(off), 3),
        "over_off": {name: spread(pair["on"], pair["off"]) for name, pair in pairs.items()},
        "certificates": {name: pair["certificate"] for name, pair in pairs.items()},
    }


def _one_pair(size: int, tokens: int, model: Decoder, name: str, rounds: int) -> dict:
    """Seconds of a prefill by round, without a canary and with the one of that name; two pools fit into the memory."""
    engines = {mode: _engine(size, tokens, model, CANARIES[mode]) for mode in ("off", name)}
    draws = random.Random(0)
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    for number in range(rounds + 1):  # the first warms up
        progress(f"{size} x {tokens}: canary {name}, round {number} of {rounds}")
        order = list(engines.items())
        for mode, engine in order if number % 2 else reversed(order):
            seconds[mode].append(_timed(engine, size, tokens, draws))
    certificate = engines[name].canary.certificate()
    engines.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return {"off": seconds["off"][1:], "on": seconds[name][1:], "certificate": certificate}


def _engine(size: int, tokens: int, model: Decoder, canary: CanaryConfig) -> Engine:
    room = tokens + 2 * PARAMS.max_new_tokens
    config = EngineConfig(
        draft="none",
        dtype="bfloat16",
        device="cuda",
        page_size=PAGE_SIZE,
        attention_backend="triton",
        schedule="overlap",
        prefix_cache=False,
        max_total_tokens=size * (room + 4 * PAGE_SIZE),
        max_running_requests=size,
        context_length=room,
        prefill_chunk_tokens=CHUNK,
        canary=canary,
    )
    return Engine(config, model=model, tokenizer=MockTokenizer())


def _timed(engine: Engine, size: int, tokens: int, draws: random.Random) -> float:
    """Seconds until every prompt is forwarded; what they hold is given back behind the clock."""
    vocab_size = engine.model.config.vocab_size
    names = [engine.submit([draws.randrange(vocab_size) for _ in range(tokens)], PARAMS) for _ in range(size)]
    wanted = engine.metrics.prefill_tokens + size * tokens
    torch.cuda.synchronize()
    started = time.perf_counter()
    while engine.metrics.prefill_tokens < wanted:
        engine.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    for name in names:
        engine.cancel(name)
    while engine.has_work:
        engine.step()
    return seconds


def _case(text: str) -> tuple[int, int]:
    size, _, tokens = text.partition("x")
    return int(size), int(tokens)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=_case, action="append", help="REQUESTSxTOKENS, such as 1x131072")
    main(parser.parse_args().case or CASES)
