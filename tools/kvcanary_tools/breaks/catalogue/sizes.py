"""Sizes, estimates and index buffers: what is counted before anything is written."""

# Edits are lines of source and stay as long as these.
# ruff: noqa: E501

from __future__ import annotations

from kvcanary_tools.breaks.broken import Break, Edit
from kvcanary_tools.breaks.cases import Case
from kvcanary_tools.breaks.catalogue.traffic import (
    CHAIN,
    CHUNKED,
    EDGE,
    GRAPH,
    GRAPH_OVERLAP,
    OVERLAP,
    PLAIN,
    PLAIN_GRAPH,
    PRESSED,
    TREE,
    TREE64,
    TREE_PAGED,
    TREE_PAGED_KNOWN,
)

BREAKS = (
    Break(
        "row_width_no_rounding",
        "A row's width leaves out the rounding of both ends to whole pages",
        (
            Edit(
                "spec_engine.memory.sizing",
                "return context_length + reserve + page_size - 1",
                "return context_length + reserve - page_size",
            ),
        ),
        (
            EDGE,
            TREE64,
        ),
        ends=("RowOverflowError",),
        off=("RowOverflowError",),
    ),
    Break(
        "row_width_shrunk_late",
        "The request table's tensor has 16 columns less than was planned",
        (
            Edit(
                "spec_engine.memory.request_table",
                "self.table = torch.zeros(num_rows + 1, width, dtype=torch.int64, device=device)",
                "self.table = torch.zeros(num_rows + 1, width - 16, dtype=torch.int64, device=device)",
            ),
        ),
        (
            EDGE,
            TREE,
            GRAPH,
            GRAPH_OVERLAP,
        ),
        ends=("RowOverflowError",),
        off=("RowOverflowError",),
    ),
    Break(
        "cdiv_one_less",
        "Pages are counted without the last slot",
        (Edit("spec_engine.memory.sizing", "return (a + b - 1) // b", "return (a + b - 2) // b if b > 1 else a // b"),),
        (
            TREE,
            TREE64,
            CHAIN,
            OVERLAP,
            PLAIN,
            GRAPH_OVERLAP,
        ),
        ends=("EstimateError", "EstimateMismatchError"),
        off=("EstimateError", "EstimateMismatchError"),
    ),
    Break(
        "cdiv_one_more",
        "Whole pages are rounded up to one page more",
        (Edit("spec_engine.memory.sizing", "return (a + b - 1) // b", "return a // b + 1"),),
        (
            TREE,
            CHAIN,
            PRESSED,
        ),
        ends=("EstimateError", "EstimateMismatchError"),
        off=("EstimateError", "EstimateMismatchError"),
    ),
    Break(
        "estimate_one_less",
        "A decode step is estimated at one page less than it takes",
        (
            Edit(
                "spec_engine.scheduling.scheduler",
                "return sum(self._missing_pages(request, request.committed_len, self.reserve) for request in requests)",
                "return max(0, sum(self._missing_pages(request, request.committed_len, self.reserve) for request in requests) - 1)",
            ),
        ),
        (
            TREE,
            PRESSED,
        ),
        ends=("EstimateMismatchError",),
        off=("EstimateMismatchError",),
    ),
    Break(
        "estimate_by_tokens",
        "An extend asks for free slots in the place of pages",
        (
            Edit(
                "spec_engine.memory.extend",
                "missing = step_pages(length, num_owned, 0, page_size)",
                "missing = max(0, (length - num_owned * page_size) // page_size)",
            ),
        ),
        (
            TREE,
            CHAIN,
            CHUNKED,
        ),
        ends=("EstimateError",),
        off=("EstimateError",),
    ),
    Break(
        "stride_two_short",
        "Pages of a branch are counted for two steps less than it has",
        (
            Edit(
                "spec_engine.memory.sizing",
                "return cdiv(tail_len + num_steps, page_size)",
                "return cdiv(tail_len + max(num_steps - 2, 1), page_size)",
            ),
        ),
        (
            Case(topk=3, num_steps=4, nodes=8),
            TREE_PAGED,
            TREE_PAGED_KNOWN,
            Case(topk=3, num_steps=4, nodes=8, engine={"graphs": "on"}),
        ),
        ends=("BranchLayoutError",),
        off=("BranchLayoutError",),
    ),
    Break(
        "adaptive_reserve_of_start",
        "The reserve is that of the first number of draft steps, not of the longest",
        (
            Edit(
                "spec_engine.memory.sizes",
                "draft_alloc_len(config.page_size, config.topk, config.most_steps, config.most_nodes)",
                "draft_alloc_len(config.page_size, config.topk, min(config.num_steps, 1), 2)",
            ),
        ),
        (
            Case(topk=1, num_steps=1, page_size=1, draft="self", new=60, engine={"adaptive_steps": {1: [1, 3, 5]}}),
            Case(topk=1, num_steps=1, page_size=4, draft="self", new=60, engine={"adaptive_steps": {1: [1, 3, 5]}}),
        ),
        ends=("BranchLayoutError",),
        off=("BranchLayoutError",),
    ),
    Break(
        "lag_counts_one_token",
        "A host that lags counts one token a step, not the longest accepted chain",
        (
            Edit(
                "spec_engine.memory.sizing",
                "return lag * max_accept + alloc_len + ahead",
                "return lag + alloc_len + ahead",
            ),
            Edit("spec_engine.memory.sizes", "check_reserve(reserve, lag, max_accept, alloc_len + ahead)", "pass"),
        ),
        (
            Case(draft="self", topk=1, num_steps=4, engine={"schedule": "overlap"}),
            Case(draft="self", topk=1, num_steps=4, engine={"schedule": "overlap", "graphs": "on"}),
        ),
        ends=("BranchLayoutError",),
        off=("BranchLayoutError",),
    ),
    Break(
        "captured_indices_without_topk",
        "The index buffer of captured draft forwards has no factor topk",
        (
            Edit(
                "spec_engine.graphs.forward",
                "zeros(rows * (table.shape[1] + ancestors + new))",
                "zeros(requests * (table.shape[1] + ancestors + new))",
            ),
        ),
        (
            Case(topk=4, num_steps=3, nodes=8, engine={"graphs": "on", "graph_buckets": (1, 2, 4, 8)}),
            Case(
                topk=4,
                num_steps=3,
                nodes=8,
                page_size=1,
                prompt=60,
                first=8,
                later=0,
                engine={"graphs": "on", "context_length": 120, "graph_buckets": (8,)},
            ),
        ),
        ends=("IndexBufferError",),
        off=("IndexBufferError",),
    ),
    Break(
        "captured_indices_half",
        "Index buffers of captured forwards are a quarter as long",
        (
            Edit(
                "spec_engine.graphs.forward",
                "zeros(rows * (table.shape[1] + ancestors + new))",
                "zeros(rows * (table.shape[1] + ancestors + new) // 4)",
            ),
        ),
        (
            Case(
                topk=4,
                num_steps=3,
                nodes=8,
                page_size=1,
                prompt=60,
                first=8,
                later=0,
                engine={"graphs": "on", "context_length": 120, "graph_buckets": (8,)},
            ),
            PLAIN_GRAPH,
        ),
        ends=("IndexBufferError",),
        off=("IndexBufferError",),
    ),
)
