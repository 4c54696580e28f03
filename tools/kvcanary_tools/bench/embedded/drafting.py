"""How much faster drafting is than no drafting: ``python -m kvcanary_tools.bench.embedded.drafting``.

float32, batch 1, two threads, 20 held-out prompts x 128 tokens. Every setting of steps, nodes and topk runs once;
the fastest then runs five times, interleaved with no drafting prompt by prompt.
"""

from __future__ import annotations

import itertools

import torch

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
)
from spec_engine import Engine, EngineConfig
from spec_engine.config import ConfigError
from spec_engine.models.embedded import load_excerpts

NUM_STEPS, NUM_NODES, TOPK = (3, 5), (8, 16), (2, 4)


def main() -> None:
    torch.set_num_threads(NUM_THREADS)
    batches = [[excerpt.prompt] for excerpt in load_excerpts()[:PROMPTS]]
    plain = Engine(EngineConfig(draft="none", prefix_cache=False))
    run_pass({"warm-up": plain}, batches[:2])
    baseline = run_pass({"plain": plain}, batches)["plain"].seconds
    settings = []
    for steps, nodes, topk in itertools.product(NUM_STEPS, NUM_NODES, TOPK):
        row = {"num_steps": steps, "num_draft_tokens": nodes, "topk": topk}
        settings.append(row | _one_setting(row, batches, baseline))
        progress(str(settings[-1]))
    best = max((row for row in settings if "speedup" in row), key=lambda row: row["speedup"])
    chosen = {name: best[name] for name in ("num_steps", "num_draft_tokens", "topk")}
    drafted = Engine(EngineConfig(prefix_cache=False, **chosen))
    run_pass({"warm-up": drafted}, batches[:2])
    passes = [run_pass({"plain": plain, "drafted": drafted}, batches) for _ in range(PAIRS)]
    result = {
        "what": "no drafting / drafting, seconds of the same 20 prompts x 128 tokens; above 1 drafting is faster",
        "machine": machine(),
        "prompts": PROMPTS,
        "new_tokens": NEW_TOKENS,
        "pairs": PAIRS,
        "settings": settings,
        "best": chosen,
        "accepted_length": round(passes[0]["drafted"].accepted_length, 3),
        "speedup_whole": ratios(passes, "plain", "drafted", lambda timing: timing.seconds),
        "speedup_steps": ratios(passes, "plain", "drafted", lambda timing: timing.step_seconds),
    }
    save("cpu_drafting", result)
    whole, steps = result["speedup_whole"], result["speedup_steps"]
    print(f"best setting   steps {chosen['num_steps']}, nodes {chosen['num_draft_tokens']}, topk {chosen['topk']}")
    print(f"accepted       {result['accepted_length']:.2f} tokens a verify")
    print(f"whole run      {whole['median']:.2f} x no drafting ({whole['min']:.2f} to {whole['max']:.2f})")
    print(f"steps alone    {steps['median']:.2f} x no drafting ({steps['min']:.2f} to {steps['max']:.2f})")


def _one_setting(settings: dict, batches: list[list[str]], baseline: float) -> dict:
    try:
        engine = Engine(EngineConfig(prefix_cache=False, **settings))
    except ConfigError as refusal:
        return {"refused": str(refusal)}
    timing = run_pass({"drafted": engine}, batches)["drafted"]
    return {"speedup": round(baseline / timing.seconds, 3), "accepted_length": round(timing.accepted_length, 3)}


if __name__ == "__main__":
    main()
