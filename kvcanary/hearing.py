"""Hearing: what a loop says of captured forwards before the rules look; it leaves them what is not as it should be."""

from __future__ import annotations

from array import array

from kvcanary.cards import LINE_BITS, NOWHERE, PAGES_FRESH, REWRITES
from kvcanary.learning import Launched
from kvcanary.mirror import Mirror
from kvcanary.outbox import Line
from kvcanary.pages import Pages
from kvcanary.static import StaticSubstep

BOUNDS, STARTS, ENDS, _, TOKENS, _, PARENTS, SAFE, _, MASK = range(10)  # parts of `StaticSubstep.written`


class Hearing:
    """Lines of captured forwards, looked through with what is true of pages and records."""

    def __init__(self, pages: Pages, mirror: Mirror) -> None:
        self._pages, self._mirror = pages, mirror
        self._books = array("q", (pages.states.ctypes.data, *mirror.flags_of_loops))
        self._books_at = self._books.buffer_info()[0]
        self._cards: dict[int, tuple[array[int], int]] = {}

    def hear(self, number: int, run: Launched, line: Line) -> int:
        """`loops.look_through` of a run of the substep of this number; where nothing is left to the rules, pages are
        written, and the mirror knows where new records lie.
        """
        substep = run.substep
        card = self._cards.get(number)
        if card is None:
            own = _card(substep)
            card = self._cards[number] = own, own.buffer_info()[0]
        seen = substep.pool.loops.look_through(card[1], self._books_at, line.at, *run.batch.told)
        if seen & PAGES_FRESH:
            safe, view = line[SAFE][: seen >> LINE_BITS], substep.pool.view
            self._pages.wrote(safe[safe >= view.null_slots] // view.page_size)
        self._mirror.heard(seen & REWRITES)
        return seen


def _card(substep: StaticSubstep) -> array[int]:
    """[LINE_CARD] (cards.py)."""
    where = [part.start if part.stop > part.start else NOWHERE for part in substep.written.line().where]
    parts = (where[part] for part in (BOUNDS, STARTS, ENDS, TOKENS, PARENTS, SAFE, MASK))
    nodes = 0 if substep.masks is None else substep.masks.device.shape[-1]
    rest = substep.forward.num_entries, substep.width, nodes, substep.site[0] == "draft"
    return array("q", (substep.pool.card_at, *parts, *map(int, rest)))
