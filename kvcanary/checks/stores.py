"""Storing: the fingerprints of values on their way into a pool, taken at the store and written when they are sealed.

What is not finite is seen in the same reading.

They are those of what was to be stored, not of what the pool holds now.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from kvcanary.calls.entries import fired_writes
from kvcanary.calls.forward import Forward
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.native.layout import FORWARD
from kvcanary.provenance.not_finite import layers_not_finite
from kvcanary.records.fingerprints import fingerprints_of_layer, joined
from kvcanary.records.state import PoolState
from kvcanary_kernels.record.formats import words_not_finite
from kvcanary_kernels.record.layout import signed
from kvcanary_kernels.record.rows import WORD_BYTES

FINGERPRINTS_BYTES = 16  # of one entry and layer


def take_fingerprints(forward: Forward, fingerprints: Tensor, layer: int, values: Sequence[Tensor]) -> None:
    """What a layer stores: `pool.view.value_shapes(n)`, K, V and extras in logical order.

    fingerprints: [layers, 2, n] int64 out, fingerprint a of each layer, and what it adds to fingerprint b
    """
    pool, host = forward.pool, forward.pool.host
    if host is None:
        row = _words(pool, values)
        fingerprints[layer] = torch.stack(fingerprints_of_layer(pool, layer, row))
        if pool.asks_finite:
            found, before = words_not_finite(row, pool.lanes).any(), forward.not_finite
            forward.not_finite = found if before is None else before.logical_or(found)
        return
    n, keys, start = forward.num_entries, host.layer_keys[layer], host.starts[layer]
    out = forward.fingerprints_at + layer * n * FINGERPRINTS_BYTES
    if len(values) == 2:  # K and V as a model gives them, or a split view of its product
        (k, v), (own, other) = values, host.parts
        k_stride, v_stride, k_at, v_at = k.stride(), v.stride(), k.data_ptr(), v.data_ptr()
        k_step, v_step = k_stride[0] * own.size, v_stride[0] * other.size
        if (
            k_stride[1:] == own.inner
            and v_stride[1:] == other.inner
            and k.dtype is own.dtype
            and v.dtype is other.dtype
            and not (k_at | v_at | k_step | v_step) % WORD_BYTES
            and k.is_cpu
            and v.is_cpu
        ):
            pool.loops.sum_values(k_at, k_step, own.words, v_at, v_step, other.words, n, keys, start, out, forward.head)
            return
    row, step = _words(pool, values), WORD_BYTES * host.words
    pool.loops.sum_values(row.data_ptr(), step, host.words, 0, 0, 0, n, keys, start, out, forward.head)


def judge_finite(forward: Forward) -> list[ViolationBatch]:
    """N1 for every entry of which some layer has stored NaN or infinity; at least for the first that did."""
    first = forward.first_not_finite
    if first is None:
        return []
    pool, layers = forward.pool, np.zeros((forward.num_entries, forward.pool.view.num_layers), np.bool_)
    for entry, found in enumerate(layers_not_finite(pool.rows, forward.pool_slots)):
        layers[entry, list(found)] = True
    if forward.memory[FORWARD.not_finite]:  # known where it was stored, whatever lies there now
        layers[first[1], first[0]] = True
    which = np.flatnonzero(layers.any(1) & (forward.planned.slots >= pool.view.null_slots))
    return [fired_writes("N1", forward, which, layers=layers)]


def keep_fingerprints(forward: Forward) -> None:
    """Write the fingerprints where re-reads will compare them; the records of this forward must be sealed.

    What a layer did not store is taken as it lies in the pool: R12 names it, R9 need not.
    """
    pool, fingerprints, host = forward.pool, forward.fingerprints, forward.pool.host
    if fingerprints is None:
        return
    if forward.stored != pool.full_layers:
        for layer in range(pool.view.num_layers):
            if not forward.stored >> layer & 1:
                fingerprints[layer] = torch.stack(
                    fingerprints_of_layer(pool, layer, pool.rows.gather_layer(layer, forward.pool_slots))
                )
    if host is None:
        _keep_on_device(forward, fingerprints)
    else:
        slots = forward.planned.slots
        pool.loops.keep_fingerprints(
            slots, fingerprints.numpy(), host.start_b, host.content_a, host.records, host.expected
        )


def _keep_on_device(forward: Forward, fingerprints: Tensor) -> None:
    last = dict(zip(forward.write_slots, range(len(forward.write_slots)), strict=True))  # W4 may repeat a slot
    slots, entries = (torch.tensor(list(values), device=fingerprints.device) for values in (last, last.values()))
    fingerprint_a, fingerprint_b = fingerprints.index_select(2, entries).unbind(1)
    forward.pool.write_fingerprints(slots, fingerprint_a, fingerprint_b.sum(0).add_(signed(forward.pool.keys.start_b)))


def _words(pool: PoolState, values: Sequence[Tensor]) -> Tensor:
    """[n, words_per_row] int32: the rows that these values are in the pool, in fresh memory."""
    device = pool.records.device
    typed = [
        value.to(device, part.dtype).reshape(len(value), -1)
        for part, value in zip(pool.view.parts, values, strict=True)
    ]
    return joined(
        [torch.cat(list(same), 1).view(torch.int32) for _, same in groupby(typed, lambda part: part.dtype)], 1
    )
