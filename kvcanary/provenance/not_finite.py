"""Not finite: which elements of a stored row are NaN or infinite, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary.pools.views import PoolView
from kvcanary.provenance.slipped_rows import span
from kvcanary_kernels.content.finite import finite_check
from kvcanary_kernels.record.rows import PoolRows

ROWS_AT_ONCE = 256  # of which a few copies are held


def layers_not_finite(rows: PoolRows, slots: Tensor) -> list[tuple[int, ...]]:
    """By slot, valid ones [n] int64 where the pool lies, the layers with an element that is not finite; waits for the
    device.
    """
    found = []
    for part in slots.contiguous().split(ROWS_AT_ONCE):
        bits = torch.zeros(len(part), 2, dtype=torch.int64, device=part.device)
        finite_check(rows, part, mismatch=bits, launches=False)
        found += [layers_of_bits(low, high, rows.num_layers) for low, high in bits.tolist()]
    return found


def layers_of_bits(low: int, high: int, num_layers: int) -> tuple[int, ...]:
    """Of the two columns of a bitmap."""
    return tuple(n for n in range(num_layers) if (low, high)[n // 64] >> n % 64 & 1)


def describe_elements(view: PoolView, layer: int, slot: int) -> str:
    """`NaN in 3 of 64 elements of K, the first in head 0, dim 5`; empty where all are finite now."""
    [row] = view.rows.gather_layer(layer, torch.tensor([slot], device=view.device))
    told = []
    for part, piece in zip(view.parts, view.rows.pieces, strict=True):
        values = row[span(piece)].view(torch.uint8).view(part.dtype).cpu().to(torch.float64)
        bad = (~torch.isfinite(values)).nonzero()[:, 0]
        if len(bad):
            first, kinds = int(bad[0]), _kinds(values[bad])
            place = f"head {first // part.dim}, dim {first % part.dim}"
            told.append(f"{kinds} in {len(bad)} of {len(values)} elements of {part.name}, the first in {place}")
    return "; ".join(told)


def _kinds(values: Tensor) -> str:
    """`NaN`, `Inf`, `-Inf`, or several of them."""
    signs = (("NaN", values.isnan()), ("Inf", values == torch.inf), ("-Inf", values == -torch.inf))
    return " and ".join(name for name, where in signs if bool(where.any()))
