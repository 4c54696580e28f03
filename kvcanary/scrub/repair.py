"""Repair: put one changed 32-bit word back, verified by both fingerprints; everything else is refused.

A slot is written only when its record is sealed, one layer's fingerprint a and fingerprint b disagree, and one word
alone explains both differences. The word is read and written in the pool itself; nothing else of the slot is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch

from kvcanary.errors import RepairRefusedError
from kvcanary.provenance.changed_word import (
    ChangedWord,
    WordChange,
    describe_change,
    fingerprint_differences,
    fitting_changes,
)
from kvcanary.records.state import PoolState
from kvcanary_kernels.record.layout import MASK_32, read_record, seal_host

RECOMPUTE = "drop its page and recompute it from token ids"


@dataclass(frozen=True)
class Repair:
    """A word that was put back: both fingerprints of its slot agree with the record again.

    word: `old` is what lies in the pool now, `new` what was found there
    """

    pool: str
    slot: int
    word: ChangedWord


@torch.inference_mode()
def repair_slot(pool: PoolState, slot: int) -> Repair:
    """Restore the one changed word of a slot.

    The caller orders this against the forwards that write the slot, and first lets held fingerprints be written: a
    slot whose fingerprint is still to come is refused. RepairRefusedError, with every byte as it was found, where it
    is not certain that exactly one word changed.
    """
    _expect_slot(pool, slot)
    _expect_record(pool, slot)
    differs_a, differs_b = fingerprint_differences(pool, slot)
    layer = _the_layer(pool, slot, differs_a, differs_b)
    change = _the_change(pool, slot, layer, fitting_changes(pool, slot, layer, differs_a[layer], differs_b))
    repair = Repair(pool.name, slot, describe_change(pool, slot, change))
    _write(pool, slot, change, change.old)
    left_a, left_b = fingerprint_differences(pool, slot)
    if any(left_a) or left_b:
        _write(pool, slot, change, change.new)
        _refuse(pool, slot, "not_verified", f"layer {layer} still disagrees after the patch, which was undone")
    return repair


def _expect_slot(pool: PoolState, slot: int) -> None:
    view = pool.view
    if not 0 <= slot < view.num_slots:
        _refuse(pool, slot, "out_of_range", f"the pool has slots 0 to {view.num_slots - 1}", "name one of them")
    if slot < view.null_slots:
        _refuse(pool, slot, "null_slot", f"slots 0 to {view.null_slots - 1} are padding's and hold nothing", "leave it")


def _expect_record(pool: PoolState, slot: int) -> None:
    """The fingerprints are what the record says only where the record is whole."""
    found = read_record(pool.records, slot)
    seal, all_layers = seal_host(found, slot, pool.pool_id, pool.keys), (1 << pool.view.num_layers) - 1
    if found.seal != seal:
        _refuse(pool, slot, "record_damaged", f"its record has the seal 0x{found.seal:016x}, not 0x{seal:016x}")
    if found.layers != all_layers:
        words = f"its record names layers 0x{found.layers:x} as written, all are 0x{all_layers:x}"
        _refuse(pool, slot, "unwritten", words)


def _the_layer(pool: PoolState, slot: int, differs_a: list[int], differs_b: int) -> int:
    """The one layer whose bytes changed."""
    layers = [layer for layer, difference in enumerate(differs_a) if difference]
    named = ", ".join(map(str, layers))
    if not layers and not differs_b:
        _refuse(pool, slot, "nothing_differs", "both fingerprints agree with its bytes", "leave it")
    if not layers:
        words = "fingerprint b alone differs: the record was damaged"
        _refuse(pool, slot, "fingerprint_hit", words, "take fingerprint b from the bytes")
    if not differs_b:
        words = f"fingerprint a differs in layer {named}, fingerprint b is right: it was damaged, not the bytes"
        _refuse(pool, slot, "fingerprint_hit", words, "take fingerprint a from the bytes")
    if len(layers) > 1:
        _refuse(pool, slot, "many_layers", f"layers {named} differ, one word lies in one layer")
    return layers[0]


def _the_change(pool: PoolState, slot: int, layer: int, fits: list[WordChange]) -> WordChange:
    if not fits:
        _refuse(pool, slot, "many_words", f"no single word of layer {layer} explains both fingerprints")
    if len(fits) > 1:
        numbers = ", ".join(str(change.number) for change in fits)
        _refuse(pool, slot, "ambiguous", f"words {numbers} of layer {layer} each explain both fingerprints, one must")
    return fits[0]


def _write(pool: PoolState, slot: int, change: WordChange, word: int) -> None:
    """Write one word where it lies, and no other."""
    place = [piece.first + piece.words <= change.number for piece in pool.rows.pieces].index(False)
    piece, view = pool.rows.pieces[place], pool.rows.parts[place][change.layer]
    page, offset = divmod(slot, piece.page_size)
    run, column = divmod(change.number - piece.first, piece.run)
    view[page, offset, run, column] = word - (1 << 32) if word > MASK_32 >> 1 else word


def _refuse(pool: PoolState, slot: int, reason: str, why: str, remedy: str = RECOMPUTE) -> NoReturn:
    message = f"slot {slot} of pool {pool.name!r} is not repaired, {why}: {remedy}"
    raise RepairRefusedError(message, pool=pool.name, slot=slot, reason=reason)
