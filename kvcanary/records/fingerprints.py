"""Fingerprints of slots: by a compiled loop in host memory, by the kernel on a GPU; and of one layer's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcanary.records.state import PoolState
from kvcanary_kernels.content.fingerprint import fingerprint, join, keyed_sums
from kvcanary_kernels.record.layout import CONTENT_B, Keys


def fingerprints_of_slots(pool: PoolState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Fingerprint a [layers, n] and fingerprint b [n] of the bytes that lie in the pool now."""
    fingerprint_a, fingerprint_b = slots.new_empty(pool.view.num_layers, len(slots)), slots.new_empty(len(slots))
    host = pool.host
    if host is None:
        fingerprint(pool.rows, slots, pool.keys, fingerprint_a=fingerprint_a, fingerprint_b=fingerprint_b)
    else:
        rows = host.address, host.layout, host.layer_keys[0], host.words, host.start_a
        pool.loops.sum_slots(
            *rows, host.start_b, slots.contiguous().numpy(), fingerprint_a.numpy(), fingerprint_b.numpy()
        )
    return fingerprint_a, fingerprint_b


def slots_are_right(pool: PoolState, slots: Tensor, both_fingerprints: bool = False) -> bool:
    """Whether fingerprint a of every layer, or both fingerprints, are those that are kept, for all of these slots.

    Of a pool whose memory is gone nothing is wrong: there is nothing to look at.
    """
    if pool.is_gone:
        return True
    if pool.host is not None:
        return pool.loops.match_slots(pool.struct_at, slots.contiguous().numpy(), both_fingerprints)
    fingerprint_a, fingerprint_b = fingerprints_of_slots(pool, slots)
    is_right = torch.equal(fingerprint_a, pool.content_a.index_select(1, slots))
    return is_right and (
        not both_fingerprints or torch.equal(fingerprint_b, pool.records[:, CONTENT_B].index_select(0, slots))
    )


def fingerprints_of_layer(pool: PoolState, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Fingerprint a [n] of one layer's rows [n, words_per_row] int32, and what they add to fingerprint b [n]."""
    return fingerprints_of_words(pool.keys, layer, rows)


def fingerprints_of_words(keys: Keys, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`fingerprints_of_layer` of rows that lie in no pool, with the keys of their layers."""
    fingerprints = keyed_sums(rows[None], keys.pieces[layer : layer + 1])[0].chunk(2, 1)
    fingerprint_a, fingerprint_b = (join(fingerprint, keys) for fingerprint in fingerprints)
    return fingerprint_a + keys.start_a[layer], fingerprint_b


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat` that leaves a single dense part as it is."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), dim)
