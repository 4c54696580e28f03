"""Ranks of one model that disagree on lengths, pages or shards: what tests of several processes commit."""

from __future__ import annotations

from kvcanary.faults.fault import Fault

SEVERAL = "it takes several processes, which a campaign does not start: docs/ranks.md has what was found there"
NOT_CUT = "this engine does not cut positions over ranks"
FAULTS = (
    Fault(
        name="ranks.disagree",
        bugs=(
            "LMCache/LMCache#1101",
            "LMCache/LMCache#1379",
            "LMCache/LMCache#1467",
            "GeeeekExplorer/nano-vllm#187",
            "GeeeekExplorer/nano-vllm#215",
            "GeeeekExplorer/nano-vllm#275",
            "sgl-project/sglang#33442",
            "sgl-project/sglang#27010",
            "sgl-project/sglang#22607",
        ),
        story="One rank looked up and pinned, and the others evicted in between; each sized its pool by its own free "
        "memory, loaded by its own free space, or took another number of completions: lengths and ids of one rank were "
        "used by all.",
        expected="X1",
        applies_to="tensor or pipeline parallel engines",
        reason=SEVERAL,
    ),
    Fault(
        name="ranks.wrong_shard_rule",
        bugs=(
            "vllm-project/vllm#51031",
            "vllm-project/vllm#57260",
            "vllm-project/vllm-ascend#14534",
            "local-inference-lab/vllm#72",
        ),
        story="Positions were localised for groups that every rank holds whole, with another block size than the "
        "kernel's, or not at all for the draft. An all-reduce then makes the wrong result the same on all ranks.",
        expected="R5",
        applies_to="engines that shard positions over ranks",
        reason=NOT_CUT,
    ),
)
