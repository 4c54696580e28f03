"""Drafts and trees: entries of the wrong token, position or parent; arrays that are not what readers take them for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers.branches import (
    changed_by,
    first_child,
    move_undeclared,
    not_copied,
    of_the_row_beside,
    where_it_was_due,
)
from kvcanary.faults.helpers.harmless import lengthen_plans, move_in_another_order
from kvcanary.faults.helpers.reach import (
    Place,
    another_token,
    read_other,
    strike_forward,
    strike_row,
    submit_prompt,
    write_other,
    written_of,
)
from kvcanary.faults.strike import UNDECLARED
from kvcanary.faults.target import Call, Move, Setup, Target

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 16
FIRST_SEEN = 2  # draft forward that reads two drafted entries, so that they can contradict each other


def _narrow(dtype: Any, *, topk: int) -> Any:
    import torch

    return torch.int32 if topk == 1 else dtype


def _shift_positions(target: Target) -> None:
    """Every entry of the draft forwards one position too far: any of them may be told first."""

    def shift(call: Call) -> bool:
        call.write = replace(call.write, positions=call.write.positions + 1)
        slots, positions = (frozenset(values.tolist()) for values in (call.write.slots, call.write.positions))
        site, writers = ("draft", call.index), frozenset(call.read.requests)
        target.record(writers, pool="draft", site=site, slot=slots, position=positions)
        return False

    target.before("draft", shift)


def _feed_at_chunk_end(target: Target) -> None:
    """A prompt in several chunks; the drafter's entry at the end of the first takes a guess for the next token."""
    request_id = submit_prompt(target, 3 * CHUNK)

    def guess(call: Call, number: int) -> Place:
        return _guess_the_next_token(target, call, number)

    strike_row(target, request_id, guess, "draft", "prefill")


def _guess_the_next_token(target: Target, call: Call, number: int) -> Place:
    """At the last entry that a request writes."""
    last = written_of(call, number).stop - 1
    write_other(call, last, tokens=another_token(target, call, last))
    slot, position = int(call.write.slots[last]), int(call.write.positions[last])
    return {"writer": call.read.requests[number], "slot": slot, "position": position}


def _feed_at_chunk_end_of_output(target: Target) -> None:
    """A retracted request is prefilled again; where a chunk ends within its output, the drafter takes a guess."""
    lens: dict[str, int] = {}  # final entries when first seen: what lies behind them is output

    def watch(call: Call) -> bool:
        for name, length in zip(call.read.requests, call.read.prefix_lens.tolist(), strict=True):
            lens.setdefault(name, length)
        return False

    def guess(call: Call) -> Place | None:
        for number, name in enumerate(call.read.requests):
            position = int(call.write.positions[written_of(call, number).stop - 1])
            known = len(target.canary.session.ledger.request(name).tokens)
            if lens.get(name, position) <= position < known - 1:
                return _guess_the_next_token(target, call, number)
        return None

    target.before("verify", watch)
    strike_forward(target, guess, "draft", 0, "prefill")


def _forget_the_shift(target: Target) -> None:
    """The drafter's prompt entries hold the token of their own position, not the one that follows."""
    request_id, prompt = submit_prompt(target, 2 * CHUNK), target.prompts[-1]
    first = next(p for p in range(len(prompt) - 1) if prompt[p] != prompt[p + 1])

    def unshifted(call: Call, number: int) -> Place:
        own = written_of(call, number)
        write_other(call, own, tokens=call.write.tokens.new_tensor(prompt[: own.stop - own.start]))
        return {"writer": request_id, "slot": int(call.write.slots[own.start + first]), "position": first}

    strike_row(target, request_id, unshifted, "draft", "prefill")


def _read_by_column(target: Target) -> None:
    """Survivors attend what was written for their column, not for their parent."""
    read_other_parents(target, lambda column, num_columns: column)


