"""Programs: captured steps, of which nothing can be said any more once they are captured."""

from __future__ import annotations

from kvcanary.invariants.errors import MissingHooksError


def check_hooked(forward: str, pool: str, size: int, has_hooks: bool) -> None:
    """Where there is a canary, every forward of a program for ``size`` requests has its hooks in it."""
    if not has_hooks:
        raise MissingHooksError(
            f"{forward} of the {pool} pool has no hooks in the captured program for {size} requests, the canary counts "
            "on those of every forward: make each by StaticForwards.hook()"
        )
