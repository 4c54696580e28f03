"""Pages that lie partly on the host: one that was not brought back, or elsewhere, or that the map does not know of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def _fault(name: str, story: str, expected: str, cause: str, **more: Any) -> Fault:
    settings: dict[str, Any] = {"needs": NEEDS, "applies": _has_room, "quiet": map_nothing_elsewhere, "cause": cause}
    return Fault(f"split.{name}", story, expected, **(settings | more))


FAULTS = (
    _fault(
        "swap_in_skipped",
        "A page that lay on the host was given a place on the device, and its bytes were never copied there: the "
        "forward read what the page before had left.",
        "T1",
        "transfer",
        applies_to="split pools, pages whose bytes do not lie where they go",
        perturb=_not_copied,
    ),
    _fault(
        "swap_in_elsewhere",
        "Pages that came back were copied to the places behind theirs: they read what lay there before, and so "
        "did whoever had those places.",
        "T1",
        "transfer",
        also=("R9",),
        applies_to="split pools, pages whose bytes do not lie where they go",
        perturb=_next_page,
    ),
    _fault(
        "stale_entry",
        "The map of pages to places was written too late: a page of a row led to the place of the one behind it.",
        "R8",
        "addressing",
        applies_to="split pools",
        strike=leave_a_map_entry,
    ),
)
