"""Pages that a cache or a forked row holds: taken away, cached when nobody has them, written when all may read them."""

from __future__ import annotations

from kvcanary.faults.helpers.reach import Place, any_reader, private_page, redirect, strike_row, written_of
from kvcanary.faults.strike import NotNow, need
from kvcanary.faults.target import Call, Target

CHILD = "child"


def evict_a_locked_page(target: Target) -> None:
    """A cache replaces a page that a running request holds too."""
    published = target.canary.session.ledger.pages.published
    for reader in target.running():
        held = [page for page in reader.pages if published[page]]
        if held:
            target.record()
            target.canary.on_evict([target.rng.choice(held)])
            return
    raise NotNow


def remove_the_parent_first(target: Target) -> None:
    """A row is forked, and its pages go with the first of the two that ends."""
    reader = any_reader(target)
    whole = reader.committed_len // target.setup.page_size
    need(whole)
    canary, pages = target.canary, list(reader.pages[:whole])
    canary.admit(CHILD, canary.session.ledger.request(reader.request_id).tokens.tolist())
    canary.on_fork(reader.request_id, CHILD, pages)
    target.record()
    canary.on_evict(pages[-1:])


def cache_a_freed_page(target: Target) -> None:
    """A prefix tree takes, or keeps, a page that was given back; the next request of this prefix would hit it."""
    reader, page, _ = private_page(target)
    tokens = target.canary.session.ledger.request(reader.request_id).tokens.tolist()
    target.canary.on_free(reader.request_id, [page])
    target.record()
    target.canary.admit(CHILD, tokens)
    target.canary.on_acquire(CHILD, [page])


def hit_a_row_that_was_reused(target: Target) -> None:
    """A tree keeps a view of a row, and the row names the pages of another request by now: these are what it gives."""
    _, page, _ = private_page(target)
    target.record(request=CHILD)
    target.canary.admit(CHILD, [1, 2, 3])
    target.canary.on_acquire(CHILD, [page])


def write_what_is_published(target: Target) -> None:
    """A block is cached that is still to be written."""
    size, request = target.setup.page_size, target.canary.session.ledger.request
    final = [reader for reader in target.running() if request(reader.request_id).final_pages]
    need(final)
    name, page = final[0].request_id, final[0].pages[0]

    def write(call: Call, number: int) -> Place:
        slot = page * size + target.rng.randrange(size)
        redirect(call, written_of(call, number).start, slot)
        return {"slot": slot}

    target.canary.on_share(name, [page])
    strike_row(target, name, write)
