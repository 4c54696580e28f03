"""Pages that are given back too early, in pieces, by another name, or by a list or key that is no longer true."""

from __future__ import annotations

from kvcanary.faults.helpers.reach import any_reader, private_page
from kvcanary.faults.helpers.recycling import wait_out
from kvcanary.faults.strike import NotNow, need
from kvcanary.faults.target import Target

CHILD = "child"


def free_a_page_that_is_read(target: Target) -> None:
    """A page of a running row is given back, and the row still points at it."""
    _free_one(target)


def grant_a_page_that_is_read(target: Target) -> None:
    """The same, and another request has it by the time at which it is read."""
    page = _free_one(target)
    wait_out(target)
    target.canary.admit(CHILD, [1, 2, 3])
    target.canary.on_alloc(CHILD, [page])


def _free_one(target: Target) -> int:
    """The page that was given back, of a row that goes on."""
    reader, page, position = private_page(target)
    slot = int(reader.slots[position])
    target.record(reader=reader.request_id, pool="target", position=position, slot=slot)
    target.canary.on_free(reader.request_id, [page])
    return page


def free_the_halves_of_a_page(target: Target) -> None:
    """A row comes back in two pieces, whose seam lies inside a page: both name it."""
    reader = any_reader(target)
    pages = [page for page in reader.pages if target.canary.session.ledger.owner_of(page) == reader.request_id]
    need(len(pages) >= 2)
    target.record(request=f"page {pages[-2]}")
    target.canary.on_free(reader.request_id, pages[-2:])
    target.canary.on_free(reader.request_id, pages[-2:-1])


def free_slots_for_pages(target: Target) -> None:
    """Slots of tokens are given back where numbers of pages belong."""
    size = target.setup.page_size
    for reader in target.running():
        slots = [slot for slot in reader.slots[: reader.committed_len].tolist() if slot not in reader.pages]
        if slots and size > 1:
            slot = target.rng.choice(slots)
            target.record(request=str(slot))
            target.canary.on_free(reader.request_id, [slot])
            return
    raise NotNow


def free_by_an_old_key(target: Target) -> None:
    """A free was planned by a key, and comes when the key stands for a page that somebody else was granted."""
    _, page, _ = private_page(target)
    generation = int(target.canary.session.ledger.generations[page])
    target.record(pool="target", slot=page * target.setup.page_size)
    target.canary.async_tracker.issue("deferred free", "main", writes={page: generation - 1})


def save_an_old_list(target: Target) -> None:
    """A connector saves the blocks of a list that only grows, after a rewind has given the last of them back."""
    free = [page for page in target.free_pages() if target.canary.session.ledger.generations[page]]
    need(free)
    page = target.rng.choice(free)
    generation = int(target.canary.session.ledger.generations[page])
    target.record(pool="target", slot=page * target.setup.page_size)
    target.canary.async_tracker.issue("save", "connector", reads={page: generation - 1})
