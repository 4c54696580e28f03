"""Finite: slots of which an element is NaN or infinite.

A reader of whole pages multiplies what it masks by zero, and NaN times zero is NaN: what nobody has written must be
finite too.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.arguments import expect_dense, expect_int64, expect_records, live_indices
from kvcanary_kernels.record.bitmap import bitmaps_of, layers_at_once, layers_where
from kvcanary_kernels.record.device import COLUMNS, REQUEST_GENERATION, live_count, tl, triton
from kvcanary_kernels.record.formats import format_constants, is_not_finite, lanes_of, words_not_finite
from kvcanary_kernels.record.rows import PoolRows


def finite_check(
    rows: PoolRows,
    slots: Tensor,
    *,
    mismatch: Tensor,
    num_live: Tensor | None = None,
    records: Tensor | None = None,
    grants: Tensor | None = None,
    launches: bool = True,
) -> None:
    """Look for elements of the rows of `slots` that are NaN or infinite (R9, in its clause U1). May be captured.

    slots:    [n] int64; a slot outside the pool leaves its output as it is
    mismatch: [n, 2] int64 out, bit l of the 128: layer l has such an element (columns: layers 0 to 63, 64 to 127)
    num_live: [1] int64, entries at and after it are padding and stay as they are; None: all live
    records:  [num_slots, 8] int64, as the canary wrote them; None: every slot is asked, whoever wrote it
    grants:   [n] int64, generations: an entry whose record is of this one was written since and stays as it is

    Slots and grants may lie in pinned memory of the host.
    """
    n = slots.numel()
    if (records is None) is not (grants is None):
        raise ValueError("records and grants must be given together, got one of them: a record has no grant to be of")
    if records is not None:
        expect_records(records)
    expect_int64(n, slots=slots, grants=grants)
    expect_int64(1, num_live=num_live)
    expect_dense((n, 2), mismatch=mismatch)
    if n == 0:
        return
    if launches:
        _finite_check_kernel[(n,)](
            rows.ptrs,
            slots,
            mismatch,
            slots if num_live is None else num_live,
            slots if records is None else records,
            slots if grants is None else grants,
            n,
            rows.num_slots,
            rows.num_layers,
            PIECES=rows.constants,
            FORMATS=format_constants(rows),
            ALIGNMENT=rows.alignment,
            LAYERS=layers_at_once(rows.num_layers),
            CHUNK=rows.chunk,
            HAS_LIVE=num_live is not None,
            HAS_GRANTS=grants is not None,
        )
        return
    entries = live_indices(slots, rows.num_slots, num_live)
    if records is not None and grants is not None:
        entries = torch.arange(n, device=slots.device)[entries]
        written = records[slots[entries], record.REQUEST_GENERATION] >> 32
        entries = entries[written != grants[entries]]
    slots = slots[entries]
    lanes = lanes_of(rows)
    mismatch[entries] = bitmaps_of(
        words_not_finite(rows.gather_layer(layer, slots), lanes).any(1) for layer in range(rows.num_layers)
    )


finite_check_torch = partial(finite_check, launches=False)


@triton.jit(do_not_specialize=["n"])
def _finite_check_kernel(
    ptrs,
    slots,
    mismatch,
    num_live,
    records,
    grants,
    n,
    num_slots,
    num_layers,
    PIECES: tl.constexpr,
    FORMATS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    LAYERS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    HAS_GRANTS: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    if i_n >= live_count(num_live, n, HAS_LIVE):
        return
    slot = tl.load(slots + i_n)
    if (slot < 0) | (slot >= num_slots):
        return
    if HAS_GRANTS:
        written = tl.load(records + slot * COLUMNS + REQUEST_GENERATION) >> 32
        if written == tl.load(grants + i_n):
            return
    low, high = layers_where(is_not_finite, slot, ptrs, num_layers, FORMATS, PIECES, ALIGNMENT, LAYERS, CHUNK)
    tl.store(mismatch + 2 * i_n, low)
    tl.store(mismatch + 2 * i_n + 1, high)