def read_other_parents(target: Target, column_of: Callable[[int, int], int]) -> None:
    """From the third draft forward on, rows of one request take their parent from this column; further ancestors are
    right.

    A parent that continues these says nothing of itself: whose child an entry is, is known to the drafter alone.
    """
    before: list[Call] = []

    def misread(call: Call) -> bool:
        last = before[-1] if call.index else None
        before[:] = [call]
        if last is None or call.index < FIRST_SEEN:
            return False
        ends, indices, width = call.read.indptr.tolist(), call.read.indices.clone(), call.read.rows_per_request
        wrong: dict[int, list[int]] = {}  # by request its positions that contradict what lies before them
        for row in range(len(ends) - 1):
            place, other = ends[row + 1] - 2, row - row % width + column_of(row % width, width)
            if last.read.indices[last.read.indptr[other + 1] - 2] != indices[place - 1]:
                wrong.setdefault(row // width, []).append(place - ends[row])
            indices[place] = last.write.slots[other]
        if not wrong:
            return False
        number, positions = next(iter(wrong.items()))
        own = slice(ends[number * width], ends[(number + 1) * width])
        read_other(call, own, indices[own])
        reader = call.read.requests[number]
        target.record(reader=reader, pool="draft", site=("draft", call.index), position=min(positions))
        return True

    target.before("draft", misread)


def _own_columns(parents: Any, *, step: int, num_steps: int) -> Any:
    """Every survivor goes on from its column, from the second draft forward on: before that there is one path."""
    import torch

    return torch.arange(parents.shape[1], device=parents.device).expand_as(parents) if step else parents


def _forwards_from(parents: Any, columns: Any, *, step: int, num_steps: int) -> dict[str, Any]:
    """Of the request with the shorter row the first one may be right still."""
    return {"pool": "draft", "site": frozenset(("draft", later) for later in range(step, num_steps - 1))}


def _feed_a_placeholder(target: Target) -> None:
    """A request's newest token is fed as the placeholder that stood for it."""

    def placeholder(call: Call) -> Place | None:
        first = 0 if int(call.write.tokens[0]) else written_of(call, len(call.read.requests) - 1).start
        if not int(call.write.tokens[first]):
            return None
        write_other(call, first, tokens=0)  # what a clamp makes of -1
        slot, position = int(call.write.slots[first]), int(call.write.positions[first])
        return {"writer": call.read.requests[-1 if first else 0], "slot": slot, "position": position}

    strike_forward(target, placeholder, requests=0, kind="verify")


def _lose_the_move(target: Target, pool: str, late: bool) -> None:
    """Rows that should be copied stay where they are: in what was told, all arrived."""

    def stay(move: Move) -> bool:
        moved = changed_by(target, move) if move.pool == pool else frozenset()
        if moved:
            move.source = move.destination
            target.record(UNDECLARED, pool=pool, slot=moved, late=late)
        return bool(moved)

    target.on_move(stay)


def _first_slots(moves: list[Any]) -> list[Any]:
    """A rewind that keeps so many slots, whichever nodes were accepted."""
    return []


def _without_the_last_row(committed: tuple[Sequence[int], Sequence[int]]) -> tuple[Sequence[int], Sequence[int]]:
    rows, nodes = committed
    return rows[:-1], nodes[:-1]


def _own_features(features: Tensor) -> Tensor:
    """Features as a draft guesses them: near the target's, and not its."""
    return features * 0.75


def has_deep_branches(setup: Setup) -> bool:
    return setup.drafts and setup.topk > 1 and setup.num_steps > FIRST_SEEN + 1 and setup.pages is None


FAULTS = (
    Fault(
        name="draft.parents_dtype",
        bugs=("sgl-project/sglang#26424",),
        story="With topk 1 the parent list became a constant, made beside the general path. Readers step by eight "
        "bytes an entry: a constant of 32-bit integers is read two entries at a time, and on behind its end.",
        expected="TreeShapeError",
        applies_to="topk 1",
        needs={"topk": 1, "num_draft_tokens": None},
        applies=lambda setup: setup.drafts,
        perturb=_narrow,
        quiet_needs={"topk": 2},
    ),
    Fault(
        name="draft.position_off_by_one",
        bugs=("sgl-project/sglang#25015",),
        story="Positions were raised before each draft forward, not behind it: every drafted entry was rotated for the "
        "position after its own. Output stayed right and acceptance fell; somebody printed positions to see it.",
        expected="W5",
        applies_to="drafts of two steps and more",
        applies=lambda setup: setup.drafts and setup.num_steps > 1,
        strike=_shift_positions,
        quiet=partial(lengthen_plans, pool="draft", kind="draft"),
    ),
    Fault(
        name="draft.chunk_tail_token",
        bugs=("sgl-project/sglang#26329", "ModelTC/LightLLM#1079", "NVIDIA/TensorRT-LLM#18295"),
        story="The drafter's entry at the end of a prompt chunk needs the next prompt token. Where the chunk is not "
        "the last one it got the token that was just sampled. Three engines made this mistake within ten months.",
        expected="W6",
        applies_to="drafts, prompts in chunks",
        needs={"chunk": CHUNK},
        applies=lambda setup: setup.drafts and setup.pages is None,
        strike=_feed_at_chunk_end,
        quiet=partial(lengthen_plans, pool="draft", kind="prefill", prompt=3 * CHUNK),
    ),
    Fault(
        name="draft.chunk_tail_in_output",
        bugs=("sgl-project/sglang#28254",),
        story="The next prompt token was looked up in the prompt as it was submitted. A retracted request is prefilled "
        "with its output, and where a chunk ended in there the drafter got the token that was just predicted. Greedy "
        "decoding hides it, since the prediction is the token.",
        expected="W6",
        applies_to="drafts, prompts in chunks, a pool under pressure",
        needs={
            "chunk": 4,
            "page_size": 4,
            "pages": 84,
            "batch": 6,
            "new_tokens": 32,
            "new_token_ratio": 0.0,
            "prefix_cache": False,
        },
        applies=lambda setup: setup.drafts and setup.model == "random" and setup.topk <= 2,
        strike=_feed_at_chunk_end_of_output,
        quiet=partial(lengthen_plans, pool="draft", kind="prefill", prompt=3 * CHUNK),
    ),
    Fault(
        name="draft.state_not_restored",
        bugs=("ggml-org/llama.cpp#20075",),
        story="Layers with a state in the place of K and V cannot be cut back by a length. After a verify the state "
        "was not taken back to the last accepted token, or from the wrong cell: loops, and crashes.",
        expected="RecurrentStateError",
        applies_to="models with recurrent layers",
        needs={"model": "hybrid", "prefix_cache": False},
        applies=lambda setup: (
            setup.drafts and setup.schedule == "sync" and setup.pages is None and setup.window is None
        ),
        perturb=_without_the_last_row,
        late=True,
        alone="a row that is not brought back is refused before anybody can go on from it",
    ),
    Fault(
        name="draft.token_offset_0",
        bugs=("mlc-ai/mlc-llm#2266",),
        story="The drafter's slot p holds the pair of features p and token p + 1. Its prompt was not shifted: slot p "
        "took token p, and drafts were poor from then on.",
        expected="W6",
        applies_to="drafts that hold pairs",
        applies=lambda setup: setup.drafts and setup.pages is None,
        strike=_forget_the_shift,
        quiet=partial(lengthen_plans, pool="draft", kind="prefill", prompt=3 * CHUNK),
    ),
    Fault(
        name="draft.child_attends_sibling",
        bugs=("sgl-project/sglang#8409",),
        story="Survivors of a selection took the K and V of their column, not of their parent: from the second level "
        "on, nodes attended siblings of their ancestors. It showed as warnings of invalid trees, and less acceptance.",
        expected="R5",
        applies_to="topk > 1, drafts of four steps and more; before that nothing drafted can contradict another",
        needs={"num_steps": 5, "topk": 4, "num_draft_tokens": None},
        applies=has_deep_branches,
        strike=_read_by_column,
        quiet=partial(lengthen_plans, pool="draft", kind="draft"),
    ),
    Fault(
        name="draft.columns_never_regathered",
        bugs=("sgl-project/sglang#8409",),
        story="The same as it was published: nothing is ever gathered, in no forward, so that every row reads what was "
        "written for its column and no chain contradicts another. Only the drafter knows whose child a row is. An "
        "engine may mean to do so, and says so then.",
        expected="R5",
        applies_to="topk > 1, drafts of three steps and more",
        needs={"num_steps": 5, "topk": 4, "num_draft_tokens": None},
        applies=lambda setup: has_deep_branches(setup) and setup.attend == "ancestors",
        perturb=_own_columns,
        place=_forwards_from,
        quiet_needs={"attend": "columns"},
    ),
    Fault(
        name="draft.placeholder_token",
        bugs=("vllm-project/vllm#46899", "vllm-project/vllm#40768"),
        story="An asynchronous scheduler puts placeholders where tokens are not known yet. A request that sat out one "
        "step kept its own, and they were fed as tokens. A rare crash in production, and not reproduced for long.",
        expected="W6",
        applies_to="drafts",
        applies=lambda setup: setup.drafts,
        strike=_feed_a_placeholder,
        cause="order",
        quiet=lengthen_plans,
    ),
    Fault(
        name="draft.rewind_by_count",
        bugs=("NVIDIA/TensorRT-LLM#10343", "sgl-project/sglang#26866"),
        story="After the verify the first n slots of the window were kept, where n nodes were accepted: the right "
        "number, and not the accepted path. More candidates made acceptance worse, which nobody could explain.",
        expected="R6",
        also=("R4", "R5"),
        applies_to="topk > 1",
        applies=lambda setup: setup.drafts and setup.topk > 1,
        perturb=_first_slots,
        late=True,
        quiet_needs={"topk": 1, "num_draft_tokens": None},
    ),
    Fault(
        name="draft.compaction_lost",
        bugs=("sgl-project/sglang#26866",),
        story="The move of accepted entries to the front of their window was declared, and copied nothing.",
        expected="T1",
        applies_to="topk > 1",
        applies=lambda setup: setup.drafts and setup.topk > 1,
        strike=partial(_lose_the_move, pool="target", late=True),
        cause="transfer",
        quiet=partial(move_in_another_order, pool="target"),
    ),
    Fault(
        name="draft.tail_copy_lost",
        story="Branches on pages of their own need the entries of the prefix's last page in front of them. The copy "
        "was not made, and branches but the first attended whatever lay there.",
        expected="T1",
        applies_to="topk > 1 with page_size > 1, attention by whole pages",
        needs={"backend": "paged"},
        applies=lambda setup: setup.has_tree_pages and setup.num_steps > 1 and setup.page_size > 1,
        bugs=("sgl-project/sglang#26866",),
        strike=partial(_lose_the_move, pool="draft", late=False),
        cause="transfer",
        quiet=partial(move_in_another_order, pool="draft"),
    ),
    Fault(
        name="draft.tail_not_copied",
        k="K04",
        story="The same copy, left out: nobody was told of one, and branches but the first read slots that nobody had "
        "written.",
        expected="R12",
        also=("R6",),  # an earlier step's copy lies there still
        applies_to="topk > 1 with page_size > 1, attention by whole pages",
        needs={"backend": "paged"},
        applies=lambda setup: setup.has_tree_pages and setup.num_steps > 1 and setup.page_size > 1,
        perturb=not_copied,
        cause="transfer",
        place=where_it_was_due,
        quiet=partial(move_in_another_order, pool="draft"),
    ),
    Fault(
        name="draft.move_untold",
        story="Accepted entries were moved to the front of their window by a path that does not declare its moves.",
        expected="R9",
        also=("R6", "R4", "R5"),
        applies_to="topk > 1",
        applies=lambda setup: setup.drafts and setup.topk > 1,
        strike=move_undeclared,
        cause="transfer",
        quiet=partial(move_in_another_order, pool="target"),
    ),
    Fault(
        name="draft.proposals_of_another_row",
        story="A request drafted from what was proposed to the row beside it in the batch. Every byte was right and so "
        "was the output, and next to nothing was accepted.",
        expected="RelayError",
        applies_to="several requests in a batch",
        applies=lambda setup: setup.drafts and setup.batch > 1 and setup.pages is None,
        perturb=of_the_row_beside,
        alone="what was proposed to a row is that row's alone",
    ),
    Fault(
        name="draft.child_not_chosen",
        story="The walk down the tree went to a child that the target had not chosen: a draft left as if it had been "
        "verified.",
        expected="AcceptanceError",
        applies_to="drafts",
        applies=lambda setup: setup.drafts,
        perturb=first_child,
        late=True,
        alone="a draft that is accepted is the token that leaves",
    ),
    Fault(
        name="draft.approximate_features",
        bugs=("vllm-project/vllm#14649",),
        story="Entries that the drafter wrote from its own guessed features were kept after the verify, and not "
        "written again from the target's: 8 to 15 % less acceptance. The bytes are what the code meant to write, so "
        "that no check of bytes or identity can see it.",
        expected="shorter accepted lengths",
        applies_to="drafts that take features",
        applies=lambda setup: setup.drafts,
        perturb=_own_features,
        late=True,
    ),
)
