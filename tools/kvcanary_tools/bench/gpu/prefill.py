"""What a prefill of an 8B model takes, and what the canary adds to it: ``python -m kvcanary_tools.bench.gpu.prefill``.

Random weights of Llama-3-8B's shape in bf16, made on the device; fresh random prompts each round, overlap schedule,
chunks of as many whole prompts as CHUNK tokens hold, or of CHUNK tokens of a longer one. An engine without a canary
takes turns with one of the default rolling check, in cases of few tokens with one of ``content=write`` too; a prefill
is timed from the host, with the device idle before the first chunk and after the last. The device rests REST seconds
before each, so that it finds all of them alike.
The record is written behind each case, and rows of other cases that it has from the same machine stay. Prompts of more
than LONG tokens take over a minute, and have a record of their own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch

from kvcanary import CanaryConfig
from kvcanary_tools.bench import common
from kvcanary_tools.bench.common import machine, progress, reported, save, settled, spread
from kvcanary_tools.bench.gpu.device import device, give_back
from kvcanary_tools.bench.gpu.step import CANARIES, LLAMA_8B, PAGE_SIZE, plain_engine, random_decoder
from spec_engine import Engine, SamplingParams
from spec_engine.models.decoder import Decoder

CASES = ((1, 4032), (1, 8192), (64, 4032))  # requests, tokens of each; 1x131072 takes over a minute more
CHUNK = 8192
REST, WARM_TOKENS = 0.2, 1 << 14
LEAST_ROUNDS, MOST_ROUNDS, TOKENS_TIMED = 3, 40, 1 << 16  # rounds of a case: as many as its tokens allow
FEW, MANY = ("off", "write", "rolling"), ("off", "rolling")  # of CANARIES, by the tokens of a case
FEW_TOKENS = 1 << 16  # the pool has room for twice as many then: pages freed by a round wait out their quarantine
LONG = 1 << 16
NAME, NAME_LONG = "gpu_prefill", "gpu_prefill_long"
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)


def main(cases: Sequence[tuple[int, int]] = CASES, rounds: int | None = None) -> None:
    """`rounds`: of each case; None: as many as its tokens allow."""
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.gpu.prefill measures a CUDA device, and there is none here")
    longest = max(tokens for _, tokens in cases) + 2 * PARAMS.max_new_tokens
    model = random_decoder(LLAMA_8B | {"max_position_embeddings": longest})
    about = {
        "what": "milliseconds of a prefill, Llama-3-8B's shape, bf16, overlap; canary on / off",
        "machine": machine() | device(),
        "chunk_tokens": CHUNK,
        "rest_s": REST,
    }
    for size, tokens in cases:
        row = _one_case(size, tokens, model, rounds)
        name = NAME_LONG if tokens > LONG else NAME
        save(name, about | {"rows": joined(about | {"rows": [row]}, name)})
        print(f"{size} x {tokens}: off {row['off_ms']:.1f} ms{reported(row['over_off'])}", flush=True)


def joined(result: dict, name: str = NAME) -> list[dict]:
    """The rows of a result, and those of other cases that the record has of the same measurement; by tokens."""
    path = common.RESULTS / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    is_same = all(before.get(key) == value for key, value in result.items() if key != "rows")
    rows = {(row["requests"], row["tokens"]): row for row in (before["rows"] if is_same else [])}
    rows |= {(row["requests"], row["tokens"]): row for row in result["rows"]}
    return [rows[case] for case in sorted(rows)]


def _one_case(size: int, tokens: int, model: Decoder, rounds: int | None) -> dict:
    rounds = rounds or max(LEAST_ROUNDS, min(MOST_ROUNDS, TOKENS_TIMED // (size * tokens)))
    seconds, certificates = _turns(size, tokens, model, rounds)
    return {
        "requests": size,
        "tokens": tokens,
        "rounds": rounds,
        "off_ms": round(1e3 * median(seconds["off"]), 3),
        "off_ms_min": round(1e3 * min(seconds["off"]), 3),
        "over_off": {name: spread(seconds[name], seconds["off"]) for name in certificates},
        "certificates": certificates,
    }


def _turns(size: int, tokens: int, model: Decoder, rounds: int) -> tuple[dict[str, list[float]], dict[str, dict]]:
    """Seconds of a prefill by round, of every engine, and the certificates; their pools fit together."""
    names = MANY if size * tokens > FEW_TOKENS else FEW
    engines = {name: _engine(size, tokens, model, CANARIES[name]) for name in names}
    draws = random.Random(0)
    for name, engine in engines.items():  # compiles, and fills allocators
        progress(f"{size} x {tokens}: warming up, canary {name}")
        for _ in range(max(1, WARM_TOKENS // (size * tokens))):
            _timed(engine, size, tokens, draws)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    with settled():
        for number in range(rounds):
            progress(f"{size} x {tokens}: round {number + 1} of {rounds}")
            order = list(engines.items())
            for name, engine in order if number % 2 else reversed(order):
                seconds[name].append(_timed(engine, size, tokens, draws))
    certificates = {name: engine.canary.certificate() for name, engine in engines.items() if engine.canary is not None}
    engines.clear()
    give_back()
    return seconds, certificates


def _engine(size: int, tokens: int, model: Decoder, canary: CanaryConfig) -> Engine:
    room = tokens + 2 * PARAMS.max_new_tokens
    return plain_engine(
        model,
        canary,
        max_total_tokens=size * (room + 4 * PAGE_SIZE) * (2 if size * tokens <= FEW_TOKENS else 1),
        max_running_requests=size,
        context_length=room,
        prefill_chunk_tokens=tokens * (CHUNK // tokens) or CHUNK,
    )


def _timed(engine: Engine, size: int, tokens: int, draws: random.Random) -> float:
    """Seconds until every prompt is forwarded; what they hold is given back behind the clock."""
    vocab_size = engine.model.config.vocab_size
    names = [engine.submit([draws.randrange(vocab_size) for _ in range(tokens)], PARAMS) for _ in range(size)]
    wanted = engine.metrics.prefill_tokens + size * tokens
    torch.cuda.synchronize()
    time.sleep(REST)
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
    parser.add_argument("--rounds", type=int, help="of each case, in place of as many as its tokens allow")
    asked = parser.parse_args()
    main(asked.case or CASES, asked.rounds)
