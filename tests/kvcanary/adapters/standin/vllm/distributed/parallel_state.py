"""Groups of workers; here there is one worker."""

from __future__ import annotations


class GroupCoordinator:
    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks


def get_tp_group() -> GroupCoordinator:
    return GroupCoordinator([0])
