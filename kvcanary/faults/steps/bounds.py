"""Index rows, request-table rows and page lists that are smaller, or larger, than what goes into them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers.harmless import lengthen_plans, noise_in_a_free_page
from kvcanary.faults.helpers.reach import (
    Place,
    any_entry,
    as_words,
    change,
    entry_at,
    part_of,
    read_entry,
    redirect,
    row_start,
    strike_forward,
)
from kvcanary.faults.strike import UNDECLARED
from kvcanary.faults.target import Call, Target

if TYPE_CHECKING:
    from torch import Tensor

WRAP_BITS = 31
SCRATCH_ROWS = 3
OLD_HEADROOM = 4  # columns that a request-table row had past the context, besides the nodes of one tree


def _of_one_branch(indices: Tensor, *, topk: int) -> Tensor:
    return indices[: len(indices) // topk].clone()


def _width_without_reserve(width: int, *, context_length: int, num_draft_tokens: int) -> int:
    return min(width, context_length + OLD_HEADROOM + num_draft_tokens)


def _every_column(num_columns: int, *, num_steps: int) -> int:
    return num_steps


def _without_lookahead(reserve: int, *, lag: int) -> int:
    return reserve // (lag + 2)


def _unasked(num_pages: int, *, available: Callable[[], int]) -> int:
    return 0 if num_pages > available() else num_pages


def _wrap_an_offset(target: Target) -> None:
    """The offset of one entry, computed in 32 bits with a sign, comes out negative."""

    def wrapped(call: Call) -> Place:
        number = target.rng.randrange(len(call.read.requests))
        position = target.rng.randrange(int(call.read.prefix_lens[number]))
        slot = int(call.read.indices[row_start(call, number) + position]) - (1 << WRAP_BITS)
        read_entry(call, number, position, slot)
        return {"reader": call.read.requests[number], "position": position, "slot": slot}

    strike_forward(target, wrapped)


def _write_past_the_pool(target: Target) -> None:
    """A forward writes one entry behind the last slot."""

    def past(call: Call) -> Place:
        slot = target.pools["target"].num_slots + target.rng.randrange(target.setup.page_size)
        redirect(call, target.rng.randrange(len(call.write.slots)), slot)
        return {"slot": slot}

    strike_forward(target, past)


def _use_rows_as_scratch(target: Target) -> None:
    """Intermediate values of a long forward land in rows of the pool."""
    first = any_entry(target, "target")
    for position in range(first.position, min(first.position + SCRATCH_ROWS, first.reader.committed_len)):
        entry, part = entry_at(first.pool, first.reader, position), part_of(first.pool, 0)
        values = as_words(first.pool, target.rng.uniform(-4.0, 4.0), part.stop - part.start)

        def fill(words: Tensor, part: slice = part, values: Tensor = values) -> Tensor:
            words[part] = values
            return words

        for layer in range(entry.pool.num_layers):
            change(entry.pool, layer, entry.slot, fill)
    target.record(UNDECLARED, **first.place, layer=0)


FAULTS = (
    Fault(
        name="bounds.kv_indices_without_topk",
        bugs=("sgl-project/sglang#27338", "sgl-project/sglang#27460"),
        story="The index buffer of the captured draft forwards was sized for one branch a request, and each of the "
        "topk branches names its whole prefix: long batches wrote into the memory behind it.",
        expected="IndexBufferError",
        applies_to="topk > 1 and num_steps > 1, graphs on",
        needs={"topk": 4, "num_draft_tokens": None, "graphs": True},
        applies=lambda setup: (
            setup.drafts
            and setup.num_steps > 1
            and (setup.model, setup.backend, setup.window) == ("random", "torch", None)
        ),
        perturb=_of_one_branch,
        quiet_needs={"topk": 1},
    ),
    Fault(
        name="bounds.row_width",
        bugs=("sgl-project/sglang#26972",),
        story="Draft branches on pages of their own reserve far more columns than the four and one tree that a "
        "request-table row had past the context: near its end a slice of the row was cut short without a word, so "
        "that freed slots leaked, and gathers ran out of range.",
        expected="RowOverflowError",
        applies_to="topk > 1 with page_size > 1, requests near the context length",
        needs={"topk": 4, "page_size": 16, "num_draft_tokens": None, "context": 51},
        applies=lambda setup: setup.drafts and setup.prompt_len == 24 and setup.new_tokens <= 20,
        perturb=_width_without_reserve,
        quiet_needs={"context": None},
    ),
    Fault(
        name="bounds.page_table_scatter",
        bugs=("sgl-project/sglang#27360", "sgl-project/sglang#25077"),
        story="The page list of the second attention pass was made of all num_steps columns of a branch where the "
        "table has room for those written so far; only the path for pages of one slot had cut it.",
        expected="IndexLengthError",
        applies_to="attention_backend paged, topk > 1 with page_size > 1, num_steps > 1",
        needs={"backend": "paged"},
        applies=lambda setup: setup.has_tree_pages and setup.num_steps > 1,
        perturb=_every_column,
        quiet=partial(lengthen_plans, pool="draft", kind="draft"),
    ),
    Fault(
        name="bounds.no_lookahead",
        bugs=("vllm-project/vllm#16370",),
        story="No blocks were set aside for the tokens that a head drafts: with a nearly full last block it wrote and "
        "read past the block table, and acceptance suffered. No kernel looked at the bounds.",
        expected="ReserveError",
        applies_to="drafts",
        applies=lambda setup: setup.drafts,
        perturb=_without_lookahead,
        alone="the reserve is the least that a step may need: any less is too little",
    ),
    Fault(
        name="bounds.unchecked_allocation",
        bugs=("sgl-project/sglang#34399", "sgl-project/sglang#32780"),
        story="Pages were taken before anybody asked whether so many are free: the kernel read past the end of the "
        "free list, and only then came the report that memory is out.",
        expected="PoolExhaustedError",
        also=("PagesQuarantinedError",),
        applies_to="a pool under pressure, trees of topk 2",
        needs={"page_size": 16, "pages": 24, "batch": 6, "new_token_ratio": 0.1},
        applies=lambda setup: (
            setup.drafts and (setup.model, setup.prompt_len, setup.topk, setup.schedule) == ("random", 24, 2, "sync")
        ),
        perturb=_unasked,
        quiet_needs={"pages": None},
    ),
    Fault(
        name="bounds.past_the_pool",
        bugs=("microsoft/DeepSpeed#2485", "microsoft/DeepSpeed#3758"),
        story="The workspace for K and V was sized for 1024 tokens, and nothing compared it with the input: longer "
        "ones were written behind it. Its users asked for an error in the place of silence.",
        expected="W1",
        strike=_write_past_the_pool,
        quiet=lengthen_plans,
    ),
    Fault(
        name="bounds.offset_wraps",
        bugs=(
            "vllm-project/vllm#1514",
            "vllm-project/vllm#1486",
            "flashinfer-ai/flashinfer#3136",
            "flashinfer-ai/flashinfer#3130",
            "vllm-project/vllm#50427",
        ),
        story="A block's number times its stride was computed in 32 bits. In caches of many blocks the product wraps, "
        "and attention reads zeros or somebody else's rows. Three engines have had it, from 2023 to 2026.",
        expected="R1",
        applies_to="everything: the wrapped offset is given to a small pool",
        strike=_wrap_an_offset,
        quiet=lengthen_plans,
    ),
    Fault(
        name="bounds.scratch_in_the_pool",
        bugs=("microsoft/DeepSpeed#2359", "microsoft/DeepSpeed#2300"),
        story="A scratch buffer overlapped the workspace in which K and V lie: long generations came out corrupted.",
        expected="R9",
        cause="bits",
        strike=_use_rows_as_scratch,
        quiet=noise_in_a_free_page,
    ),
)
