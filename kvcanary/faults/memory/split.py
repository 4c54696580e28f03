"""Pages that lie partly on the host: one that was not brought back, or elsewhere, or that the map does not know of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers.harmless import map_nothing_elsewhere
from kvcanary.faults.helpers.reach import leave_a_map_entry
from kvcanary.faults.target import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NEEDS = {
    "on_device": 2,
    "batch": 6,
    "topk": 1,
    "num_steps": 2,
    "num_draft_tokens": None,
    "adaptive": False,
    "graphs": False,
    "host_pages": 0,
    "window": None,
    "pages": None,
    "model": "random",
}


def _has_room(setup: Setup) -> bool:
    """Whether the nodes of a verify fit on a page beside its row's last one, and rows have two whole pages."""
    return setup.page_size > setup.num_steps + 1 and 2 * setup.page_size <= setup.prompt_len


def _not_copied(pages: Sequence[int], *, is_there: Callable[[], bool]) -> Sequence[int]:
    """Where the same bytes lie already, still or of a head that prompts share, what is not copied is not missed."""
    return pages if is_there() else ()


def _next_page(own: Sequence[int], *, num_own_pages: int, is_there: Callable[[], bool]) -> Sequence[int]:
    """Where the same bytes lie already, the copy goes there: no row would read what it should not."""
    return own if is_there() else [page % num_own_pages + 1 for page in own]


FAULTS = (
    Fault(
        name="split.swap_in_skipped",
        story="A page that lay on the host was given a place on the device, and its bytes were never copied there: the "
        "forward read what the page before had left.",
        expected="T1",
        applies_to="split pools, pages whose bytes do not lie where they go",
        needs=NEEDS,
        applies=_has_room,
        perturb=_not_copied,
        cause="transfer",
        quiet=map_nothing_elsewhere,
    ),
    Fault(
        name="split.swap_in_elsewhere",
        story="Pages that came back were copied to the places behind theirs: they read what lay there before, and so "
        "did whoever had those places.",
        expected="T1",
        also=("R9",),
        applies_to="split pools, pages whose bytes do not lie where they go",
        needs=NEEDS,
        applies=_has_room,
        perturb=_next_page,
        cause="transfer",
        quiet=map_nothing_elsewhere,
    ),
    Fault(
        name="split.stale_entry",
        story="The map of pages to places was written too late: a page of a row led to the place of the one behind it.",
        expected="R8",
        applies_to="split pools",
        needs=NEEDS,
        applies=_has_room,
        strike=leave_a_map_entry,
        cause="addressing",
        quiet=map_nothing_elsewhere,
    ),
)
