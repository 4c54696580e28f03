"""Groups of workers; here there is one worker."""

from __future__ import annotations


class GroupCoordinator:
    def __init__(self, ranks: list[int], rank_in_group: int = 0) -> None:
        self.ranks, self.rank_in_group = ranks, rank_in_group


def get_tp_group() -> GroupCoordinator:
    return GroupCoordinator([0])
