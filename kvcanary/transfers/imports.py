"""Imports: records for bytes that came from elsewhere, from the request's own tokens and the bytes as they lie."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.pools.slot_maps import slots_in
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.record_store import RecordStore, no_records, two_words
from kvcanary.records.state import CanaryState, PoolState
from kvcanary_kernels.record.layout import (
    CHAIN,
    LAYERS_HIGH,
    LAYERS_LOW,
    REQUEST_GENERATION,
    TOKEN_POSITION,
    bitmap_columns,
)


def adopt(
    ledger: Ledger,
    record_store: RecordStore,
    state: CanaryState,
    pool: PoolState,
    request: Request,
    positions: NDArray[np.int64],
    step: int,
) -> None:
    """Seal and fingerprint the entries at these positions of the row; those whose token is not known stay unwritten."""
    offset = pool.view.token_offset
    positions = positions[positions + offset < len(request.tokens)]
    if not len(positions):
        return
    chains = ledger.truths(request, pool.pool_id, int(positions.max()) + 1)
    if chains is None:
        return
    names = np.array([ledger.slot(request, int(position)) for position in positions])
    slots = slots_in(pool.view, names)
    held = slots >= pool.view.null_slots  # a window may have left the others
    positions, slots, names = positions[held], slots[held], names[held]
    tokens = np.array(request.tokens, np.int64)[positions + offset].view(np.uint64)
    generations = ledger.generations[names // state.page_size].view(np.uint64)
    records = no_records(len(slots))
    records[:, TOKEN_POSITION] = two_words(tokens, positions.view(np.uint64))
    records[:, CHAIN] = chains[positions]
    records[:, REQUEST_GENERATION] = two_words(request.uid, generations)
    records[:, [LAYERS_LOW, LAYERS_HIGH]] = np.array(bitmap_columns(pool.full_layers), np.uint64)
    record_store.load(pool, slots, records, step)
    where = torch.from_numpy(slots).to(pool.records.device)
    pool.write_fingerprints(where, *fingerprints_of_slots(pool, where))
