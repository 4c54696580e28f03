"""Index rows, request-table rows and page lists that are smaller, or larger, than what goes into them."""

from __future__ import annotations

from kvcanary.faults.fault import Fault

OLD_HEADROOM = 4  # columns that a request-table row had past the context, besides the nodes of one tree


def _width_of_one_branch(width: int, *, topk: int) -> int:
    return width // topk


def _width_without_reserve(width: int, *, context_length: int, num_draft_tokens: int) -> int:
    return min(width, context_length + OLD_HEADROOM + num_draft_tokens)


def _every_column(num_columns: int, *, num_steps: int) -> int:
    return num_steps


FAULTS = (
    Fault(
        name="bounds.kv_indices_without_topk",
        k="K01",
        bugs=("sgl-project/sglang#27338", "sgl-project/sglang#27460"),
        story="The index buffer of the captured draft forwards was sized for one branch a request, and each of the "
        "topk branches names its whole prefix: long batches wrote into the memory behind it.",
        expected="IndexBufferError",
        applies_to="topk > 1, prompts long enough that topk * sum of lengths exceeds the shorter buffer",
        needs={"topk": 4, "num_draft_tokens": None, "batch": 6, "prompt_len": 44, "new_tokens": 16, "context": 72},
        applies=lambda setup: setup.page_size <= 4 and setup.num_steps > 1 and setup.model == "random",
        perturb=_width_of_one_branch,
    ),
    Fault(
        name="bounds.row_width",
        k="K03",
        bugs=("sgl-project/sglang#26972",),
        story="Draft branches on pages of their own reserve far more columns than the four and one tree that a "
        "request-table row had past the context: near its end a slice of the row was cut short without a word, so "
        "that freed slots leaked, and gathers ran out of range.",
        expected="RowOverflowError",
        applies_to="topk > 1 with page_size > 1, requests near the context length",
        needs={"topk": 4, "page_size": 16, "num_draft_tokens": None, "context": 51},
        applies=lambda setup: setup.prompt_len == 24 and setup.new_tokens <= 20,
        perturb=_width_without_reserve,
    ),
    Fault(
        name="bounds.page_table_scatter",
        k="K02",
        bugs=("sgl-project/sglang#27360", "sgl-project/sglang#25077"),
        story="The page list of the second attention pass was made of all num_steps columns of a branch where the "
        "table has room for those written so far; only the path for pages of one slot had cut it.",
        expected="IndexLengthError",
        applies_to="attention_backend paged, topk > 1 with page_size > 1, num_steps > 1",
        needs={"backend": "paged"},
        applies=lambda setup: setup.has_tree_pages and setup.num_steps > 1,
        perturb=_every_column,
    ),
)
