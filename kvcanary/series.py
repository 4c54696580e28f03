"""Series: captured forwards that are launched together, and what of them stays the same from launch to launch."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from kvcanary.cards import RUN_ACCEPTED, RUN_CARD, RUN_KEEP, RUN_LINE, RUN_LINE_CARD, RUN_PLACES
from kvcanary.errors import PlanError
from kvcanary.forward import Ints
from kvcanary.outbox import LINES
from kvcanary.seats import StaticAcceptance
from kvcanary.static import StaticSubstep


class Series:
    """Forwards of one kind and pool that run one behind the other; made by `SubstepBank.series`.

    count:      how many, without a call
    acceptance: of the step whose tokens they write, one forward then; None: the host says how many entries
    places:     numbers that such a step tells of a request: how many tokens, then these; else 0
    cards:      by line, [forwards * RUN_CARD] int64 (cards.py): what is known before a launch
    num_kept:   numbers that are kept of clean runs, beside what was accepted
    comes_once: its forward is no captured one
    """

    __slots__ = ("acceptance", "cards", "comes_once", "count", "num_kept", "places", "substeps")

    def __init__(self, substeps: Sequence[StaticSubstep], acceptance: StaticAcceptance | None = None) -> None:
        kinds = {f"{substep.site[0]} of the {substep.pool.name} pool" for substep in substeps}
        if len(kinds) != 1:
            what = ", ".join(sorted(kinds)) or "none"
            raise PlanError(
                f"forwards that are launched together must be of one kind and pool, got {what}: launch each"
            )
        if acceptance is not None and len(substeps) != 1:
            raise PlanError(f"what a step accepts must be written by one forward, got {len(substeps)}: launch each")
        self.substeps, self.count, self.acceptance = tuple(substeps), len(substeps), acceptance
        self.comes_once = any(substep.number is None for substep in substeps)
        self.places = 0 if acceptance is None else 1 + acceptance.places
        self.num_kept = 0 if self.comes_once else sum(substep.num_kept for substep in substeps)
        self.cards = [self._cards_of(turn) for turn in range(1 if self.comes_once else LINES)]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[StaticSubstep]:
        return iter(self.substeps)

    def __str__(self) -> str:
        return ", ".join(map(str, self.substeps))

    def accepted(self, turn: int) -> Ints | None:
        """[size, places], what the step has accepted that runs before them in this turn."""
        if self.acceptance is None:
            return None
        return self.acceptance.told.line_of(turn)[0].reshape(-1, self.places)

    def _cards_of(self, turn: int) -> array[int]:
        cards = array("q", bytes(8 * RUN_CARD * len(self.substeps)))
        for number, substep in enumerate(self.substeps):
            first = RUN_CARD * number
            cards[first + RUN_LINE_CARD] = substep.line_card_at
            cards[first + RUN_LINE] = substep.written.line_of(turn).at
            cards[first + RUN_KEEP], cards[first + RUN_PLACES] = substep.num_kept, self.places
            if self.acceptance is not None:
                cards[first + RUN_ACCEPTED] = self.acceptance.told.line_of(turn).at
        return cards
