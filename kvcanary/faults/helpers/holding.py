"""Pages that a cache or a forked row holds: taken away, cached when nobody has them, written when all may read them."""

from __future__ import annotations

from functools import partial

from kvcanary.faults.helpers.reach import any_reader, private_page, redirect, root_forward, written_of
from kvcanary.faults.target import Call, Running, Target

CHILD = "child"


def evict_a_locked_page(target: Target) -> bool:
    """A cache replaces a page that a running request holds too."""
    published = target.canary.session.ledger.pages.published
    for reader in target.running():
        held = [page for page in reader.pages if published[page]]
        if held:
            target.record()
            target.canary.on_evict([target.rng.choice(held)])
            return True
    return False


def remove_the_parent_first(target: Target) -> bool:
    """A row is forked, and its pages go with the first of the two that ends."""
    reader = any_reader(target)
    whole = 0 if reader is None else reader.committed_len // target.setup.page_size
    if reader is None or not whole:
        return False
    canary, pages = target.canary, list(reader.pages[:whole])
    canary.admit(CHILD, canary.session.ledger.request(reader.request_id).tokens.tolist())
    canary.on_fork(reader.request_id, CHILD, pages)
    target.record()
    canary.on_evict(pages[-1:])
    return True


def cache_a_freed_page(target: Target) -> bool:
    """A prefix tree takes, or keeps, a page that was given back; the next request of this prefix would hit it."""
    reader, page, _ = private_page(target)
    if reader is None:
        return False
    tokens = target.canary.session.ledger.request(reader.request_id).tokens.tolist()
    target.canary.on_free(reader.request_id, [page])
    target.record()
    target.canary.admit(CHILD, tokens)
    target.canary.on_acquire(CHILD, [page])
    return True


def hit_a_row_that_was_reused(target: Target) -> bool:
    """A tree keeps a view of a row, and the row names the pages of another request by now: these are what it gives."""
    reader, page, _ = private_page(target)
    if reader is None:
        return False
    target.record(request=CHILD)
    target.canary.admit(CHILD, [1, 2, 3])
    target.canary.on_acquire(CHILD, [page])
    return True


def write_what_is_published(target: Target) -> bool:
    """A block is cached that is still to be written."""
    size = target.setup.page_size

    def write(call: Call, reader: Running) -> bool:
        if call.pool != "target" or reader.request_id not in call.read.requests:
            return False
        slot = reader.pages[0] * size + target.rng.randrange(size)
        redirect(call, written_of(call, call.read.requests.index(reader.request_id)).start, slot)
        target.record(pool="target", slot=slot)
        return True

    for reader in target.running():
        if target.canary.session.ledger.request(reader.request_id).final_pages:
            target.canary.on_share(reader.request_id, list(reader.pages[:1]))
            target.before(root_forward(target), partial(write, reader=reader))
            return True
    return False
