"""What looks like a fault and is none: the legitimate operation nearest to one, or damage that nobody can read.

Quiet twins are made of these: each records that nothing is due.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvcanary.faults.helpers.reach import (
    SPREAD_BITS,
    Place,
    any_layer,
    any_reader,
    change,
    is_private,
    strike_forward,
    submit_prompt,
)
from kvcanary.faults.helpers.recycling import grant_again, never_granted, recycle
from kvcanary.faults.strike import NotNow, need
from kvcanary.faults.target import Call, Move, Target

if TYPE_CHECKING:
    from kvcanary.pools.plans import ReadPlan, WritePlan

VISITOR = "visitor"
PADDING = -1
Plan = TypeVar("Plan", "ReadPlan", "WritePlan")


def edit_behind_the_end(target: Target) -> None:
    """Columns of a row behind all that its request holds are changed, which nobody reads: nothing is due."""
    size = target.setup.page_size
    for reader in target.running():
        end = len(reader.pages) * size
        count = min(size, len(reader.slots) - end)
        if count > 0:
            reader.slots[end : end + count] = reader.slots[:count].clone()
            target.record(code="")
            return
    raise NotNow


def noise_in_a_free_page(target: Target) -> None:
    """A row of a page that nobody has had is overwritten, in one layer: nothing is due."""
    view, free = target.pools["target"], never_granted(target)
    noise = target.rng.randrange(1, 1 << SPREAD_BITS)
    change(view, any_layer(target, view), free * view.page_size, lambda words: words ^ noise)
    target.record(code="")


def recycle_as_it_is(target: Target) -> None:
    """A page that nobody has had is granted, given back, poisoned and granted again, and nobody touches it."""
    page = never_granted(target)
    target.record(code="")
    recycle(target, page)
    grant_again(target, page)


def come_and_go(target: Target, pages: int = 1) -> None:
    """A request that the engine does not know is granted pages, writes nothing and gives them back: nothing is due."""
    free = target.free_pages()[-pages:]
    need(len(free) >= pages and not any(target.canary.session.ledger.generations[page] for page in free))
    target.record(code="")
    target.canary.admit(VISITOR, [1, 2, 3])
    target.canary.on_alloc(VISITOR, free)
    target.canary.on_free(VISITOR, free)


def lengthen_plans(target: Target, pool: str = "target", kind: str = "", prompt: int = 0) -> None:
    """The arrays of a forward lie in longer buffers, with -1 and other entries behind their ends: nothing is due.

    kind: of the forward, by default the one that goes on with everybody; prompt: tokens of a new one that comes first
    """

    def lengthen(call: Call) -> Place:
        call.write = _in_longer_buffers(call.write, "slots", "tokens", "positions")
        call.read = _in_longer_buffers(call.read, "indptr", "indices", "prefix_lens")
        return {"code": ""}

    strike_forward(target, lengthen, pool, kind=kind)
    if prompt:
        submit_prompt(target, prompt)


def _in_longer_buffers(plan: Plan, *names: str) -> Plan:
    """The same numbers; what follows them in memory are the same again, backwards, and a mark of padding."""
    import torch

    longer: dict[str, Any] = {}
    for name in names:
        own = getattr(plan, name)
        longer[name] = torch.cat((own, own.flip(0), own.new_full((1,), PADDING)))[: len(own)]
    return replace(plan, **longer)


def move_in_another_order(target: Target, pool: str) -> None:
    """Rows are moved from the last one on: all sources are read before anything is written, so nothing is due."""

    def reverse(move: Move) -> bool:
        if move.pool != pool or len(move.source) < 2:
            return False
        move.source, move.destination = move.source.flip(0), move.destination.flip(0)
        target.record(code="")
        return True

    need(target.running())
    target.on_move(reverse)


def hit_and_give_back(target: Target) -> None:
    """A request that the engine does not know hits a published page, and gives it back: nothing is due."""
    canary = target.canary
    hit = [reader for reader in target.running() if canary.session.ledger.pages.published[reader.pages[0]]]
    need(hit)
    reader = target.rng.choice(hit)
    target.record(code="")
    canary.admit(VISITOR, canary.session.ledger.request(reader.request_id).tokens.tolist())
    canary.on_acquire(VISITOR, list(reader.pages[:1]))
    canary.on_free(VISITOR, list(reader.pages[:1]))


def map_nothing_elsewhere(target: Target) -> None:
    """The map of a page that nobody holds leads to where another lies: nothing is due."""
    view, size, free = target.pools["target"], target.setup.page_size, target.free_pages()
    if view.slot_map is None or not free or not target.running():
        raise NotNow
    page, other = (number * size for number in (free[-1], target.running()[0].pages[-1]))
    view.slot_map[page : page + size] = view.slot_map[other : other + size].clone()
    target.record(code="")


def remove_the_child_first(target: Target) -> None:
    """A row is forked, and the one that was forked from it ends first: its pages are the other's again."""
    reader = any_reader(target)
    whole = reader.committed_len // target.setup.page_size
    need(whole and all(is_private(target, page) for page in reader.pages[:whole]))
    canary, pages = target.canary, list(reader.pages[:whole])
    target.record(code="")
    canary.admit(VISITOR, canary.session.ledger.request(reader.request_id).tokens.tolist())
    canary.on_fork(reader.request_id, VISITOR, pages)
    canary.on_free(VISITOR, pages)


def work_on_a_current_page(target: Target) -> None:
    """A copy is planned for the grant that its page has, and has come to its end before anybody goes on."""
    reader = any_reader(target)
    page, async_tracker = target.rng.choice(reader.pages), target.canary.async_tracker
    target.record(code="")
    grant = int(target.canary.session.ledger.generations[page])
    async_tracker.complete(async_tracker.issue("save", "connector", reads={page: grant}))
