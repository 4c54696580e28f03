"""Saved pages: records of bytes that an engine puts away, kept while it does, and sealed anew when they are back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvcanary.entries import Entries, named
from kvcanary.forward import Ints
from kvcanary.groups import slots_in
from kvcanary.intake import HitBatch
from kvcanary.lanes import lane_a_of_slots
from kvcanary.ledger import Ledger, Request
from kvcanary.mirror import Mirror, Words, two_words
from kvcanary.sites import pack_site
from kvcanary.state import CanaryState, PoolState
from kvcanary_kernels.record import CONTENT_B, REQUEST_GENERATION, SEAL, STEP_SITE, TOKEN_POSITION


@dataclass(frozen=True, eq=False)
class SavedEntries:
    """What the canary knew of some entries of one page in one pool.

    offsets:   [n] int64, in the page
    records:   [n, 8]
    content_a: [layers, n] int64; content_b: [n] int64
    """

    offsets: Ints
    records: Words
    content_a: Tensor
    content_b: Tensor


@dataclass(frozen=True, eq=False)
class SavedPage:
    """One page that was put away: by pool what had been written there under the grant that it had."""

    by_pool: tuple[SavedEntries, ...]


def save_page(state: CanaryState, ledger: Ledger, mirror: Mirror, page: int) -> SavedPage:
    """All fingerprints must have been written."""
    return SavedPage(tuple(_save(state, ledger, mirror, pool, page) for pool in state.pools))


def _save(state: CanaryState, ledger: Ledger, mirror: Mirror, pool: PoolState, page: int) -> SavedEntries:
    slots = slots_in(pool.view, page * state.page_size + np.arange(state.page_size))
    records = mirror.table[pool.base + np.maximum(slots, 0)]
    is_current = records[:, REQUEST_GENERATION] >> 32 == ledger.generations[page]
    offsets = np.flatnonzero(is_current & (slots >= pool.view.null_slots))
    where = torch.from_numpy(slots[offsets]).to(pool.records.device)
    content_b = pool.expected.select(1, CONTENT_B).index_select(0, where)
    return SavedEntries(offsets, records[offsets], pool.content_a.index_select(1, where), content_b)


class Restorer:
    """Records of pages whose bytes have come back; what arrived is compared with what was put away."""

    def __init__(self, state: CanaryState, ledger: Ledger, mirror: Mirror, compares_content: bool) -> None:
        self._state, self._ledger, self._mirror = state, ledger, mirror
        self._compares_content = compares_content

    def restore(self, request: Request, pages: Sequence[int], saved: Sequence[SavedPage], step: int) -> list[HitBatch]:
        """T1 for every entry whose bytes differ. Stages must have been told to forget these pages' slots."""
        hits: list[HitBatch] = []
        for pool in self._state.pools:
            for page, kept in zip(pages, saved, strict=True):
                hits += self._restore(pool, request, page, kept.by_pool[pool.pool_id], step)
        return hits

    def _restore(self, pool: PoolState, request: Request, page: int, kept: SavedEntries, step: int) -> list[HitBatch]:
        names = page * self._state.page_size + kept.offsets
        slots = slots_in(pool.view, names)
        held = slots >= pool.view.null_slots  # a window may have left the others
        slots, names, records = slots[held], names[held], kept.records[held]
        if not len(slots):
            return []
        records[:, REQUEST_GENERATION] = two_words(request.uid, self._ledger.generations[page])
        records[:, STEP_SITE] = two_words(step, pack_site("load", 0))
        records[:, CONTENT_B], records[:, SEAL] = 0, pool.seal_term
        self._mirror.write(pool.base + slots, records)
        self._mirror.flush()
        where = torch.from_numpy(slots).to(pool.records.device)
        own = torch.from_numpy(held).to(where.device)
        pool.write_lanes(where, kept.content_a[:, own], kept.content_b[own])
        positions = (records[:, TOKEN_POSITION] >> 32).view(np.int64)
        self._ledger.note_moved(pool.pool_id, names, positions)
        entries = Entries(slots, positions, np.zeros_like(slots), [request.request_id], names=named(pool, names))
        return self._arrived(pool, where, entries, step) if self._compares_content else []

    def _arrived(self, pool: PoolState, slots: Tensor, entries: Entries, step: int) -> list[HitBatch]:
        differs = (lane_a_of_slots(pool, slots) != pool.content_a.index_select(1, slots)).T.cpu().numpy()
        which = np.flatnonzero(differs.any(1))
        return [entries.fired("T1", pool, ("move", 0), step, which, layers=differs)] if len(which) else []
