"""What the canary costs a step by rows, tokens and pool size: ``python -m kvcanary_tools.bench.gpu.scaling``.

Random weights of Llama-3-8B's shape in bf16, overlap schedule; requests of as many tokens as a case says, in a pool
some times as large as they need. Engines without a canary, with ``content=write`` and with the default rolling check
take turns, ROUNDS rounds of steps each, timed as in `kvcanary_tools.bench.gpu.step`; what it adds is the difference
to the engine without one, round by round.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from kvcanary_tools.bench.common import added, machine, progress, save, settled
from kvcanary_tools.bench.gpu import step
from kvcanary_tools.bench.gpu.device import device, give_back
from kvcanary_tools.bench.gpu.fitting import fit
from spec_engine.models.decoder import Decoder

CASES = (  # requests, tokens of each, size of the pool over what they need
    (1, 4096, 1),
    (1, 4096, 8),
    (1, 4096, 32),
    (16, 512, 1),
    (64, 512, 1),
    (16, 2048, 1),
    (16, 4096, 1),
)
ROUNDS = 5
NAME = "gpu_scaling"


def main(cases: Sequence[tuple[int, int, int]] = CASES) -> None:
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.gpu.scaling measures a CUDA device, and there is none here")
    model, rows = step.random_decoder(step.LLAMA_8B), []
    for size, tokens, times in cases:
        progress(f"{size} x {tokens}, pool x {times}")
        rows.append(row := measure(size, tokens, times, model, ROUNDS))
        result = {
            "what": "microseconds that the canary adds to a decode step, Llama-3-8B's shape, bf16, overlap",
            "machine": machine() | device(),
            "rounds": ROUNDS,
            "steps": step.STEPS,
            "rows": rows,
        }
        save(NAME, result)
        costs = "".join(f"   {name} {us['median']:+.1f} us" for name, us in row["added_us"].items())
        print(f"{size} x {tokens}, pool of {row['slots']} slots: off {row['off_ms']:.3f} ms{costs}", flush=True)


def measure(size: int, tokens: int, times: int, model: Decoder, rounds: int, **settings: Any) -> dict:
    """A row of the table; ``settings``: of the engines."""
    of_a_request = times * (tokens + step.new_tokens(rounds) + 4 * step.PAGE_SIZE)
    fits = fit(size, len(step.CANARIES), of_a_request, model)
    size, slots, engines = fits.requests, fits.requests * of_a_request, {}
    for name, canary in step.CANARIES.items():
        engines[name] = step.make_engine(size, model, canary, rounds, max_total_tokens=slots, **settings)
        step.fill(engines[name], size, rounds, tokens)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    with settled():
        for number in range(rounds):
            for name in engines if number % 2 else reversed(engines):
                seconds[name].append(step.timed(engines[name]))
    row = {
        "requests": size,
        **fits.as_dict(),
        "tokens": tokens,
        "pool_times": times,
        "slots": slots,
        "off_ms": round(1e3 * median(seconds["off"]), 4),
        "added_us": {name: added(own, seconds["off"]) for name, own in seconds.items() if name != "off"},
        "findings": sum(len(engine.canary.findings) for engine in engines.values() if engine.canary is not None),
    }
    engines.clear()
    give_back()
    return row


if __name__ == "__main__":
    main()
