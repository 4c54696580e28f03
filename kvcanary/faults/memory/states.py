"""Recurrent states: taken, kept, copied or cleared wrongly, where attention would have looked at rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcanary.faults.fault import Fault
from kvcanary.faults.target import Setup

if TYPE_CHECKING:
    from torch import Tensor

Paths = Sequence[Sequence[int]]
_DRAFTS = {"model": "hybrid", "prefix_cache": False, "topk": 2, "num_draft_tokens": None}
_PLAIN = {"model": "hybrid", "prefix_cache": False, "drafts": False}
_CAPTURED = _DRAFTS | {"graphs": True}
POOL = "recurrent"


def _drafting(setup: Setup) -> bool:
    return _sync(setup) and setup.drafts


def _captured(setup: Setup) -> bool:
    return setup.graphs and setup.backend in ("torch", "triton") and setup.pages is None and setup.window is None


def _drafting_captured(setup: Setup) -> bool:
    return _captured(setup) and setup.drafts


def _sync(setup: Setup) -> bool:
    """Steps that run as they come: what a captured one takes and keeps is decided on the device."""
    return setup.schedule == "sync" and not setup.graphs and setup.pages is None and setup.window is None


def _somewhere(value: Any, changed: Any, **where: Any) -> Mapping[str, Any]:
    return {"pool": POOL}


def _earlier(nodes: list[int], *, paths: Paths, parents: Paths) -> list[int]:
    """One that has accepted drafts keeps the state of one token fewer."""
    return _first(nodes, [path[-2:-1] for path in paths])


def _later(nodes: list[int], *, paths: Paths, parents: Paths) -> list[int]:
    """The state of a draft that follows what was accepted."""
    children = [
        [n for n, parent in enumerate(own) if parent == path[-1]] for own, path in zip(parents, paths, strict=True)
    ]
    return _first(nodes, children)


def _beside(nodes: list[int], *, paths: Paths, parents: Paths) -> list[int]:
    """The state of another child of the node before the last."""
    twins = [
        [n for n, parent in enumerate(own) if len(path) > 1 and parent == path[-2] and n != path[-1]]
        for own, path in zip(parents, paths, strict=True)
    ]
    return _first(nodes, twins)


def _first(nodes: list[int], others: Sequence[Sequence[int]]) -> list[int]:
    """The nodes, of the first request that has another one with that."""
    place = next((place for place, other in enumerate(others) if other), None)
    return [others[n][0] if n == place else node for n, node in enumerate(nodes)]


def _rotated(rows: Sequence[int]) -> list[int]:
    return [*rows[1:], *rows[:1]]


def _without_the_first(copies: tuple[list[int], list[int], list[int]]) -> tuple[list[int], ...]:
    return tuple(own[1:] for own in copies)


def _rolled(rows: Tensor) -> Tensor:
    """Of a captured batch, where 0 is padding: each row is the one before it, where that is live."""
    before = rows.roll(1)
    return before.where((rows > 0) & (before > 0), rows)


def _nobody(value: Tensor) -> Tensor:
    return value.new_zeros(value.shape)


def _clears_another(row: int, *, live: Sequence[int]) -> int:
    return next((other for other in live if other != row), row)


def _live_row(row: int, *, rows: Sequence[int], live: Sequence[int]) -> int:
    """A row that a request has and that is not in this forward; else row 0, as is right."""
    return next((other for other in live if other not in rows), row)


def _one_fewer(lens: Sequence[int], *, kind: str) -> list[int]:
    """Of the longest chunk of a prompt the last token is left out."""
    longest = max(lens)
    if kind != "prefill" or longest < 2:
        return list(lens)
    place = list(lens).index(longest)
    return [new - (n == place) for n, new in enumerate(lens)]


def _collide(columns: list[int]) -> list[int]:
    return [*columns[:-1], columns[-2]] if len(columns) > 1 else columns


def _yes(value: bool) -> bool:
    return True


FAULTS = (
    Fault(
        name="states.stale_column",
        bugs=("vllm-project/vllm#39273", "vllm-project/vllm#56531"),
        story="A verify leaves a state for each count of accepted drafts; a step began from the column of a count "
        "that was decided before.",
        expected="R4",
        applies_to="models with recurrent layers, with drafts",
        needs=_DRAFTS,
        applies=_drafting,
        perturb=_earlier,
        place=_somewhere,
        late=True,
        cause="draft",
        quiet_needs={"drafts": False},
    ),
    Fault(
        name="states.lookahead_kept",
        bugs=("vllm-project/vllm#43559", "vllm-project/vllm#53912"),
        story="A drafter ran ahead by one, and its draft was dropped; the state had absorbed it all the same.",
        expected="R4",
        applies_to="models with recurrent layers, with drafts",
        needs=_DRAFTS,
        applies=_drafting,
        perturb=_later,
        place=_somewhere,
        late=True,
        cause="draft",
        quiet_needs={"drafts": False},
    ),
    Fault(
        name="states.other_branch",
        story="Of two nodes at one depth the state of the one was kept, and the token of the other left.",
        expected="R5",
        applies_to="models with recurrent layers, with draft trees",
        needs=_DRAFTS,
        applies=lambda setup: _drafting(setup) and setup.topk > 1,
        perturb=_beside,
        place=_somewhere,
        late=True,
        cause="draft",
        quiet_needs={"drafts": False},
    ),
    Fault(
        name="states.copy_left_out",
        bugs=("vllm-project/vllm#53505",),
        story="The state was to be copied to where the next step looks for it; for one request nothing copied it.",
        expected="R4",
        applies_to="models with recurrent layers, with drafts",
        needs=_DRAFTS,
        applies=_drafting,
        perturb=_without_the_first,
        place=_somewhere,
        late=True,
        cause="transfer",
        quiet_needs={"drafts": False},
    ),
    Fault(
        name="states.copied_backwards",
        bugs=("vllm-project/vllm#53505",),
        story="Source and destination of the copy between two blocks of states were exchanged.",
        expected="T1",
        applies_to="models with recurrent layers, with drafts",
        needs=_DRAFTS,
        applies=_drafting,
        perturb=_yes,
        place=_somewhere,
        late=True,
        cause="transfer",
        quiet_needs={"drafts": False},
    ),
    Fault(
        name="states.bytes_into_neighbour",
        story="The kernel that copies states took its destinations in another order than the plan has them.",
        expected="T1",
        applies_to="models with recurrent layers, with drafts",
        needs=_DRAFTS | {"batch": 3},
        applies=_drafting,
        perturb=_rotated,
        place=_somewhere,
        late=True,
        cause="transfer",
        quiet_needs={"drafts": False},
    ),
    Fault(
        name="states.commit_into_neighbour",
        story="Accepted states were committed by the rows of another batch: each request goes on from its neighbour's.",
        expected="R4",
        also=("R5", "R6"),
        applies_to="models with recurrent layers, with drafts",
        needs=_DRAFTS | {"batch": 3},
        applies=_drafting,
        perturb=_rotated,
        place=_somewhere,
        late=True,
        cause="transfer",
        quiet_needs={"drafts": False},
    ),
    Fault(
        name="states.null_row",
        bugs=("lightseekorg/tokenspeed#700", "NVIDIA/TensorRT-LLM#13151"),
        story="What padding leaves goes to a null entry. Its index was clamped into the entries of requests that wait.",
        expected="R9",
        applies_to="models with recurrent layers, with trees of one size",
        needs=_DRAFTS | {"topk": 1, "num_steps": 2, "page_size": 4, "batch": 3, "on_device": 2},
        applies=lambda setup: _drafting(setup) and not setup.adaptive,
        perturb=_live_row,
        place=_somewhere,
        within=8,
        cause="lifetime",
        alone="a request goes on from the entry that was overwritten",
    ),
    Fault(
        name="states.foreign_row",
        story="Indices of states were in another order than the batch: each row went on from its neighbour's state.",
        expected="R8",
        applies_to="models with recurrent layers",
        needs=_PLAIN | {"batch": 3},
        applies=_sync,
        perturb=_rotated,
        place=_somewhere,
        cause="addressing",
        alone="rows go on from each other's states",
    ),
    Fault(
        name="states.cleared_another",
        story="The entry of a request that begins was to be cleared; a kernel cleared that of one which runs.",
        expected="R9",
        also=("R12",),
        applies_to="models with recurrent layers",
        needs=_PLAIN | {"batch": 4},
        applies=_sync,
        perturb=_clears_another,
        place=_somewhere,
        within=8,
        cause="lifetime",
        alone="a request goes on from the entry that was cleared",
    ),
    Fault(
        name="states.last_token_left_out",
        story="Attention and recurrent layers counted a chunk's tokens apart: the state was taken one token early.",
        expected="R4",
        applies_to="models with recurrent layers",
        needs=_PLAIN,
        applies=_sync,
        perturb=_one_fewer,
        place=_somewhere,
        within=4,
        cause="lengths",
        alone="a state that lacks a token is wrong for whoever goes on from it",
    ),
    Fault(
        name="states.two_nodes_one_column",
        story="The states of a tree's nodes were stored by an index that two of them had.",
        expected="W4",
        applies_to="models with recurrent layers, with drafts",
        needs=_DRAFTS,
        applies=_drafting,
        perturb=_collide,
        place=_somewhere,
        cause="addressing",
        quiet_needs={"drafts": False},
    ),
    Fault(
        name="states.rows_of_a_replay",
        story="A replay found the rows of states in another order than its batch has them: each request went on from "
        "its neighbour's state.",
        expected="R8",
        applies_to="models with recurrent layers, in captured steps of several requests",
        needs=_PLAIN | {"graphs": True, "batch": 3},
        applies=_captured,
        perturb=_rolled,
        place=_somewhere,
        cause="addressing",
        alone="rows go on from each other's states",
    ),
    Fault(
        name="states.root_kept",
        story="A captured verify knew where drafts were accepted and kept the state of its first token all the same.",
        expected="R4",
        applies_to="models with recurrent layers, in captured steps with drafts",
        needs=_CAPTURED,
        applies=_drafting_captured,
        perturb=_nobody,
        place=_somewhere,
        late=True,
        within=4,
        cause="draft",
        quiet_needs={"drafts": False},
    ),
    Fault(
        name="states.commit_of_nobody",
        story="Whether a request is decided was read behind the step that decides it: no state was kept.",
        expected="R4",
        applies_to="models with recurrent layers, in captured steps with drafts",
        needs=_CAPTURED,
        applies=_drafting_captured,
        perturb=_nobody,
        place=_somewhere,
        late=True,
        within=4,
        cause="transfer",
        quiet_needs={"drafts": False},
    ),
)
