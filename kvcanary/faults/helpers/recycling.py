"""Recycling: a page lives twice, as those of a busy pool do: it is granted, given back, waits, and is granted again."""

from __future__ import annotations

from kvcanary.faults.strike import need
from kvcanary.faults.target import Target

FORMER, NEXT = "former", "next"
TOKENS = (1, 2, 3)


def never_granted(target: Target) -> int:
    """The last of the free pages, which nobody has ever had; NotNow where somebody has."""
    free = target.free_pages()
    need(free and not target.canary.session.ledger.generations[free[-1]])
    return free[-1]


def recycle(target: Target, page: int) -> None:
    """A request has had this page, and it was poisoned when it came back."""
    target.canary.admit(FORMER, TOKENS)
    target.canary.on_alloc(FORMER, [page])
    target.canary.on_free(FORMER, [page])
    poisoner = target.canary.session.poisoner
    while page in poisoner.waiting:
        poisoner.tick()


def wait_out(target: Target) -> None:
    """What was freed has waited long enough."""
    steps = target.canary.config.quarantine
    target.canary.session.ledger.leave_quarantine(target.step + steps, steps)


def grant_again(target: Target, page: int) -> None:
    """The next one has it."""
    wait_out(target)
    target.canary.admit(NEXT, TOKENS)
    target.canary.on_alloc(NEXT, [page])
