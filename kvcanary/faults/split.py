"""Pages that lie partly on the host: one that was not brought back, or elsewhere, or that the map does not know of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcanary.faults.fault import Fault
from kvcanary.faults.reach import root_forward
from kvcanary.faults.target import Call, Setup, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

NEEDS = {
    "on_device": 2,
    "batch": 4,
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
    """Whether the nodes of a verify fit on a page beside its row's last one."""
    return setup.page_size > setup.num_steps + 1


def _not_copied(pages: Sequence[int]) -> Sequence[int]:
    return ()


def _next_page(own: Sequence[int], *, num_own_pages: int) -> list[int]:
    return [page % num_own_pages + 1 for page in own]


def _leave_an_entry(target: Target) -> bool:
    """The map of one page leads to where another lies, as if it had not been written when that one came."""

    def leave(call: Call) -> bool:
        view, size = target.pools["target"], target.setup.page_size
        number = target.rng.randrange(len(call.read.requests))
        start, length = int(call.read.indptr[number * call.read.rows_per_request]), int(call.read.prefix_lens[number])
        if call.pool != "target" or view.slot_map is None or length < 2 * size:
            return False
        first = target.rng.randrange(length // size - 1) * size
        page, behind = call.read.indices[start + first : start + first + 2 * size].split(size)
        view.slot_map[page] = view.slot_map[behind]
        target.record(pool="target", slot=int(view.slot_map[page[0]]), position=frozenset({first, first + size}))
        return True

    target.before(root_forward(target), leave)
    return bool(target.running())


FAULTS = (
    Fault(
        name="split.swap_in_skipped",
        story="A page that lay on the host was given a place on the device, and its bytes were never copied there: the "
        "forward read what the page before had left.",
        expected="T1",
        applies_to="split pools",
        needs=NEEDS,
        applies=_has_room,
        perturb=_not_copied,
        cause="transfer",
    ),
    Fault(
        name="split.swap_in_elsewhere",
        story="Pages that came back were copied to the places behind theirs: they read what lay there before, and so "
        "did whoever had those places.",
        expected="T1",
        also=("R9",),
        applies_to="split pools",
        needs=NEEDS,
        applies=_has_room,
        perturb=_next_page,
        cause="transfer",
    ),
    Fault(
        name="split.stale_entry",
        story="The map of pages to places was written too late: a page of a row led to the place of the one behind it.",
        expected="R8",
        applies_to="split pools",
        needs=NEEDS,
        applies=_has_room,
        strike=_leave_an_entry,
        cause="addressing",
    ),
)
