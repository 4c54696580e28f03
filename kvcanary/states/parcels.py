"""Parcels: what is known of states whose bytes leave for a while, to be compared when they come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvcanary.errors import ContradictionError, ForeignSnapshotError


@dataclass(frozen=True)
class LeftState:
    """One state as it left: its record, and what was a draft in it."""

    uid: int
    absorbed: int
    chain: int | None
    drafts: tuple[int, ...]
    entry: int


@dataclass(frozen=True, eq=False)
class StateSnapshot:
    """States that left together, in order.

    fingerprint_a: [layers, n] int64; None where content is not compared
    seed_id, layout: of the keys and of the view that made them
    """

    states: tuple[LeftState, ...]
    fingerprint_a: Tensor | None
    seed_id: str
    layout: str

    def expect_own(self, entries: Sequence[int], seed_id: str, layout: str) -> None:
        """ContradictionError unless as many come back as left; ForeignSnapshotError for other keys or another view."""
        if len(entries) != len(self.states):
            raise ContradictionError(
                f"a snapshot must come back into as many entries as it left, got {len(entries)} for {len(self.states)}"
                ": load what was put away together, in the same order"
            )
        for what, own, found in (("seed", seed_id, self.seed_id), ("view", layout, self.layout)):
            if own != found:
                raise ForeignSnapshotError(
                    f"a snapshot of states must come back under the {what} that made it, got {found} for {own}: give "
                    "both canaries one seed and one view, or load without a snapshot",
                    expected=own,
                    found=found,
                )
