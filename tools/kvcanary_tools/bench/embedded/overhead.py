"""What the canary costs on the CPU: ``python -m kvcanary_tools.bench.embedded.overhead``.

The default engine without its prefix cache, embedded model, canary off and on (``raise``, rolling), 20 held-out prompts
x 128 tokens, two threads, batch 1 and 8, five passes in which the two take turns batch by batch.
"""

from __future__ import annotations

import torch

from kvcanary import CanaryConfig
from kvcanary_tools.bench.common import (
    NEW_TOKENS,
    NUM_THREADS,
    PAIRS,
    PROMPTS,
    machine,
    progress,
    ratios,
    run_pass,
    save,
    settled,
)
from spec_engine import Engine, EngineConfig
from spec_engine.models.embedded import load_excerpts

BATCH_SIZES = (1, 8)


def main() -> None:
    torch.set_num_threads(NUM_THREADS)
    prompts = [excerpt.prompt for excerpt in load_excerpts()[:PROMPTS]]
    rows = [measure(size, prompts) for size in BATCH_SIZES]
    result = {
        "what": "seconds with the canary on (raise, rolling) / off",
        "machine": machine(),
        "prompts": PROMPTS,
        "new_tokens": NEW_TOKENS,
        "passes": PAIRS,
        "rows": rows,
    }
    save("cpu_overhead", result)
    print("batch   prefill on/off            steps on/off")
    for row in rows:
        cells = [
            f"{row[part]['median']:.3f} ({row[part]['min']:.3f} to {row[part]['max']:.3f})"
            for part in ("prefill", "steps")
        ]
        print(f"{row['batch']:5d}   " + "   ".join(cells))


def measure(size: int, prompts: list[str], num_passes: int = PAIRS, new_tokens: int = NEW_TOKENS) -> dict:
    """A row of the table: batches of so many prompts."""
    batches = [prompts[first : first + size] for first in range(0, len(prompts), size)]
    engines = {
        mode: Engine(EngineConfig(prefix_cache=False, canary=CanaryConfig(mode=mode))) for mode in ("off", "raise")
    }
    run_pass(engines, batches[:1], new_tokens)
    passes = []
    with settled():
        for number in range(num_passes):
            passes.append(run_pass(engines, batches, new_tokens))
            progress(f"batch {size}, pass {number + 1} of {num_passes}")
    return {
        "batch": size,
        "prefill": ratios(passes, "raise", "off", lambda timing: timing.prefill_seconds),
        "steps": ratios(passes, "raise", "off", lambda timing: timing.step_seconds),
        "certificate": engines["raise"].canary.certificate(),
    }


if __name__ == "__main__":
    main()
