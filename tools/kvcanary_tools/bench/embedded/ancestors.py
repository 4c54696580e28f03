"""What reading exactly the ancestors gains over reading columns: ``python -m kvcanary_tools.bench.embedded.ancestors``.

A survivor of a selection may descend from another branch. Reading by columns, as other engines do, it then attends
tokens that are not on its path; read by ancestors every row is one path of the tree. EAGLE-3 on the embedded model,
5 steps, 16 nodes, topk 4 and 8, greedy, float32, one thread: 120 held-out prompts x 168 drafted tokens. Greedy output
is the same whatever was drafted, so both accept pieces of the same 20,160 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcanary_tools.bench.common import machine, progress, save
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.config import ATTEND
from spec_engine.models.embedded import load_excerpts

TOPK, NUM_STEPS, NUM_NODES = (4, 8), 5, 16
NEW_TOKENS = 169  # the first comes from the prefill
BATCH = 8


def main() -> None:
    torch.set_num_threads(1)
    result = measure([excerpt.prompt for excerpt in load_excerpts()])
    save("ancestors", result)
    print("topk   ancestors   columns   ancestors / columns")
    for row in result["rows"]:
        print(f"{row['topk']:4d}   {row['ancestors']:9.3f}   {row['columns']:7.3f}   {row['ratio']:.4f}")


def measure(prompts: Sequence[str], new_tokens: int = NEW_TOKENS) -> dict:
    """Accepted length of both ways to attend, by topk, over the same tokens of the target."""
    rows = []
    for topk in TOPK:
        runs = {attend: run(prompts, new_tokens, topk, attend) for attend in ATTEND}
        if len({tuple(outputs) for _, _, outputs in runs.values()}) != 1:
            raise RuntimeError(f"topk {topk}: outputs differ with what drafts attend, greedy drafting must not matter")
        row = {"topk": topk, "tokens": runs["ancestors"][1]}
        row |= {attend: round(length, 4) for attend, (length, _, _) in runs.items()}
        rows.append(row | {"ratio": round(runs["ancestors"][0] / runs["columns"][0], 4)})
        progress(str(rows[-1]))
    return {
        "what": "tokens emitted a verify, drafts reading their ancestors or their branch's column",
        "machine": machine(),
        "draft": "eagle3",
        "dtype": "float32",
        "num_steps": NUM_STEPS,
        "num_draft_tokens": NUM_NODES,
        "prompts": len(prompts),
        "rows": rows,
    }


def run(prompts: Sequence[str], new_tokens: int, topk: int, attend: str) -> tuple[float, int, list[tuple[int, ...]]]:
    """Accepted length, tokens emitted by verifies, and the outputs."""
    engine = make_engine(topk, attend)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
    return engine.metrics.accepted_length, engine.metrics.tokens_emitted, [output.token_ids for output in outputs]


def make_engine(topk: int, attend: str) -> Engine:
    return Engine(
        EngineConfig(
            draft="eagle3",
            topk=topk,
            num_steps=NUM_STEPS,
            num_draft_tokens=NUM_NODES,
            attend=attend,
            max_running_requests=BATCH,
            prefix_cache=False,
        )
    )


if __name__ == "__main__":
    main()
