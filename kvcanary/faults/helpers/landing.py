"""Writes that come too late: into a row, a page or bytes that have another owner by then, or none."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvcanary.faults.helpers.reach import SPREAD_BITS, Place, any_layer, change, private_page, redirect, strike_forward
from kvcanary.faults.helpers.recycling import grant_again, never_granted, recycle
from kvcanary.faults.strike import UNDECLARED, need
from kvcanary.faults.target import Call, Target

if TYPE_CHECKING:
    from torch import Tensor


def rewrite_a_row(target: Target) -> None:
    """The row of a running request is given to another one, and filled, while a forward still reads it."""
    running = sorted(target.running(), key=lambda one: one.committed_len)
    need(len(running) >= 2)
    reader, other = running[0], running[-1]
    size, owner_of = target.setup.page_size, target.canary.session.ledger.owner_of
    length = reader.committed_len // size * size
    differs = [p for p in range(length) if int(reader.slots[p]) != int(other.slots[p])]
    need(differs and owner_of(int(other.slots[differs[0]]) // size) is not None)
    reader.slots[:length] = other.slots[:length].clone()
    first = differs[0]
    target.record(other.request_id, reader=reader.request_id, position=first, slot=int(reader.slots[first]))


def write_after_the_end(target: Target) -> None:
    """A forward still writes for a request whose pages went back."""
    running = list(target.running())
    need(len(running) >= 2)
    gone, size = target.rng.choice(running), target.setup.page_size
    unfinished = gone.pages[gone.committed_len // size :]  # a cache takes the whole ones
    own = [page for page in unfinished if target.canary.session.ledger.owner_of(page) == gone.request_id]
    need(own)
    target.cancel(gone.request_id)

    def write(call: Call) -> Place:
        redirect(call, target.rng.randrange(len(call.write.slots)), own[-1] * size)
        return {"slot": own[-1] * size}

    strike_forward(target, write)


def end_during_a_transfer(target: Target) -> None:
    """A request is aborted while bytes are still on their way into its pages."""
    running = list(target.running())
    need(len(running) > 1)
    gone = target.rng.choice(running)
    need(target.canary.session.ledger.owner_of(gone.pages[-1]) == gone.request_id)
    target.canary.async_tracker.issue("remote write", "network", writes=[gone.pages[-1]])
    target.record(pool="target", slot=gone.pages[-1] * target.setup.page_size)
    target.cancel(gone.request_id)


def land_in_a_freed_page(target: Target) -> None:
    """The write of a transfer lands after its pages went back, before they are granted again."""
    view, page = target.pools["target"], never_granted(target)
    recycle(target, page)
    layer, slot = any_layer(target, view), page * view.page_size + target.rng.randrange(view.page_size)
    change(view, layer, slot, partial(_noise, target))
    target.record(pool="target", slot=slot)
    grant_again(target, page)


def land_in_a_granted_page(target: Target) -> None:
    """It lands after another request has written there."""
    reader, _, position = private_page(target)
    view = target.pools["target"]
    layer, slot = any_layer(target, view), int(reader.slots[position])
    change(view, layer, slot, partial(_noise, target))
    target.record(UNDECLARED, pool="target", slot=slot, position=position, layer=layer)


def _noise(target: Target, words: Tensor) -> Tensor:
    for place in range(len(words)):
        words[place] ^= target.rng.randrange(1, 1 << SPREAD_BITS)
    return words
