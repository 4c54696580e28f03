"""Retractions under pressure by what admission counts with: ``python -m kvcanary_tools.bench.embedded.retractions``.

Sixteen held-out prompts x 96 tokens, EAGLE-3 trees on pages of 16, float64, eight at a time in a pool that cannot hold
eight at their ends. "tight" counts the pages that the next step really takes; "worst case" a whole reserve for every
request, as sgl-project/sglang#22406 found it; "doubled reserve" holds twice the allocation length for every request.
All give the same tokens; what is retracted needlessly is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from kvcanary import faults
from kvcanary_tools.bench.common import machine, progress, save
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.models.embedded import load_excerpts

NUM_PROMPTS, NEW_TOKENS = 16, 96
PRESSED = 3328  # slots: eight prompts of these with their reserves, and little to grow
SETTINGS = {"draft": "eagle3", "page_size": 16, "topk": 4, "num_steps": 5, "num_draft_tokens": 8}


def main() -> None:
    torch.set_num_threads(1)
    result = measure([excerpt.prompt for excerpt in load_excerpts()[:NUM_PROMPTS]])
    save("retractions", result)
    print("schedule  estimate          retractions   prompt tokens   steps")
    for row in result["rows"]:
        figures = f"{row['retractions']:11d}   {row['prefill_tokens']:13d}   {row['steps']:5d}"
        print(f"{row['schedule']:8}  {row['estimate']:16}  {figures}")


def measure(prompts: Sequence[str], new_tokens: int = NEW_TOKENS, slots: int = PRESSED) -> dict:
    """One pressed workload by schedule and estimate; RuntimeError where outputs differ."""
    rows, outputs = [], set()
    for schedule in ("sync", "overlap"):
        for estimate in ESTIMATES:
            row, output = run(prompts, new_tokens, slots, schedule, estimate)
            rows.append(row)
            outputs.add(output)
            progress(str(row))
    if len(outputs) != 1:
        raise RuntimeError("outputs differ between estimates or schedules, a retraction must not change a token")
    return {
        "what": "requests that gave up their pages and resumed, on one workload",
        "machine": machine(),
        "dtype": "float64",
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "pool_slots": slots,
        "settings": SETTINGS,
        "rows": rows,
    }


def run(
    prompts: Sequence[str], new_tokens: int, slots: int, schedule: str, estimate: str
) -> tuple[dict, tuple[tuple[int, ...], ...]]:
    """The counters of one run, and its outputs."""
    config = EngineConfig(
        dtype="float64", schedule=schedule, max_total_tokens=slots, prefix_cache=False, new_token_ratio=0.0, **SETTINGS
    )
    engine = Engine(config)
    with ESTIMATES[estimate](engine):
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
    metrics = engine.metrics
    row = {
        "schedule": schedule,
        "estimate": estimate,
        "reserve": engine.scheduler.reserve,
        "retractions": metrics.num_retractions,
        "prefill_tokens": metrics.prefill_tokens,
        "steps": metrics.num_steps,
    }
    return row, tuple(output.token_ids for output in outputs)


@contextmanager
def doubled_reserve(engine: Engine) -> Iterator[None]:
    """The upper bound of the reserve, twice the allocation length; the prompts end far before their rows do."""
    engine.scheduler.reserve = 2 * engine.sizes.alloc_len
    yield


ESTIMATES: dict[str, Callable[[Engine], AbstractContextManager]] = {
    "tight": lambda engine: nullcontext(),
    "worst case": lambda engine: faults.arm("lengths.worst_case_estimate"),
    "doubled reserve": doubled_reserve,
}


if __name__ == "__main__":
    main()
