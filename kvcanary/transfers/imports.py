"""Imports: records for bytes that came from elsewhere, from the request's own tokens and the bytes as they lie.

And what is known of bytes whose memory goes and comes, when an engine sleeps, wakes, or allocates a pool anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.calls.violation import Violation
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.pools.launch_site import KIND_NUMBERS, SUBSTEP_KINDS
from kvcanary.pools.slot_maps import slots_in
from kvcanary.provenance.arrival import SHORT, Arrival, Origin, PoolArrival, Sent, Trip
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.record_store import RecordStore, no_records, two_words
from kvcanary.records.state import CanaryState, PoolState
from kvcanary_kernels.content.poison import NAN_WORD, poison_words
from kvcanary_kernels.record.layout import (
    CHAIN,
    LAYERS_HIGH,
    LAYERS_LOW,
    REQUEST_GENERATION,
    STEP_SITE,
    TOKEN_POSITION,
    bitmap_columns,
)

STORED = [KIND_NUMBERS[kind] for kind in SUBSTEP_KINDS]
AT_ONCE = 64  # slots whose rows are copied to look at them
MOST_STORED = 256  # slots that are looked at to know which extras are never filled
SLOTS_AT_ONCE = 1 << 14  # of a pool whose memory came


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


def did_not_arrive(
    pool: PoolState, pages: Mapping[int, int], page_size: int, request_id: str, step: int
) -> list[Violation]:
    """T1 of pages that a load without a seal has filled in part: K is there, say, and its scales, or a layer, are not.

    Zeros or the poison of freed pages were brought by nobody, where other parts or layers of the same entry hold
    something: K or V of a layer, or an extra in every layer, since some layers may have no use for it. An extra that
    what forwards stored leaves empty, too, is one that the engine never fills. The first entry of each page is looked
    at.

    pages: what was loaded, and the position in the row at which each page begins
    """
    names = np.array(list(pages), np.int64) * page_size
    slots = slots_in(pool.view, names)
    held = np.flatnonzero(slots >= pool.view.null_slots)  # a window may have left the others
    filled = _filled(pool, torch.from_numpy(slots[held]).to(pool.records.device)).cpu().numpy()
    num_own = 2 if pool.view.v else 1
    filled[num_own:] |= filled[num_own:].any(1, keepdims=True)
    if not filled[num_own:].all():
        filled[num_own:] |= _never_filled(pool)[num_own:, None, None]
    partly = np.flatnonzero(filled.any((0, 1)) & ~filled.all((0, 1)))
    if not len(partly):
        return []
    numbers, total, how_many = list(pages), pool.view.num_layers, f"{len(partly)} of {len(pages)}"
    lacks = ~filled[:, :, partly[0]]
    layers = tuple(np.flatnonzero(lacks.any(0)).tolist())
    parts = " and ".join(pool.view.parts[part].name for part in np.flatnonzero(lacks.any(1)).tolist())
    where = "" if len(layers) == total else f" of {len(layers)} of {total} layers"
    text = f"{parts}{where} did not arrive: in {how_many} pages zeros or poison lie there, and the rest came"
    origins = {n * page_size: Origin(SHORT, detail=text) for n in held[partly].tolist()}
    arrival = Arrival(
        Trip("load", step, page_size, [(Sent(0, step, ()), n, page) for n, page in enumerate(pages)]),
        SHORT,
        Counter({SHORT: len(partly)}),
        (PoolArrival(pool.name, layers, total, names, origins),),
        (),
        sentences={SHORT: text},
        evidence={SHORT: ("the first entry of each page was read, in every layer; the load came without a seal",)},
    )
    expected = {"arrives": " and ".join(part.name for part in pool.view.parts)}
    found = {"verdict": SHORT, "missing": parts, "came_back_by": "load", "pages_wrong": how_many}
    return [
        Violation(
            *("T1", pool, int(slots[n]), pages[numbers[n]], request_id, ("load", 0), step, layers),
            named=None if pool.view.slot_map is None else int(names[n]),
            arrival=arrival,
            arrived_as=n * page_size,
            expected=expected,
            found=found | {"into_page": numbers[n]},
        )
        for n in held[partly].tolist()
    ]


def _never_filled(pool: PoolState) -> NDArray[np.bool_]:
    """[parts] whether the last entries that forwards stored have nothing there; False where none was stored."""
    kinds = pool.records[:, STEP_SITE] >> 32 & 0xFF
    stored = torch.isin(kinds, torch.tensor(STORED, device=kinds.device)).nonzero()[-MOST_STORED:, 0]
    filled = _filled(pool, stored).cpu().numpy()
    filled = filled[:, :, filled.any((0, 1))]  # others were freed since
    return np.asarray(~filled.any((1, 2)) if filled.size else np.zeros(len(filled)), bool)


def _filled(pool: PoolState, slots: Tensor) -> Tensor:
    """[parts, layers, n] bool: whether a part of these slots holds anything but zeros and poison."""
    rows, words = pool.rows, pool.rows.words_per_row
    filled = torch.ones(len(rows.pieces), rows.num_layers, len(slots), dtype=torch.bool, device=slots.device)
    for some, found in zip(slots.split(AT_ONCE), filled.split(AT_ONCE, 2), strict=True):
        lies = rows.gather(some)
        poison = poison_words(some, 0, rows.num_layers * words).view(-1, rows.num_layers, words).transpose(0, 1)
        for number, piece in enumerate(rows.pieces):
            own = slice(piece.first, piece.first + piece.words)
            for empty in (0, NAN_WORD, poison[:, :, own]):
                found[number] &= (lies[:, :, own] != empty).any(2)
    return filled


def forget_bytes(pool: PoolState, record_store: RecordStore, step: int) -> None:
    """No layer of any slot is written any more, whoever wrote it: who reads an entry reads what is gone (R12)."""
    rows, layers = slice(pool.base, pool.base + pool.view.num_slots), slice(LAYERS_LOW, LAYERS_HIGH + 1)
    record_store.memory[rows, layers] = 0
    for records in (pool.records, pool.expected):
        records[:, layers] = 0
    record_store.epoch += 1
    record_store.judged[:] = False
    pool.cleared_in = step


@torch.inference_mode()
def take_as_it_lies(state: CanaryState, pool: PoolState) -> None:
    """What lies in the pool now is what its slots should hold, until somebody writes there."""
    for first in range(0, pool.view.num_slots, SLOTS_AT_ONCE):
        end = min(first + SLOTS_AT_ONCE, pool.view.num_slots)
        slots = state.ints(np.arange(first, end).tolist())
        pool.write_fingerprints(slots, *fingerprints_of_slots(pool, slots))
